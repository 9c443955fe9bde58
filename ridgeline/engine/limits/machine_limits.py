"""The physical limits of this machine for one model, for figures to stand beside. No torch.

Decode reads every weight once per step: bytes over read bandwidth. Prefill multiplies by every weight once
per token: FLOPs over the rate of the units that do it. Both are ceilings for this backend and format, not
promises. What the machine can do comes from its calibration, or else from a short measurement, which says by
how much it may be too low.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ridgeline.engine.limits.calibration import load_calibration, this_machine
from ridgeline.engine.limits.steady import steady_rate
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.ops.cpu import library
from ridgeline.ops.cpu.library import Bytes, Peak

PREFILL_TOKENS = 512  # the prompt length the prefill limit is stated for
# What is read to tell the bandwidth: the weights, so that a model that fits a cache is measured there; no
# more of them than it takes to be sure of main memory.
READ_BYTES_RANGE = (16 << 20, 256 << 20)


PEAK_NAMES = {Peak.F32: "float32", Peak.BF16: "bfloat16", Peak.INT8: "int8"}  # as a calibration has them


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the machine can do with the threads it is given, whatever the model.

    uncertainty: by which share they may be too low, since other programs ran while they were measured
    """

    read_bytes_per_s: float
    flops_per_s: float
    uncertainty: float = 0.0


@dataclass(frozen=True, slots=True)
class MeasuredLimits:
    read_bytes_per_s: float
    flops_per_s: float
    decode_tokens_per_s: float  # one stream, empty context
    prefill_tokens_per_s: float
    uncertainty: float = 0.0  # as of the ceilings

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def limits_of(spec: ModelSpec, step_bytes: int, ceilings: Ceilings) -> MeasuredLimits:
    """step_bytes: weights that one decode step reads."""
    return MeasuredLimits(
        read_bytes_per_s=ceilings.read_bytes_per_s,
        flops_per_s=ceilings.flops_per_s,
        decode_tokens_per_s=ceilings.read_bytes_per_s / step_bytes,
        prefill_tokens_per_s=ceilings.flops_per_s / spec.prefill_flops_per_token(PREFILL_TOKENS),
        uncertainty=ceilings.uncertainty,
    )


def native_ceilings(weights: Bytes, step_bytes: int, kinds: tuple[Peak, ...], threads: int) -> Ceilings:
    """The calibrated ceilings of this machine if there are any, else measured now until they are stable: in
    some milliseconds, or half a second on a busy machine.

    weights: the model's, in the memory that steps read; a step reads `step_bytes` of them
    kinds:   units that could multiply these weights; the fastest that is there counts
    """
    calibration = load_calibration(this_machine(threads))
    if calibration is not None:
        known = calibration.ceilings
        peaks = [known.peaks[PEAK_NAMES[kind]] for kind in kinds if PEAK_NAMES[kind] in known.peaks]
        if peaks:
            return Ceilings(known.read_bytes_per_s(step_bytes), max(peaks))
    least, most = READ_BYTES_RANGE
    if step_bytes < least:  # so little is read in a moment, and then the clock is what is measured
        read = steady_rate(lambda: library.measure_read(least, threads))
    else:
        read = steady_rate(lambda: library.measure_read_of(weights[: min(step_bytes, most)], threads))
    peak = steady_rate(lambda: max(library.measure_peak(kind, threads) for kind in kinds), threads)
    return Ceilings(read.per_s, peak.per_s, max(read.uncertainty, peak.uncertainty))
