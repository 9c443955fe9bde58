"""The physical limits of this machine for one model, to compare measured figures with. No torch.

Decode reads every weight once per step: bytes over read bandwidth. Prefill multiplies by every weight once
per token: FLOPs over the peak rate. Both are upper bounds for this backend and format, not promises. The
rates come from the machine's calibration, or else from a short measurement, which states by how much it may
be too low.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ridgeline.engine.limits.calibration import load_calibration, this_machine
from ridgeline.engine.limits.steady import steady_rate
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.ops.cpu import library
from ridgeline.ops.cpu.library import Bytes, Peak

PREFILL_TOKENS = 512  # the prompt length the prefill limit is stated for
# Bytes read to measure bandwidth: the weights, so that a model that fits a cache is measured in the cache,
# but no more than it takes to exceed every cache.
READ_BYTES_RANGE = (16 << 20, 256 << 20)


# The names used in a calibration.
PEAK_NAMES = {Peak.F32: "float32", Peak.BF16: "bfloat16", Peak.INT8: "int8"}


@dataclass(frozen=True, slots=True)
class DeviceCeilings:
    """What the machine can do with its threads, independent of the model.

    uncertainty: by what fraction the rates may be too low, because other programs ran during the measurement
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
    uncertainty: float = 0.0  # as in DeviceCeilings

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def limits_of(spec: ModelSpec, step_bytes: int, ceilings: DeviceCeilings) -> MeasuredLimits:
    """step_bytes: weights read by one decode step."""
    return MeasuredLimits(
        read_bytes_per_s=ceilings.read_bytes_per_s,
        flops_per_s=ceilings.flops_per_s,
        decode_tokens_per_s=ceilings.read_bytes_per_s / step_bytes,
        prefill_tokens_per_s=ceilings.flops_per_s / spec.prefill_flops_per_token(PREFILL_TOKENS),
        uncertainty=ceilings.uncertainty,
    )


def native_ceilings(weights: Bytes, step_bytes: int, kinds: tuple[Peak, ...], threads: int) -> DeviceCeilings:
    """The calibrated ceilings of this machine, else ceilings measured now until they are stable: a few
    milliseconds, or half a second on a busy machine.

    weights: the model's, in the memory that steps read; a step reads `step_bytes` of them
    kinds:   units that could multiply these weights; the fastest available one counts
    """
    calibration = load_calibration(this_machine(threads))
    if calibration is not None:
        known = calibration.ceilings
        peaks = [known.peaks[PEAK_NAMES[kind]] for kind in kinds if PEAK_NAMES[kind] in known.peaks]
        if peaks:
            return DeviceCeilings(known.read_bytes_per_s(step_bytes), max(peaks))
    least, most = READ_BYTES_RANGE
    if step_bytes < least:  # too little data to time: only the clock's resolution would be measured
        read = steady_rate(lambda: library.measure_read(least, threads))
    else:
        read = steady_rate(lambda: library.measure_read_of(weights[: min(step_bytes, most)], threads))
    peak = steady_rate(lambda: max(library.measure_peak(kind, threads) for kind in kinds), threads)
    return DeviceCeilings(read.per_s, peak.per_s, max(read.uncertainty, peak.uncertainty))
