"""Cascade: ask the cheap model first, and the strong one only if the cheap answer has a low confidence.

Confidence comes from the answer's log-probabilities. Pure functions, called by the pipeline for an answer
that is not streamed; for a stream the model is chosen before, or the stream is held back until judged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from ridgeline.gateway.body import Fields, field, raw

DEFAULT_THRESHOLD = 0.7
TAIL_SHARE = 0.1  # share of the least likely tokens: an answer depends on a few of them
KINDS = ("chat", "completions")  # whose answers carry log-probabilities


@dataclass(frozen=True, slots=True)
class Cascade:
    """threshold: the least confidence, 0 to 1, with which a cheap answer is kept."""

    threshold: float = DEFAULT_THRESHOLD

    def confidence(self, body: bytes) -> float | None:
        """The model's confidence; None if the answer has no log-probabilities."""
        return confidence(body)

    def accept(self, body: bytes) -> bool:
        """An answer without log-probabilities is kept: it is already paid for."""
        found = confidence(body)
        return found is None or found >= self.threshold


def ask_for_logprobs(kind: str, fields: Fields) -> bool:
    """Set `logprobs` in the request if the client did not. Returns whether it was changed."""
    if kind not in KINDS:
        return False
    if kind == "chat":
        if field(fields, "logprobs", bool, False):
            return False
        fields["logprobs"] = raw(True)
        return True
    if field(fields, "logprobs", object, None) is not None:
        return False
    fields["logprobs"] = raw(0)
    return True


def strip_logprobs(body: bytes) -> bytes:
    """The answer without the log-probabilities that the client did not ask for."""
    answer = msgspec.json.decode(body)
    for choice in _choices(answer):
        if "logprobs" in choice:
            choice["logprobs"] = None
    return msgspec.json.encode(answer)


def confidence(body: bytes) -> float | None:
    """The geometric mean probability of the least likely tenth of the tokens, of the least confident choice.

    A mean over all tokens hides the one number that is wrong in a long, fluent answer; the minimum alone
    is moved by a single rare word. Refusals, tool calls and empty answers are not treated specially.
    """
    try:
        answer = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    sureness = [found for choice in _choices(answer) if (found := _choice_confidence(choice)) is not None]
    return min(sureness) if sureness else None


def tail_confidence(logprobs: list[float]) -> float | None:
    if not logprobs:
        return None
    worst = sorted(logprobs)[: max(1, math.ceil(len(logprobs) * TAIL_SHARE))]
    return math.exp(max(sum(worst) / len(worst), -700.0))


def _choice_confidence(choice: dict[str, Any]) -> float | None:
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, dict):
        return None
    tokens = [token for token in logprobs.get("content") or () if isinstance(token, dict)]  # chat
    values = [token.get("logprob") for token in tokens] or logprobs.get("token_logprobs") or []  # completions
    return tail_confidence([float(value) for value in values if isinstance(value, (int, float))])


def _choices(answer: Any) -> Iterator[dict[str, Any]]:
    choices = answer.get("choices") if isinstance(answer, dict) else None
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict):
            yield choice
