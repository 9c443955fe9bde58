"""Stores fitted step times for later plans, in the cache directory beside the machine's calibration.

One file per machine or chip, model and the engine settings that affect a step's time. `ridgeline plan fit`
writes, the planner reads. An unreadable file is ignored with a warning: fit again.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import msgspec

from ridgeline.engine.config import EngineConfig
from ridgeline.engine.limits.calibration import this_machine
from ridgeline.lab.perfmodel.front_times import FrontTimes
from ridgeline.lab.perfmodel.step_times import VERSION, StepTimes
from ridgeline.machine import cache_dir
from ridgeline.ops.cpu.library import NativeUnavailable

THIS_MACHINE = "cpu"
# Settings that affect a step's time besides model and machine.
SETTINGS = (
    "backend", "weights", "load_format", "kv_dtype", "deterministic", "overlap", "cuda_graphs",
    "block_size", "threads",
)  # fmt: skip

BAD_ERROR = 0.3  # of a held-out trace; a fit with a larger error is not stored
ALIKE_ERROR = 0.05  # difference of two fits of one idle machine

log = logging.getLogger(__name__)


class KeptTimes(msgspec.Struct, frozen=True):
    times: StepTimes
    front: FrontTimes
    model: str
    hardware: str
    machine: str
    settings: dict[str, str]


def settings_of(config: EngineConfig) -> dict[str, str]:
    """The relevant settings that differ from their defaults."""
    defaults = {field.name: field.default for field in fields(EngineConfig)}
    values = {name: getattr(config, name) for name in SETTINGS}
    return {name: str(value) for name, value in values.items() if value != defaults[name]}


def keep_times(
    times: StepTimes,
    front: FrontTimes,
    model: str,
    hardware: str = THIS_MACHINE,
    settings: Mapping[str, str] | None = None,
) -> Path:
    """The file is written completely or not at all."""
    kept = KeptTimes(times, front, model, hardware, _machine(hardware), dict(settings or {}))
    path = times_file(model, hardware, settings)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=2) + b"\n")
    unfinished.replace(path)
    return path


def why_not_kept(
    times: StepTimes, model: str, hardware: str = THIS_MACHINE, settings: Mapping[str, str] | None = None
) -> str:
    """Why a fit should not replace the stored one; "": it should."""
    error = times.held_out_error
    if error is not None and error > BAD_ERROR:
        return f"its error on held-out traffic is {error:.0%}, more than {BAD_ERROR:.0%}"
    kept = kept_times(model, hardware, settings)
    before = kept[0].held_out_error if kept is not None else None
    if before is None:
        return ""
    if error is None:
        return f"it has too few steps to hold any out, and the stored fit's error is {before:.0%}"
    if error > before + ALIKE_ERROR:
        return f"its error on held-out traffic is {error:.0%}, the stored fit's is {before:.0%}"
    return ""


def kept_times(
    model: str, hardware: str = THIS_MACHINE, settings: Mapping[str, str] | None = None
) -> tuple[StepTimes, FrontTimes] | None:
    """The fit for exactly this deployment; None if there is none."""
    path = times_file(model, hardware, settings)
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=KeptTimes)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        log.warning("%s is ignored: %s. To fit again: ridgeline plan fit", path, error)
        return None
    if kept.times.version != VERSION:
        log.warning(
            "%s is ignored: it was written by another version. To fit again: ridgeline plan fit", path
        )
        return None
    return kept.times, kept.front


def times_file(model: str, hardware: str = THIS_MACHINE, settings: Mapping[str, str] | None = None) -> Path:
    what = [_machine(hardware), hardware, model, sorted((settings or {}).items())]
    key = hashlib.sha256(msgspec.json.encode(what)).hexdigest()[:16]
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", model).strip("-")[-60:]
    return cache_dir() / "step-times" / f"{name}-{key}.json"


def _machine(hardware: str) -> str:
    """A fit of this machine's processor applies only here; one of a named chip applies to all such chips."""
    if hardware != THIS_MACHINE:
        return ""
    try:
        return this_machine().key
    except NativeUnavailable:
        return "no native library"
