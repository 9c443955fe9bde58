"""How to split a model over chips: tensor, pipeline and expert parallel, with the reason for the choice.

Called by `plan`. The rule: the fewest chips that hold the model and the requested concurrency; tensor
parallel where the link is fast, pipeline stages where it is not; whole experts per chip where slices would be
thin.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.lab.errors import Infeasible
from ridgeline.lab.hardware.chip import Chip
from ridgeline.lab.perfmodel.memory import MemoryNeeds, memory_plan, tp_sizes
from ridgeline.lab.perfmodel.operators import ACTIVATION_BYTES, Phase, all_reduce_bytes, operators
from ridgeline.lab.perfmodel.roofline import roofline
from ridgeline.models.spec.ffn import Experts
from ridgeline.models.spec.mixers import LatentAttention
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.precision import Precision

# Matrix units work on tiles of 128 columns, and block-wise formats scale 128 at a time.
THINNEST_SLICE = 128
PREFILL_CHUNK = 2_048
# Above this share of a pass, waiting for the link should be avoided.
SLOW_LINK = 0.5
MOST_STAGES = 16


@dataclass(frozen=True, slots=True)
class ParallelChoice:
    tp: int
    pp: int
    ep: int
    reason: str
    memory: MemoryNeeds

    @property
    def gpus(self) -> int:
        return self.tp * self.pp


def choose_parallel(
    shape: ModelSpec,
    chip: Chip,
    precision: Precision | str,
    kv_precision: str = "bfloat16",
    context_in: int = 1_024,
    context_out: int = 256,
    *,
    concurrency: int = 1,
    most_gpus: int | None = None,
    whole_windows: bool = False,
) -> ParallelChoice:
    """The smallest group that holds `concurrency` requests, split so that it waits least."""

    def needs(tp: int, pp: int) -> MemoryNeeds:
        return memory_plan(
            shape, chip, precision, kv_precision, tp, pp, context_in, context_out, whole_windows=whole_windows
        )

    candidates = sorted(
        _candidates(shape, chip, most_gpus), key=lambda split: (split[0] * split[1], -split[0])
    )
    best: tuple[int, int, MemoryNeeds] | None = None
    for tp, pp in candidates:
        found = needs(tp, pp)
        if best is None or found.requests_that_fit > best[2].requests_that_fit:
            best = (tp, pp, found)
        if found.requests_that_fit >= concurrency:
            return _explained(shape, chip, precision, kv_precision, tp, pp, found, context_in, concurrency)
    assert best is not None  # a single chip is always a candidate
    tp, pp, found = best
    many = tp * pp
    raise Infeasible(
        f"{shape.name} in {precision} on {many} × {chip.name}: {found.requests_that_fit} requests of "
        f"{context_in + context_out:,} tokens fit at once, {concurrency} are wanted; the cache of one takes "
        f"{found.kv_per_request / 1e9:.2f} GB of each chip, and {max(0, found.kv_room) / 1e9:.1f} GB are "
        "left for it. Ask for fewer at once, a smaller format of cache or weights, or several replicas"
    )


def _candidates(shape: ModelSpec, chip: Chip, most_gpus: int | None) -> list[tuple[int, int]]:
    """(tp, pp): tensor parallel within the link's reach, pipeline stages beyond it."""
    reach = chip.link_domain
    if reach == 1 and chip.link_bytes_per_s:  # cards: `most_gpus` of them are in one machine
        reach = most_gpus or 1
    most = most_gpus or reach * MOST_STAGES
    widths = [count for count in tp_sizes(shape) if count <= reach and _is_power_of_two(count)]
    found = [(tp, 1) for tp in widths]
    stages = range(2, min(MOST_STAGES, len(shape.layers)) + 1)
    if chip.internode_bytes_per_s:
        found += [(widths[-1], count) for count in stages if widths[-1] > 1]
    return [(tp, pp) for tp, pp in found if tp * pp <= most]


def _explained(
    shape: ModelSpec,
    chip: Chip,
    precision: Precision | str,
    kv_precision: str,
    tp: int,
    pp: int,
    found: MemoryNeeds,
    context: int,
    concurrency: int,
) -> ParallelChoice:
    ep, experts = expert_split(shape, tp)
    if tp * pp == 1:
        reason = (
            f"one {chip.name} holds the model ({found.weights / 1e9:.1f} GB) and "
            f"{found.requests_that_fit:,} requests at once: replicas of it scale without any link"
        )
        return ParallelChoice(1, 1, 1, reason, found)
    parts = [
        f"{tp * pp} × {chip.name}: the weights take {found.weights * tp * pp / 1e9:,.0f} GB, and fewer chips "
        f"would not hold {concurrency:,} request{'s' if concurrency > 1 else ''} of this length at once"
    ]
    if tp > 1:
        parts.append(_tensor_reason(shape, chip, precision, kv_precision, tp, context))
    if pp > 1:
        parts.append(_stage_reason(shape, chip, tp, pp))
    parts += experts
    if tp > 1 and any(isinstance(layer.mixer, LatentAttention) for layer in shape.layers):
        parts.append(
            f"each of the {tp} chips keeps the whole latent cache, since all heads share it: with many "
            "requests, use data parallel attention (separate requests per chip) instead"
        )
    return ParallelChoice(tp, pp, ep, "; ".join(parts), found)


def expert_split(shape: ModelSpec, tp: int) -> tuple[int, list[str]]:
    """(ep, why): whole experts if a `tp`-th of one is thinner than a tile or does not divide."""
    experts = next((layer.ffn for layer in shape.layers if isinstance(layer.ffn, Experts)), None)
    if experts is None or tp == 1:
        return 1, []
    if experts.size % (tp * THINNEST_SLICE) == 0:
        return 1, [f"experts of {experts.size} columns are sliced into {experts.size // tp} each"]
    if experts.num % tp == 0:
        slice_ = experts.size / tp
        why = f"a {tp}th of an expert would be {slice_:g} columns, no whole tiles of {THINNEST_SLICE}"
        return tp, [f"each chip holds {experts.num // tp} whole experts of {experts.num}: {why}"]
    return 1, [f"{experts.num} experts do not divide by {tp}: they are sliced"]


def _tensor_reason(
    shape: ModelSpec, chip: Chip, precision: Precision | str, kv_precision: str, tp: int, context: int
) -> str:
    shares = []
    passes: tuple[tuple[Phase, int], ...] = (("decode", 1), ("prefill", PREFILL_CHUNK))
    for phase, tokens in passes:
        limits = roofline(operators(shape, phase, 1, tokens, context, precision, kv_precision, tp), chip)
        shares.append(limits.total.link_s / limits.limit_s)
    said = (
        f"tensor parallel over {tp} halves what each reads"
        if tp == 2
        else (f"tensor parallel over {tp} divides what each reads by {tp}")
    )
    text = (
        f"{said}; the link of {(chip.link_bytes_per_s or 0) / 1e9:,.0f} GB/s takes {shares[0]:.0%} of a "
        f"decode step and {shares[1]:.0%} of a {PREFILL_CHUNK}-token prefill at best"
    )
    if shares[1] > SLOW_LINK:
        text += ": a slow link for prefill; replicas of a smaller format would wait less"
    return text


def _stage_reason(shape: ModelSpec, chip: Chip, tp: int, pp: int) -> str:
    """A stage passes on one activation; an all-reduce across nodes would send it twice per layer."""
    rate = chip.internode_bytes_per_s or 0.0
    handed = PREFILL_CHUNK * shape.hidden_size * ACTIVATION_BYTES * (pp - 1) / tp / rate
    reduced = 2 * len(shape.layers) * all_reduce_bytes(PREFILL_CHUNK, shape.hidden_size, tp * pp) / rate
    return (
        f"{pp} pipeline stages across nodes: at {rate / 1e9:,.0f} GB/s they hand on {handed * 1e3:.1f} ms of "
        f"activations per {PREFILL_CHUNK} tokens, where tensor parallel across nodes would send "
        f"{reduced * 1e3:,.0f} ms"
    )


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
