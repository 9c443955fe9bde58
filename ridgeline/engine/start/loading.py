"""What `build_engine` and the backends' builds say to each other. Types alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ridgeline.engine.limits.machine_limits import MeasuredLimits
from ridgeline.engine.run.runner import Runner
from ridgeline.engine.start.memory import Footprint, MemoryPlan
from ridgeline.engine.start.memory_receipt import MemoryReceipt

Progress = Callable[[int, int], None]
DUMMY_NOTE = "weights are random (--load-format dummy): for measuring, not for answers"


@dataclass(frozen=True, slots=True)
class StepSizes:
    """How much one step computes at most, resolved: flags, else the machine's calibration, else defaults."""

    step_tokens: int
    prefill_chunk: int
    max_running: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """A backend with its weights, ready to execute, in words for the start-up lines."""

    runner: Runner
    unit: str  # what computes: instruction set, threads
    weights: str  # their format
    kv: str
    weights_bytes: int
    notes: tuple[str, ...] = ()  # what the person who starts it should know
    before_first_step: Callable[[], None] | None = None  # what went on beside the loading ends here
    memory: Callable[[], MemoryReceipt] | None = None  # of a device; as it is when called


class BackendBuild(Protocol):
    """One backend for one model and configuration. Sizes are known before `load`, limits after it."""

    @property
    def weights_bytes(self) -> int: ...

    def prepare(self) -> None:
        """Import what computing needs: timed apart from the weights. `footprint` comes after it."""
        ...

    def footprint(self, sizes: StepSizes) -> Footprint: ...

    def load(self, plan: MemoryPlan, sizes: StepSizes, progress: Progress | None) -> Loaded: ...

    def limits(self) -> MeasuredLimits: ...
