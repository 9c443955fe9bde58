"""Reads log-probabilities of prompts from servers' answers: `prompt_logprobs` and `echo`. Pure.

An answer without them is a LabError: a server that ignores the field must not pass for one that scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ridgeline.engine.schedule.step import TokenLogprob
from ridgeline.lab.errors import LabError
from ridgeline.lab.evaluate.scoring.likelihood import Likelihood
from ridgeline.lab.evaluate.subjects.subject import Scored


def prompt_entries(answer: dict[str, Any], ids: Sequence[int]) -> list[TokenLogprob]:
    """vLLM's form: one object per prompt token, from token id to logprob and rank; the first is null."""
    choice = answer["choices"][0]
    entries = choice.get("prompt_logprobs") or answer.get("prompt_logprobs")
    if not isinstance(entries, list) or len(entries) != len(ids):
        raise LabError("the answer has no prompt_logprobs for every token")
    found = []
    for token, entry in zip(ids[1:], entries[1:], strict=True):
        own = entry.get(str(token)) if isinstance(entry, dict) else None
        if not isinstance(own, dict) or not isinstance(own.get("logprob"), int | float):
            raise LabError(f"prompt_logprobs has no value for token {token}")
        ranked = sorted(entry.items(), key=lambda item: -item[1]["logprob"])
        top = [(int(id), float(one["logprob"])) for id, one in ranked]
        rank = own.get("rank")
        better = sum(one["logprob"] > own["logprob"] for one in entry.values())
        found.append(
            TokenLogprob(
                token, float(own["logprob"]), int(rank) if isinstance(rank, int) else better + 1, top
            )
        )
    return found


def echoed(answer: dict[str, Any], start: int, end: int) -> Scored:
    """The older form: `logprobs` with text_offset; tokens that begin in [start, end) are the continuation."""
    logprobs = answer["choices"][0].get("logprobs")
    if not isinstance(logprobs, dict):
        raise LabError("the answer to an echo has no logprobs")
    columns = [logprobs.get(name) for name in ("token_logprobs", "text_offset", "top_logprobs")]
    if not all(isinstance(column, list) for column in columns[:2]):
        raise LabError("the answer to an echo has no token_logprobs or text_offset")
    values, offsets, tops = columns
    assert values is not None
    assert offsets is not None
    total, count, is_greedy = 0.0, 0, True
    for place, (value, offset) in enumerate(zip(values, offsets, strict=True)):
        if not start <= offset < end or value is None:
            continue
        total, count = total + float(value), count + 1
        best = tops[place] if isinstance(tops, list) and place < len(tops) else None
        if isinstance(best, dict) and best:
            is_greedy = is_greedy and float(value) >= max(map(float, best.values())) - 1e-6
        else:
            is_greedy = False
    if not count:
        raise LabError("the echo has no log-probability of the given text: the server does not echo prompts")
    return Scored(Likelihood(total, is_greedy, count), None)
