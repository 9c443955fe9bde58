"""A deployment's memory per chip, how many requests fit, and the minimum number of chips.

Called by `plan` and `parallel`. Pure arithmetic on a ModelSpec and a Chip. Requests count at their full
length: what fits when all of them are about to finish.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.engine.start.memory import DEFAULT_FRACTION
from ridgeline.lab.errors import Infeasible
from ridgeline.lab.hardware.chip import CPU, Chip
from ridgeline.lab.perfmodel.operators import kv_share
from ridgeline.models.spec.cache_layout import CacheElement, CacheLayout
from ridgeline.models.spec.ffn import Dense, Experts
from ridgeline.models.spec.mixers import Mixer
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.precision import Precision, bytes_of
from ridgeline.models.spec.recurrences import LinearAttention

# Engines leave a tenth of an accelerator's memory for driver, graphs and fragmentation: the default of
# vLLM (--gpu-memory-utilization 0.9) and of ridgeline.
RESERVED_SHARE = 0.1
# On a CPU other programs use the memory too; ridgeline leaves them this much.
RESERVED_SHARE_CPU = 1 - DEFAULT_FRACTION
# Buffers of the collectives by number of participating chips, on NVIDIA systems: systems/*.yaml of
# ai-dynamo/aiconfigurator 095f58a5.
COLLECTIVES_BYTES = {1: 0, 2: 358_612_992, 4: 411_041_792}
STEP_TOKENS = 8_192  # of the largest step, if the engine's limit is not given
ACTIVATION_BYTES = 2
LOGIT_BYTES = 4
SAMPLED_ROWS = 256  # rows of logits at once
MOST_CHIPS = 1_024


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Bytes on each chip, and the resulting capacity of the group of `tp · pp` chips."""

    memory: int  # what the chip has
    weights: int
    kv_per_token: int
    kv_per_request: int  # at its full length, states included
    activations: int
    reserve: int
    requests_that_fit: int  # at once, for the whole group
    gpus: int  # tp · pp, as asked for
    gpus_needed: int  # minimum with which one request fits

    @property
    def kv_room(self) -> int:
        return self.memory - self.weights - self.activations - self.reserve

    @property
    def fits(self) -> bool:
        return self.requests_that_fit >= 1


def memory_plan(
    shape: ModelSpec,
    chip: Chip,
    precision: Precision | str,
    kv_precision: CacheElement | str = "bfloat16",
    tp: int = 1,
    pp: int = 1,
    context_in: int = 1_024,
    context_out: int = 256,
    *,
    step_tokens: int = STEP_TOKENS,
    whole_windows: bool = False,
) -> MemoryNeeds:
    """`whole_windows`: for engines that keep windowed layers in full, like ridgeline."""
    length = context_in + context_out
    if length > shape.max_context:
        raise Infeasible(
            f"{shape.name} reads at most {shape.max_context:,} tokens; {context_in:,} in and {context_out:,} "
            f"out are {length:,}: shorten them, or choose a model with a longer context"
        )
    here = _on_a_chip(shape, chip, precision, kv_precision, tp, pp, length, step_tokens, whole_windows)
    needed = tp * pp if here.fits else 0
    smaller = [count for count in _sizes(shape, chip) if count < tp * pp or not needed]
    for count in smaller:
        split = min(count, _widest(shape, chip))
        if _on_a_chip(
            shape, chip, precision, kv_precision, split, count // split, length, step_tokens, whole_windows
        ).fits:
            needed = count
            break
    if not needed:
        raise Infeasible(
            f"{shape.name} in {precision} does not fit {MOST_CHIPS:,} chips of {chip.name}; "
            "choose a smaller format or model, or a chip with more memory"
        )
    return MemoryNeeds(
        here.memory, here.weights, here.kv_per_token, here.kv_per_request, here.activations, here.reserve,
        here.requests_that_fit, tp * pp, needed,
    )  # fmt: skip


def tp_sizes(shape: ModelSpec) -> list[int]:
    """By how many chips every layer's heads can be divided, smallest first."""
    heads = {_heads(layer.mixer) for layer in shape.layers if layer.mixer is not None}
    most = min(heads, default=1)
    return [count for count in range(1, most + 1) if all(number % count == 0 for number in heads)]


def activation_bytes(shape: ModelSpec, step_tokens: int, tp: int) -> int:
    """The peak of a step: the residual stream, a layer's inner width, and rows of logits."""
    inner = max((_inner_width(shape, layer.ffn) for layer in shape.layers), default=0)
    rows = step_tokens * (3 * shape.hidden_size + inner / tp) * ACTIVATION_BYTES
    return round(rows + min(step_tokens, SAMPLED_ROWS) * shape.vocab_size / tp * LOGIT_BYTES)


def _on_a_chip(
    shape: ModelSpec,
    chip: Chip,
    precision: Precision | str,
    kv_precision: CacheElement | str,
    tp: int,
    pp: int,
    length: int,
    step_tokens: int,
    whole_windows: bool,
) -> MemoryNeeds:
    weights = round(shape.weight_bytes(precision) / (tp * pp))
    kept = kv_precision if isinstance(kv_precision, CacheElement) else CacheElement(bytes_of(kv_precision))
    per_request = _kv_on_a_chip(shape, length, kept, tp, whole_windows) / pp
    per_token = _kv_on_a_chip(shape, 2, kept, tp) - _kv_on_a_chip(shape, 1, kept, tp)
    activations = activation_bytes(shape, step_tokens, tp)
    buffers = COLLECTIVES_BYTES[max(size for size in COLLECTIVES_BYTES if size <= tp)]
    share = RESERVED_SHARE_CPU if chip.name == CPU else RESERVED_SHARE
    reserve = round(share * chip.memory_bytes) + buffers
    room = chip.memory_bytes - weights - activations - reserve
    fit = max(0, int(room // per_request)) if per_request else (1 if room >= 0 else 0)
    return MemoryNeeds(
        chip.memory_bytes, weights, round(per_token / pp), round(per_request), activations, reserve, fit,
        tp * pp, 0,
    )  # fmt: skip


def _kv_on_a_chip(
    shape: ModelSpec, length: int, element: CacheElement, tp: int, whole_windows: bool = False
) -> float:
    return sum(
        group.kept(length, whole_windows=whole_windows) * kv_share(group.mixer, tp)
        for group in CacheLayout.of(shape, element).groups
    )


def _sizes(shape: ModelSpec, chip: Chip) -> list[int]:
    """Group sizes to try: divisors of the heads within the link's reach, then multiples of those."""
    widest = _widest(shape, chip)
    within = [count for count in tp_sizes(shape) if count <= widest]
    return within + [widest * stages for stages in range(2, min(len(shape.layers), MOST_CHIPS // widest) + 1)]


def _widest(shape: ModelSpec, chip: Chip) -> int:
    """The largest tensor-parallel group that the link reaches."""
    return max(count for count in tp_sizes(shape) if count <= chip.link_domain)


def _heads(attention: Mixer) -> int:
    return attention.key_heads if isinstance(attention, LinearAttention) else attention.heads


def _inner_width(shape: ModelSpec, ffn: Dense | Experts | None) -> int:
    if ffn is None:
        return 0
    if isinstance(ffn, Dense):
        return 2 * ffn.size
    return ffn.per_token * (2 * ffn.size + (ffn.latent_size or shape.hidden_size)) + 2 * ffn.shared_size
