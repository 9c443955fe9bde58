"""Chooses step sizes from measured step times: the cost curve, the budget and the chunk. Pure logic.

`calibrate` measures the steps, this module chooses, `calibration` stores the choice. A larger chunk uses the
processor better; a smaller one delays concurrent decodes less. The rules, in order:

1. the smallest chunk with 95 % of the best prefill rate;
2. but a full step lasts at most 8 times as long as a step of 8 decodes alone, or 0.2 s;
3. but never a chunk with less than 75 % of the best prefill rate.

A step that took longer than a larger one was disturbed, so the larger one's time is used for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

ENOUGH = 0.95  # of the best prefill rate
LEAST = 0.75
STRETCH = 8.0  # how many times its own step time a decode may wait while others prefill
UNNOTICED_S = 0.2  # a wait this short is always allowed: about reading speed
BESIDE = 8  # decodes that run together with a prefill in this measurement
MAX_DECODES = 64  # room in a step besides a full chunk; the engine's default number of sequences


@dataclass(frozen=True, slots=True)
class StepCost:
    """One kind of step: `decodes` sequences with one token each, and `chunk` prompt tokens of another."""

    decodes: int
    chunk: int
    seconds: float
    limit_seconds: float  # the time at the machine's ceilings

    def __post_init__(self) -> None:
        if self.decodes < 0 or self.chunk < 0 or self.tokens < 1:
            raise ValueError(f"a step cannot have {self.decodes} decodes and {self.chunk} prompt tokens")
        if not (0 < self.seconds < float("inf") and 0 < self.limit_seconds < float("inf")):
            raise ValueError(
                f"step times must be positive, got {self.seconds} s with a limit of {self.limit_seconds} s"
            )

    @property
    def tokens(self) -> int:
        return self.decodes + self.chunk

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def share_of_limit(self) -> float:
        return self.limit_seconds / self.seconds


@dataclass(frozen=True, slots=True)
class StepCosts:
    """All measurements of one model, each sorted by size."""

    prefill: tuple[StepCost, ...]  # chunks only
    decode: tuple[StepCost, ...]  # decodes only
    mixed: tuple[StepCost, ...]  # chunks together with BESIDE decodes

    def __post_init__(self) -> None:
        for name in ("prefill", "decode", "mixed"):
            sizes = [cost.tokens for cost in getattr(self, name)]
            if not sizes or sizes != sorted(set(sizes)):
                raise ValueError(f"{name} steps must be present and sorted by size, got {sizes}")


@dataclass(frozen=True, slots=True)
class StepChoice:
    """Step sizes for one class of models, with the reason as a sentence."""

    step_tokens: int
    prefill_chunk: int
    reason: str

    def __post_init__(self) -> None:
        if not 1 <= self.prefill_chunk <= self.step_tokens:
            raise ValueError(f"a chunk of {self.prefill_chunk} does not fit a step of {self.step_tokens}")


class CostLine(NamedTuple):
    """seconds = fixed_s + per_token_s · tokens"""

    fixed_s: float
    per_token_s: float

    def seconds(self, tokens: float) -> float:
        return self.fixed_s + self.per_token_s * tokens


def fit_line(costs: Sequence[StepCost]) -> CostLine:
    """Least squares of relative errors: a step of 2 ms counts as much as one of 600 ms."""
    if len(costs) == 1:
        return CostLine(0.0, costs[0].seconds / costs[0].tokens)
    # Divided by the measured seconds: minimise Σ (fixed / s + per_token · t / s - 1)².
    a = [1 / cost.seconds for cost in costs]
    b = [cost.tokens / cost.seconds for cost in costs]
    aa, ab, bb = _dot(a, a), _dot(a, b), _dot(b, b)
    determinant = aa * bb - ab * ab
    fixed = (sum(a) * bb - sum(b) * ab) / determinant
    per_token = (sum(b) * aa - sum(a) * ab) / determinant
    if fixed < 0:
        return CostLine(0.0, sum(b) / bb)
    if per_token < 0:
        return CostLine(sum(a) / aa, 0.0)
    return CostLine(fixed, per_token)


def seconds_at(costs: Sequence[StepCost], tokens: int) -> float:
    """The time of a step, interpolated between measured ones; beyond the largest, extrapolated."""
    before = costs[0]
    if tokens <= before.tokens:
        return before.seconds
    for after in costs[1:]:
        if tokens <= after.tokens:
            share = (tokens - before.tokens) / (after.tokens - before.tokens)
            return before.seconds + share * (after.seconds - before.seconds)
        before = after
    return before.seconds + fit_line(costs).per_token_s * (tokens - before.tokens)


def choose_steps(costs: StepCosts) -> StepChoice:
    """Apply the rules above. The budget has room for a whole chunk and as many decodes as may run."""
    costs = undisturbed(costs)
    best = max(cost.tokens_per_s for cost in costs.prefill)
    share = {cost.chunk: cost.tokens_per_s / best for cost in costs.prefill}
    most_s = max(STRETCH * seconds_at(costs.decode, BESIDE), UNNOTICED_S)
    enough = min(chunk for chunk in share if share[chunk] >= ENOUGH)
    quick = [chunk for chunk in share if _full_step_s(costs, chunk) <= most_s]
    if enough in quick:
        return _choice(costs, enough, share[enough], "the smallest chunk with 95 % of the best prefill rate")
    chunk = max((chunk for chunk in quick if share[chunk] >= LEAST), default=None)
    if chunk is not None:
        why = f"the largest chunk whose full step lasts at most {1000 * most_s:.0f} ms"
        return _choice(costs, chunk, share[chunk], why)
    chunk = min(chunk for chunk in share if share[chunk] >= LEAST)
    why = f"no chunk with 75 % of the best prefill rate keeps a full step under {1000 * most_s:.0f} ms"
    return _choice(costs, chunk, share[chunk], why)


def undisturbed(costs: StepCosts) -> StepCosts:
    """No step takes longer than a step that does the same work and more."""
    mixed = _rising(costs.mixed)
    beside = {cost.chunk: cost.seconds for cost in mixed}
    prefill = [
        replace(cost, seconds=min(cost.seconds, beside.get(cost.chunk, cost.seconds)))
        for cost in costs.prefill
    ]
    return StepCosts(prefill=_rising(prefill), decode=_rising(costs.decode), mixed=mixed)


def _rising(costs: Sequence[StepCost]) -> tuple[StepCost, ...]:
    least, rising = float("inf"), []
    for cost in reversed(costs):
        least = min(least, cost.seconds)
        rising.append(replace(cost, seconds=least))
    return tuple(reversed(rising))


def step_budget(chunk: int) -> int:
    return chunk + MAX_DECODES


def _full_step_s(costs: StepCosts, chunk: int) -> float:
    """The longest possible step: filled to its budget by several prompts while few sequences decode."""
    return seconds_at(costs.mixed, step_budget(chunk))


def _choice(costs: StepCosts, chunk: int, share: float, why: str) -> StepChoice:
    full_s = _full_step_s(costs, chunk)
    stretch = full_s / seconds_at(costs.decode, BESIDE)
    return StepChoice(
        step_budget(chunk),
        chunk,
        f"{why}: {share:.0%} of the best; a full step takes {1000 * full_s:.0f} ms, {stretch:.1f} times "
        f"as long as one of {BESIDE} decodes",
    )


def _dot(left: list[float], right: list[float]) -> float:
    return sum(x * y for x, y in zip(left, right, strict=True))
