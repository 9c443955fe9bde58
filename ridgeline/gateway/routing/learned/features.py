"""Text features that embeddings miss: length, numbers, lines, signs, language. Takes a few microseconds."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ridgeline.gateway.routing.learned.language import language_of

Features = npt.NDArray[np.float32]

READ_CHARS = 4_000  # of a text; its length counts whole
NAMES = (
    "log_chars",
    "digit_share",
    "log_numbers",
    "log_lines",
    "log_longest_line",
    "sign_share",
    "word_chars",
    "code_share",
    "log_options",
    "question_marks",
    "not_ascii_share",
    "is_english",
)
_NUMBER = re.compile(r"\d+")
_OPTION = re.compile(r"^\s*\(?[A-Ha-h1-9][.)]\s", re.MULTILINE)
_SIGNS = frozenset("+-*/=^<>%$\\")
_CODE = frozenset("{}[]();_#|&`")


def features_of(text: str) -> list[float]:
    """In the order of NAMES: shares of the characters read, and logs of counts."""
    part = text[:READ_CHARS]
    chars = max(len(part), 1)
    words = part.split()
    lines = part.split("\n")
    signs, code, digits, foreign = _counts(part)
    return [
        math.log1p(len(text)),
        digits / chars,
        math.log1p(len(_NUMBER.findall(part))),
        math.log1p(len(lines) - 1),
        math.log1p(max(map(len, lines))),
        signs / chars,
        sum(map(len, words)) / max(len(words), 1),
        code / chars,
        math.log1p(len(_OPTION.findall(part))),
        math.log1p(part.count("?")),
        foreign / chars,
        float(language_of(part) == "en"),
    ]


def feature_rows(texts: Sequence[str]) -> Features:
    return np.array([features_of(text) for text in texts], np.float32).reshape(len(texts), len(NAMES))


def _counts(part: str) -> tuple[int, int, int, int]:
    """Counts each kind of character with str.count, far faster than a loop over the text."""
    signs = sum(map(part.count, _SIGNS))
    code = sum(map(part.count, _CODE))
    digits = sum(map(part.count, "0123456789"))
    foreign = 0 if part.isascii() else len(part) - len(part.encode("ascii", "ignore"))
    return signs, code, digits, foreign


@dataclass(frozen=True, slots=True)
class Recipe:
    """Which text of a request is embedded. Must be the same for fitting and for deciding.

    The time of an embedding is proportional to its tokens, and the first tokens matter most: truncate early.
    """

    head_chars: int = 240
    tail_chars: int = 0
    max_tokens: int = 48  # the hard limit, enforced by the embedding server
    prior_turns: int = 2  # user turns before the last, if that is short

    def text(self, turns: Sequence[str]) -> str:
        """The last user turn, truncated; earlier turns precede it as far as there is room."""
        if not turns:
            return ""
        text = self._cut(turns[-1].strip())
        room = self.head_chars + self.tail_chars - len(text)
        for turn in reversed(turns[-1 - self.prior_turns : -1]):
            if room <= 1:
                break
            part = turn.strip()[: room - 1]
            text = f"{part}\n{text}"
            room -= len(part) + 1
        return text

    def _cut(self, text: str) -> str:
        if len(text) <= self.head_chars + self.tail_chars:
            return text
        return text[: self.head_chars] + (" … " + text[-self.tail_chars :] if self.tail_chars else "")
