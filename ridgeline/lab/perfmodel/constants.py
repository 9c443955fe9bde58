"""The analytic model's constants, read from constants.json beside this file, one set per engine.

`benchmarks/plan_accuracy.py --refit` writes the file; `analytic` and `intervals` read it. Every engine's set
is the shared constants overridden by the engine's own. Never fits anything.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

PATH = Path(__file__).with_name("constants.json")


@dataclass(frozen=True)
class Coefficients:
    """Efficiencies are shares of the chip's published rate; times are seconds. None is negative.

    Fields may be arrays, one entry per measured point: fitting uses that.
    """

    # Shares of the chip's peak rates.
    read_linear: float  # memory rate for weights that every step reads
    read_experts: float  # … for the experts that a step hits
    read_cache: float  # … for keys and values, latents, states
    int4_read: float  # factor for 4-bit weights that are converted while reading
    linear_flops: float  # matrix rate, 16-bit
    narrow_flops: float  # of that share, at 8 and 4 bits
    expert_flops: float  # of the linear share, for the small products of experts
    attention_flops: float  # matrix rate of 16 bits, for attention
    link: float  # of the link's rate
    # Seconds per layer and step beyond bytes and operations: kernel launches.
    layer_s: float
    quantized_layer_s: float  # more, where activations are quantized
    latent_layer_s: float  # more, for latent attention
    recurrent_layer_s: float  # more, for linear attention and state spaces
    expert_layer_s: float  # more, for routing and sorting
    reduce_hop_s: float  # per all-reduce and doubling of participants
    stage_hop_s: float  # per transfer between pipeline stages
    # The engine's own.
    step_s: float  # per step, on the host
    sequence_s: float  # per sequence and step, on the host
    prefill_layer_s: float  # per layer of a prompt's pass
    # To the first token.
    first_s: float  # until the first step, and from its end to the client
    prefill_factor: float  # of the prompt's own pass
    queue_share: float  # of the other sequences' prompts in the wait
    steps_waited: float  # running steps before admission
    room_share: float  # of the wait for room in the cache


class ClassWidths(msgspec.Struct, frozen=True):
    """Half-widths, as logarithms, of 80 % intervals inside the range that was fitted."""

    dense: float
    moe: float


class Range(msgspec.Struct, frozen=True):
    low: float
    high: float


class Fitted(msgspec.Struct, frozen=True):
    """The range that was fitted; beyond it, intervals widen."""

    numbers: dict[str, Range]
    names: dict[str, list[str]]


class ConstantsFile(msgspec.Struct, frozen=True):
    made_at: str  # date
    made_by: str
    source: str
    points: int
    deployments: int
    shared: dict[str, float]
    engines: dict[str, dict[str, float]]
    provenance: dict[str, str]  # by engine
    tpot: ClassWidths
    ttft: ClassWidths
    fitted: Fitted

    def coefficients(self, engine: str) -> Coefficients:
        return Coefficients(**{**self.shared, **self.engines[engine]})


NAMES = tuple(field.name for field in fields(Coefficients))


@cache
def shipped() -> ConstantsFile:
    return msgspec.json.decode(PATH.read_bytes(), type=ConstantsFile)


@cache
def coefficients_of(engine: str) -> Coefficients:
    return shipped().coefficients(engine)


def write_constants(constants: ConstantsFile, path: Path = PATH) -> None:
    def rounded(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: rounded(entry) for key, entry in value.items()}
        return float(f"{value:.4g}") if isinstance(value, float) else value

    content = rounded(msgspec.to_builtins(constants))
    path.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
