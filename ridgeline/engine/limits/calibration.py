"""The results of `ridgeline doctor --calibrate` for this machine, and the file that stores them.

One JSON file per machine (processor, threads, instruction set, library version) in the cache directory. The
engine reads ceilings and step sizes from it at start; `calibrate` measures and writes it. A damaged file, or
one from another machine, is ignored with a warning: it never prevents a start.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import os
from dataclasses import dataclass, field
from pathlib import Path

from ridgeline.engine import typed_json
from ridgeline.engine.limits.step_costs import StepChoice, StepCosts
from ridgeline.machine import cache_dir, compute_threads, processor_name
from ridgeline.ops.cpu.library import ABI_VERSION, NativeUnavailable, choose_isa

__all__ = [
    "DEFAULT_STEP_TOKENS", "Calibration", "Ceilings", "Machine", "ReadRate", "StepChoice", "StepCosts",
    "calibration_file", "load_calibration", "processor_name", "shape_class", "store_calibration",
    "this_machine",
]  # fmt: skip

FILE_VERSION = 1
DEFAULT_STEP_TOKENS = 256  # without a calibration: larger steps multiply no faster and increase latency
# Nominal width by average bits per weight; embeddings are often wider than the rest.
_WIDTHS = {6.5: 4, 12.0: 8, 24.0: 16, math.inf: 32}

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Machine:
    """What a measurement depends on besides the model; a calibration is valid for exactly this."""

    processor: str
    threads: int
    isa: str
    abi: int  # of the native library: different kernels, different figures

    @property
    def key(self) -> str:
        return hashlib.sha256(typed_json.encode(self).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class ReadRate:
    """Reading a buffer of `bytes` repeatedly: small ones come from a cache, large ones from memory."""

    bytes: int
    bytes_per_s: float

    def __post_init__(self) -> None:
        _require_positive(bytes=self.bytes, bytes_per_s=self.bytes_per_s)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Rates that no kernel can exceed on this machine with these threads."""

    reads: tuple[ReadRate, ...]  # by size, smallest first
    peaks: dict[str, float]  # operations per second by kind (float32, bfloat16, int8), where available

    def __post_init__(self) -> None:
        sizes = [read.bytes for read in self.reads]
        if not sizes or sizes != sorted(set(sizes)):
            raise ValueError(f"read rates must be present and sorted by size, got {sizes}")
        _require_positive(**self.peaks)

    def read_bytes_per_s(self, model_bytes: int) -> float:
        """The rate of reading a model of this size once per step, interpolated between two measured sizes."""
        reads = self.reads
        if model_bytes <= reads[0].bytes:
            return reads[0].bytes_per_s
        for below, above in itertools.pairwise(reads):
            if model_bytes <= above.bytes:
                share = math.log(model_bytes / below.bytes) / math.log(above.bytes / below.bytes)
                return below.bytes_per_s + share * (above.bytes_per_s - below.bytes_per_s)
        return reads[-1].bytes_per_s


@dataclass(frozen=True, slots=True)
class Calibration:
    machine: Machine
    ceilings: Ceilings
    choices: dict[str, StepChoice] = field(default_factory=dict)  # by shape_class
    costs: dict[str, StepCosts] = field(default_factory=dict)  # the measurements behind each choice
    version: int = FILE_VERSION

    def choice(self, parameters: int, weights_bytes: int) -> StepChoice | None:
        return self.choices.get(shape_class(parameters, weights_bytes))


def shape_class(parameters: int, weights_bytes: int) -> str:
    """Models that share step sizes: within a factor of two in parameters, and with the same bits per weight.

    The best chunk is where a step's multiplications outweigh reading its weights. That depends mostly on bits
    per weight, and a little on the size of the matrices.
    """
    least = 2 ** math.floor(math.log2(parameters))
    stored = 8 * weights_bytes / parameters
    bits = next(width for most, width in _WIDTHS.items() if stored < most)
    return f"{_count(least)} to {_count(2 * least)} parameters, {bits}-bit"


def this_machine(threads: int | None = None) -> Machine:
    """Raises the native library's error if it does not load."""

    return Machine(processor_name(), threads or compute_threads(), choose_isa(), ABI_VERSION)


def load_calibration(machine: Machine | None = None) -> Calibration | None:
    """The stored calibration of this machine (default: the current one), or None."""
    try:
        machine = machine or this_machine()
    except NativeUnavailable:
        return None  # without the library there is no calibration
    path = calibration_file(machine)
    try:
        return _read(path, machine)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("ignoring %s: %s. Run `ridgeline doctor --calibrate` to measure again", path, error)
        return None


def _read(path: Path, machine: Machine) -> Calibration:
    found = typed_json.decode(path.read_bytes(), Calibration)
    if found.version != FILE_VERSION:
        raise ValueError(f"it has version {found.version}, but version {FILE_VERSION} is needed")
    if found.machine != machine:
        raise ValueError(f"it was made on another machine, {found.machine}")
    return found


def store_calibration(calibration: Calibration) -> Path:
    """Write the file atomically: a reader never sees a partial file."""
    path = calibration_file(calibration.machine)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = typed_json.encode(calibration, indent=2)
    unfinished = path.with_suffix(f".{os.getpid()}")
    try:
        with unfinished.open("wb") as file:
            file.write(content.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    return path


def calibration_file(machine: Machine) -> Path:
    return cache_dir() / "calibration" / f"{machine.key}.json"


def _require_positive(**values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be a positive number, got {value}")


def _count(number: int) -> str:
    for unit, size in (("G", 2**30), ("M", 2**20), ("k", 2**10)):
        if number >= size:
            return f"{number // size}{unit}"
    return str(number)
