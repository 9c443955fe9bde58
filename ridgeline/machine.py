"""This machine, for every layer: usable CPUs, the processor's name, the cache directory."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from ridgeline.options import OptionError


def usable_cpus() -> int:
    """CPUs this process may use: its affinity mask, cut by a cgroup quota."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cpus = min(cpus, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError):
        pass
    return cpus


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []  # not Linux
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return platform.processor() or platform.machine()


def cache_dir() -> Path:
    """$RIDGELINE_CACHE, or ridgeline/ in the user's cache directory."""
    if own := os.environ.get("RIDGELINE_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "ridgeline"
    try:
        return Path.home() / ".cache" / "ridgeline"
    except RuntimeError:  # a container's user without an entry in /etc/passwd
        raise OptionError(
            "the home directory is unknown, and models are kept there: set HOME, or RIDGELINE_CACHE to a "
            "writable directory"
        ) from None
