"""Types shared by `build_engine` and the backends' builds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ridgeline.engine.limits.machine_limits import MeasuredLimits
from ridgeline.engine.run.runner import Runner
from ridgeline.engine.start.memory import Footprint, MemoryPlan
from ridgeline.engine.start.memory_receipt import MemoryReceipt
from ridgeline.models.errors import ModelError
from ridgeline.models.files.checkpoint_files import tensor_names
from ridgeline.models.quantized.packings import KV_SCALES
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.weights.mxfp4 import ROUNDED_STEPS

Progress = Callable[[int, int], None]
DUMMY_NOTE = "weights are random (--load-format dummy): use it for measurements only"


def expansion_notes(spec: ModelSpec, dtype: str) -> tuple[str, ...]:
    """For a backend that does not compute with the stored format."""
    if spec.quantization is not None:
        stored = " and ".join(str(format) for format in spec.quantization.formats())
        return (
            f"weights stored as {stored} ({spec.quantization.method}) are expanded to {dtype} when loaded",
            *input_notes(spec),
        )
    if spec.weight_format not in ("mxfp4", "gguf:MXFP4"):
        return ()
    change = f"with {ROUNDED_STEPS}" if dtype == "float16" else "with the same values"
    return (f"experts stored as MXFP4 are expanded to {dtype} when loaded, {change}",)


def input_notes(spec: ModelSpec) -> tuple[str, ...]:
    """For a checkpoint whose producer meant inputs to be rounded, too."""
    scheme = spec.quantization
    rounded = "" if scheme is None else scheme.activations()
    if scheme is None or not rounded:
        return ()
    note = f"weights alone are quantized: inputs are not rounded to {rounded}, as the file asks"
    return (note + ("; its static scales of inputs are not used" if scheme.has_static_inputs else ""),)


def kv_notes(spec: ModelSpec, path: Path, kv: str) -> tuple[str, ...]:
    """For a checkpoint that asks for a format of the KV cache. kv: the type that it has."""
    try:
        has_scales = any(name.rpartition(".")[2] in KV_SCALES for name in tensor_names(path))
    except ModelError:
        has_scales = False  # the loader reports what is wrong
    note = ""
    if spec.kv_asked and spec.kv_asked.lower() != kv:
        note = f"the KV cache is in {kv} (--kv-dtype), not in {spec.kv_asked} as the file asks"
    if has_scales:
        note += "; " if note else ""
        note += "the file's scales of keys and values (k_scale, v_scale) are not used"
    return (note,) if note else ()


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The most one step computes, resolved: flags, else the machine's calibration, else defaults."""

    step_tokens: int
    prefill_chunk: int
    max_running: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """A backend with loaded weights, ready to execute, and its description for the start-up lines."""

    runner: Runner
    unit: str  # the processing unit: instruction set, threads
    weights: str  # their format
    kv: str
    weights_bytes: int
    mapped_bytes: int = 0  # of these, in a file: only what was read of them takes memory
    notes: tuple[str, ...] = ()  # for the start-up message
    before_first_step: Callable[[], None] | None = None  # waits for the work that ran during loading
    after_warm_up: Callable[[], None] | None = None  # prepares what the first requests need
    memory: Callable[[], MemoryReceipt] | None = None  # of a device, when called
    # For `memory`: the drafter is built, and this returns its KV cache's bytes.
    count_drafter: Callable[[Callable[[], int]], None] | None = None


class BackendBuild(Protocol):
    """One backend for one model and configuration. Sizes are known before `load`, limits after it."""

    @property
    def weights_bytes(self) -> int: ...

    def prepare(self) -> None:
        """Import what computing needs, timed separately from the weights. Called before `footprint`."""
        ...

    def footprint(self, sizes: StepSizes) -> Footprint: ...

    def load(self, plan: MemoryPlan, sizes: StepSizes, progress: Progress | None) -> Loaded: ...

    def limits(self) -> MeasuredLimits: ...
