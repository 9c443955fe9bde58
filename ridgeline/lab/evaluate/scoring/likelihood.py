"""Outcomes of items that are scored by log-probability: choices, contexts, last words and texts.

lm-eval's definitions. `acc` takes the largest sum of log-probabilities; `acc_norm` divides by the characters
of the choice, `acc_bytes` by its UTF-8 bytes (equal for ASCII). Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from ridgeline.lab.errors import LabError
from ridgeline.lab.evaluate.tasks.items import Choices, Contexts, LastWord, Passage

_FIRST_WORD = re.compile(r"\s*\S+")


class Pair(NamedTuple):
    """A continuation to be scored after a context; an empty context stands for the start of a text."""

    context: str
    continuation: str

    def split_at_word(self) -> Pair:
        """Spaces at the end of the context go to the continuation, where tokens begin with them."""
        kept = self.context.rstrip()
        return Pair(kept, self.context[len(kept) :] + self.continuation) if kept else self


class Likelihood(NamedTuple):
    """Of one continuation: the sum over its tokens, and whether each token was the most likely."""

    logprob: float
    is_greedy: bool
    tokens: int


def pairs_of(item: Choices | Contexts | LastWord | Passage, has_prefix: bool = True) -> list[Pair]:
    """The continuations that decide an item.

    has_prefix: a token precedes every text. Without one a text's first word is the context of the others.
    """
    if isinstance(item, Choices):
        return [Pair(item.prompt, item.delimiter + choice) for choice in item.choices]
    if isinstance(item, Contexts):
        return [Pair(context, item.continuation) for context in item.contexts]
    if isinstance(item, LastWord):
        return [Pair(item.context, item.word)]
    if has_prefix:
        return [Pair("", item.text)]
    first = _FIRST_WORD.match(item.text)
    if first is None or not item.text[first.end() :].strip():
        raise LabError(f"text {item.id}: one word alone has no score, as no token precedes it")
    return [Pair(first[0], item.text[first.end() :])]


def judged(
    item: Choices | Contexts | LastWord | Passage, found: Sequence[Likelihood], has_prefix: bool = True
) -> tuple[dict[str, float], str]:
    """(values, answer) of the item."""
    if isinstance(item, Choices):
        return _choice(item, [one.logprob for one in found])
    if isinstance(item, Contexts):
        best = _largest([one.logprob for one in found])
        return {"acc": float(best == item.gold)}, str(best)
    (only,) = found
    if isinstance(item, LastWord):
        return {"acc": float(only.is_greedy), "logprob": only.logprob}, "greedy" if only.is_greedy else ""
    (pair,) = pairs_of(item, has_prefix)
    return {
        "logprob": only.logprob,
        "tokens": float(only.tokens),
        "words": float(len(pair.continuation.split())),
        "bytes": float(len(pair.continuation.encode())),
    }, ""


def _choice(item: Choices, logprobs: Sequence[float]) -> tuple[dict[str, float], str]:
    best = _largest(logprobs)
    by_characters = _largest([p / max(len(c), 1) for p, c in zip(logprobs, item.choices, strict=True)])
    by_bytes = _largest([p / max(len(c.encode()), 1) for p, c in zip(logprobs, item.choices, strict=True)])
    values = {
        "acc": float(best == item.gold),
        "acc_norm": float(by_characters == item.gold),
        "acc_bytes": float(by_bytes == item.gold),
    }
    return values, str(best)


def _largest(values: Sequence[float]) -> int:
    """The first of the largest, as numpy's argmax."""
    return max(range(len(values)), key=lambda place: (values[place], -place))
