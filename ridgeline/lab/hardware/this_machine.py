"""This machine's processor as a Chip, with measured ceilings.

Called by `chip("cpu")`. Uses the result of `ridgeline doctor --calibrate`; without one, the ceilings are
measured for about four seconds and not stored.
"""

from __future__ import annotations

import os

from ridgeline.lab.errors import BadInput
from ridgeline.lab.hardware.chip import Chip

# As the native library names its peaks, and as chips do.
UNIT_NAMES = {"float32": "fp32", "bfloat16": "bf16", "int8": "int8"}


def load_per_core() -> float | None:
    """Runnable tasks per core over the last minute; None if the system does not report it."""
    from ridgeline.machine import usable_cpus

    try:
        return os.getloadavg()[0] / usable_cpus()
    except OSError:
        return None


def this_cpu() -> Chip:
    from ridgeline.engine.limits.calibration import load_calibration, this_machine
    from ridgeline.engine.start.calibrate import measure_ceilings
    from ridgeline.engine.start.memory import available_memory
    from ridgeline.ops.cpu.library import NativeError

    try:
        machine = this_machine()
    except NativeError as error:
        raise BadInput(f"this processor cannot be measured without the native library: {error}") from error
    known = load_calibration(machine)
    ceilings = known.ceilings if known else measure_ceilings(machine, lambda what, done: None)
    measured = "measured by ridgeline doctor --calibrate" if known else "measured just now, for four seconds"
    flops = {UNIT_NAMES[name]: rate for name, rate in ceilings.peaks.items()}
    cells = ("bytes_per_s", "gpus_per_node", "link_domain", *(f"flops.{unit}" for unit in flops))
    return Chip(
        name="cpu",
        title=f"{machine.processor}, {machine.threads} threads, {machine.isa}",
        memory_bytes=available_memory(),
        bytes_per_s=ceilings.reads[-1].bytes_per_s,
        flops=flops,
        link_bytes_per_s=None,
        internode_bytes_per_s=None,
        gpus_per_node=1,
        link_domain=1,
        watts=None,
        usd_per_hour=None,
        sources={**dict.fromkeys(cells, measured), "memory_bytes": "available now, by the operating system"},
    )
