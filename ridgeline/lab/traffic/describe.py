"""Properties of traffic: rate, burstiness, lengths, shared prefixes. Printed before runs and stored with
them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ridgeline.lab.traffic.request import Traffic


@dataclass(frozen=True, slots=True)
class LengthFacts:
    """Tokens."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: int
    total: int

    def line(self) -> str:
        return (
            f"mean {self.mean:,.0f}, p50 {self.p50:,.0f}, p90 {self.p90:,.0f}, p99 {self.p99:,.0f}, "
            f"longest {self.max:,}"
        )


@dataclass(frozen=True, slots=True)
class Description:
    """rps: arrivals (first turns) per second, None for closed loops. gap_cv: of the gaps between them.

    ideal_hit: share of all prompt tokens that an unlimited cache would contain: the same prefix blocks as in
    an earlier request, or the history of the conversation. ideal_block_hit: the same in whole and partial
    blocks, as papers state it; None if there is no prefix information.
    """

    name: str
    requests: int
    duration_s: float
    rps: float | None
    gap_cv: float | None
    input: LengthFacts
    output: LengthFacts
    ideal_hit: float
    ideal_block_hit: float | None
    prefix_blocks: int
    prefix_block_tokens: int
    conversations: int
    turns_mean: float
    notes: tuple[str, ...]

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """For terminal output."""
        if self.rps is None:
            pace = "all at once, or as a closed loop takes them"
        else:
            cv = "" if self.gap_cv is None else f", gap CV {self.gap_cv:.2f}"
            pace = f"{self.rps:.3g} arrivals/s over {self.duration_s:,.1f} s{cv}"
        found = [f"{self.name}: {self.requests:,} requests, {pace}"]
        if self.conversations:
            found.append(f"{self.conversations:,} conversations of {self.turns_mean:.1f} turns on average")
        if self.input.max:
            found.append(f"input tokens: {self.input.line()}")
        found.append(f"output tokens: {self.output.line()}")
        if self.ideal_hit:
            blocks = (
                ""
                if self.ideal_block_hit is None
                else f" ({self.ideal_block_hit:.1%} of blocks of {self.prefix_block_tokens} tokens)"
            )
            found.append(f"prefix sharing: {self.ideal_hit:.1%} of prompt tokens came before{blocks}")
        return found + [f"note: {note}" for note in self.notes]


def describe(traffic: Traffic) -> Description:
    at = np.array([request.at for request in traffic.requests if request.turn == 0])
    gaps = np.diff(np.sort(at))
    has_rate = len(at) > 1 and at.max() > 0
    hit_tokens, block_hit, blocks = _sharing(traffic)
    members = {request.conversation for request in traffic.requests if request.conversation is not None}
    turns = sum(1 for request in traffic.requests if request.conversation is not None)
    return Description(
        name=traffic.name,
        requests=len(traffic.requests),
        duration_s=traffic.duration_s,
        rps=len(at) / traffic.duration_s if has_rate else None,
        gap_cv=float(gaps.std() / gaps.mean()) if has_rate else None,
        input=_lengths([request.input_tokens for request in traffic.requests]),
        output=_lengths([request.output_tokens for request in traffic.requests]),
        ideal_hit=hit_tokens / max(traffic.input_tokens, 1),
        ideal_block_hit=block_hit,
        prefix_blocks=blocks,
        prefix_block_tokens=traffic.prefix_block_tokens,
        conversations=len(members),
        turns_mean=turns / len(members) if members else 0.0,
        notes=traffic.notes,
    )


def _lengths(tokens: list[int]) -> LengthFacts:
    if not tokens:
        return LengthFacts(0.0, 0.0, 0.0, 0.0, 0, 0)
    p50, p90, p99 = np.percentile(tokens, (50, 90, 99)).tolist()
    return LengthFacts(float(np.mean(tokens)), p50, p90, p99, max(tokens), sum(tokens))


def _sharing(traffic: Traffic) -> tuple[int, float | None, int]:
    """Prompt tokens that occurred before, the share of such blocks, and the number of distinct blocks."""
    seen: set[int] = set()
    history: dict[int, int] = {}  # of each conversation: tokens of prompt and answer so far
    blocks = found_blocks = hit_tokens = 0
    size = traffic.prefix_block_tokens
    for request in traffic.requests:
        shared = 0
        for block in request.prefix:
            if block not in seen:
                break
            shared += 1
        seen.update(request.prefix)
        blocks += len(request.prefix)
        found_blocks += shared
        hit = min(shared * size, request.input_tokens)
        if request.conversation is not None:
            hit = max(hit, min(history.get(request.conversation, 0), request.input_tokens))
            history[request.conversation] = request.input_tokens + request.output_tokens
        hit_tokens += hit
    return hit_tokens, found_blocks / blocks if blocks else None, len(seen)
