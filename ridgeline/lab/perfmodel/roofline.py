"""The roofline: each operator's minimum time on a chip, what binds it, and what would improve it.

Called by `plan`. An operator takes the longer of its arithmetic and its memory traffic; a pass takes the sum,
since operators run in sequence. These are limits, not predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ridgeline.lab.errors import BadInput
from ridgeline.lab.hardware.chip import Chip
from ridgeline.lab.perfmodel.operators import OperatorCost, Phase, operators
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.precision import Precision, as_precision

Bound = Literal["memory", "compute", "link"]

MATRICES = ("qkv", "o", "ffn", "experts", "lm_head")
LARGEST = 1 << 20  # maximum tokens or sequences in the search for a crossing
WORTH_SAYING = 1.02  # smaller gains are not listed
SMALLER_WEIGHTS = 0.75  # proposed formats take at most this share of the bytes


@dataclass(frozen=True, slots=True)
class RooflinePoint:
    name: str
    flops: float
    bytes: float
    intensity: float  # FLOP per byte
    ridge: float  # FLOP per byte from which arithmetic binds on this chip
    memory_s: float
    compute_s: float
    link_s: float

    @property
    def limit_s(self) -> float:
        return max(self.memory_s, self.compute_s) + self.link_s

    @property
    def bound(self) -> Bound:
        if self.link_s > max(self.memory_s, self.compute_s):
            return "link"
        return "compute" if self.compute_s > self.memory_s else "memory"


@dataclass(frozen=True, slots=True)
class Move:
    """A change, and the pass's limit after it."""

    change: str
    factor: float  # the limit per token before, divided by the one after
    text: str


@dataclass(frozen=True, slots=True)
class Roofline:
    points: tuple[RooflinePoint, ...]
    total: RooflinePoint
    limit_s: float  # the sum over operators: at least the total's own
    what_moves_it: tuple[Move, ...] = ()

    @property
    def bound(self) -> Bound:
        """What takes most of the time: operators bound by memory, by arithmetic or by the link."""
        seconds: dict[Bound, float] = {"memory": 0.0, "compute": 0.0, "link": 0.0}
        for point in self.points:
            if point.bound == "link":
                seconds["link"] += point.limit_s
            else:
                seconds[point.bound] += max(point.memory_s, point.compute_s)
                seconds["link"] += point.link_s
        return max(seconds, key=lambda bound: seconds[bound])


def roofline(costs: Sequence[OperatorCost], chip: Chip) -> Roofline:
    points = tuple(_point(cost, chip) for cost in costs)
    flops, moved = sum(point.flops for point in points), sum(point.bytes for point in points)
    compute = sum(point.compute_s for point in points)
    total = RooflinePoint(
        "total",
        flops,
        moved,
        flops / moved,
        flops / compute / chip.bytes_per_s if compute else 0.0,
        sum(point.memory_s for point in points),
        compute,
        sum(point.link_s for point in points),
    )
    return Roofline(points, total, sum(point.limit_s for point in points))


def study(
    shape: ModelSpec,
    chip: Chip,
    phase: Phase,
    batch: int,
    new_tokens: int,
    context: int,
    precision: Precision | str,
    kv_precision: str = "bfloat16",
    tp: int = 1,
) -> Roofline:
    """The roofline of a pass, and how much each single change would improve it."""
    work = _Pass(shape, chip, phase, batch, new_tokens, context, as_precision(precision), kv_precision, tp)
    return replace(work.roofline(), what_moves_it=tuple(_moves(work)))


@dataclass(frozen=True, slots=True)
class _Pass:
    shape: ModelSpec
    chip: Chip
    phase: Phase
    batch: int
    new_tokens: int
    context: int
    precision: Precision
    kv_precision: str
    tp: int

    def roofline(self) -> Roofline:
        costs = operators(
            self.shape,
            self.phase,
            self.batch,
            self.new_tokens,
            self.context,
            self.precision,
            self.kv_precision,
            self.tp,
        )
        return roofline(costs, self.chip)

    @property
    def tokens(self) -> int:
        return self.batch * (1 if self.phase == "decode" else self.new_tokens)

    def seconds_per_token(self) -> float:
        return self.roofline().limit_s / self.tokens


def _point(cost: OperatorCost, chip: Chip) -> RooflinePoint:
    link = 0.0
    if cost.link_bytes:
        if not chip.link_bytes_per_s:
            raise BadInput(f"{chip.name} has no link for tensor parallel: use one chip, tp=1")
        link = cost.link_bytes / chip.link_bytes_per_s
    rate = chip.flops_per_s(cost.weight_format)
    return RooflinePoint(
        cost.name,
        cost.flops,
        cost.bytes,
        cost.intensity,
        rate / chip.bytes_per_s,
        cost.bytes / chip.bytes_per_s,
        cost.flops / rate,
        link,
    )


def _moves(work: _Pass) -> list[Move]:
    moves = [*_more_tokens(work), *_fewer_bits(work), *_smaller_cache(work), *_more_chips(work)]
    return sorted(moves, key=lambda move: -move.factor)


def _more_tokens(work: _Pass) -> list[Move]:
    """The batch or chunk from which the pass is bound by arithmetic: weights are read once for all."""
    name, now, most = "batch", work.batch, LARGEST
    if work.phase == "prefill":
        name, now = "chunk", work.new_tokens
        most = max(now, min(LARGEST, work.shape.max_context - work.context))

    def grown(size: int) -> _Pass:
        return replace(work, batch=size) if work.phase == "decode" else replace(work, new_tokens=size)

    def by_arithmetic(size: int) -> bool:
        total = grown(size).roofline().total
        return total.compute_s >= total.memory_s

    gain = work.seconds_per_token() / grown(min(2 * now, most)).seconds_per_token()
    twice = f"twice the {name} ({2 * now:,}): {gain:.2f}× the tokens per second"
    if by_arithmetic(now):
        crossing = _first(by_arithmetic, now)
        return [
            Move(name, gain, f"{twice}: arithmetic binds from a {name} of {crossing:,} on, more adds little")
        ]
    if by_arithmetic(most):
        return [
            Move(name, gain, f"{twice}; arithmetic binds from a {name} of {_first(by_arithmetic, most):,}")
        ]
    total = grown(most).roofline().total
    why = (
        f"; no {name} makes arithmetic bind the whole pass: each sequence brings its own cache to read, so "
        f"the intensity stays below {total.intensity:,.0f} FLOP per byte, the chip's ridge is at "
        f"{total.ridge:,.0f}"
    )
    if _matrices_by_arithmetic(grown(most)):
        crossing = _first(lambda size: _matrices_by_arithmetic(grown(size)), most)
        why += f"; the weight matrices alone are bound by arithmetic from a {name} of {crossing:,}"
    return [Move(name, gain, twice + why)]


def _matrices_by_arithmetic(work: _Pass) -> bool:
    matrices = [point for point in work.roofline().points if point.name in MATRICES]
    return sum(point.compute_s for point in matrices) >= sum(point.memory_s for point in matrices)


def _first(holds: Callable[[int], bool], most: int) -> int:
    """The smallest number from 1 to `most` for which it holds, given that it holds from there on."""
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


def _fewer_bits(work: _Pass) -> list[Move]:
    moves = []
    for name in ("fp8", "int4", "nvfp4"):
        smaller = replace(work, precision=Precision(name, name))
        before, after = (one.shape.weight_bytes(one.precision) for one in (work, smaller))
        if after > SMALLER_WEIGHTS * before:
            continue
        gain = work.seconds_per_token() / smaller.seconds_per_token()
        if gain > WORTH_SAYING:
            how = f"multiplied as {work.chip.unit(name)}"
            moves.append(Move(f"weights {name}", gain, f"weights in {name}, {how}: {gain:.2f}× as fast"))
    return moves


def _smaller_cache(work: _Pass) -> list[Move]:
    smaller = replace(work, kv_precision="fp8")
    gain = work.seconds_per_token() / smaller.seconds_per_token()
    if work.kv_precision == "fp8" or gain <= WORTH_SAYING:
        return []
    return [Move("cache fp8", gain, f"KV cache in fp8: {gain:.2f}× as fast")]


def _more_chips(work: _Pass) -> list[Move]:
    if 2 * work.tp > work.chip.link_domain or not work.chip.link_bytes_per_s:
        return []
    gain = work.seconds_per_token() / replace(work, tp=2 * work.tp).seconds_per_token()
    text = f"over {2 * work.tp} chips (tensor parallel): {gain:.2f}× as fast for twice the chips"
    return [Move("chips", gain, text)] if gain > WORTH_SAYING else []
