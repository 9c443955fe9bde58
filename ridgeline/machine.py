"""This machine, for every layer: usable CPUs, cores and memory, the processor's name, the cache directory."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from ridgeline.options import OptionError

ROOT = Path("/")
EQUAL_CAPACITY = 0.75  # of the fastest core's: one such core more is worth waiting for


def usable_cpus(root: Path = ROOT) -> int:
    """CPUs this process may use: its affinity mask, cut by its control group's quota.

    A quota is rounded down: more threads than it allows would all be stopped for the rest of each period.
    """
    allowed, quota = len(allowed_cpus()), cpu_quota(root)
    return allowed if quota is None else min(allowed, max(1, int(quota)))


def compute_threads(root: Path = ROOT) -> int:
    """Threads to compute with by default: one per physical core of the fastest kind, cut by the quota.

    A second thread of a core adds nothing to kernels that keep its units busy. Fast cores would wait for
    those of a slower kind (Intel's efficiency cores, ARM's little ones). The native library pins threads in
    the same order.
    """
    cores = fast_cores(root, allowed_cpus())
    return min(usable_cpus(root), max(1, len(cores)))


def allowed_cpus() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def fast_cores(root: Path, allowed: list[int]) -> list[int]:
    """The first of the allowed CPUs of each physical core, slower kinds left out."""
    devices = root / "sys/devices"
    slow = slow_cpus(devices, allowed)
    taken: set[int] = set()
    cores = []
    for cpu in allowed:
        if cpu not in taken:
            cores.append(cpu)
        taken.update(cpu_list(_read(devices / f"system/cpu/cpu{cpu}/topology/thread_siblings_list")))
    fast = [cpu for cpu in cores if cpu not in slow]
    return fast or cores


def slow_cpus(devices: Path, allowed: list[int]) -> set[int]:
    """Intel's efficiency cores, and CPUs with less than EQUAL_CAPACITY of the fastest one's capacity, which
    the kernel states on ARM."""
    capacities = {cpu: _read(devices / f"system/cpu/cpu{cpu}/cpu_capacity").strip() for cpu in allowed}
    known = {cpu: int(text) for cpu, text in capacities.items() if text.isdigit()}
    least = EQUAL_CAPACITY * max(known.values(), default=0)
    slow = {cpu for cpu, capacity in known.items() if capacity < least}
    return slow.union(cpu_list(_read(devices / "cpu_atom/cpus")))


def cpu_list(text: str) -> list[int]:
    """Read "0-3,8"; empty for a text that is no such list."""
    cpus: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            return []
        cpus += range(int(first), int(last or first) + 1)
    return cpus


def memory_bytes(root: Path = ROOT) -> int:
    """Main memory, cut by the least limit of this process's control group and those above it."""
    found = [_limit(folder / "memory.max") for folder in _groups(root, "")]
    found += [_limit(folder / "memory.limit_in_bytes") for folder in _groups(root, "memory")]
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([installed, *(limit for limit in found if limit is not None)])


def cpu_quota(root: Path = ROOT) -> float | None:
    """The least quota, in CPUs, of this process's control group and those above it (v1 or v2), if any."""
    found = [_quota_v2(folder) for folder in _groups(root, "")]
    found += [_quota_v1(folder) for folder in _groups(root, "cpu")]
    return min((quota for quota in found if quota is not None), default=None)


def _groups(root: Path, controller: str) -> list[Path]:
    """Folders of this process's control group and those above it. An empty controller: those of version 2."""
    found = []
    for line in _read(root / "proc/self/cgroup").splitlines() or ["0::/"]:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controller in controllers.split(","):
            for mount in dict.fromkeys((controllers, controller)):
                found += _upwards(root / "sys/fs/cgroup" / mount, path)
    return found


def _upwards(mount: Path, path: str) -> list[Path]:
    """The group's folder and those above it. A container may see a host's path: then the mount counts."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return [mount.joinpath(*parts[:count]) for count in range(len(parts), -1, -1)]


def _quota_v2(folder: Path) -> float | None:
    words = _read(folder / "cpu.max").split()
    return _ratio(*words) if len(words) == 2 else None


def _quota_v1(folder: Path) -> float | None:
    return _ratio(_read(folder / "cpu.cfs_quota_us").strip(), _read(folder / "cpu.cfs_period_us").strip())


def _ratio(quota: str, period: str) -> float | None:
    if not (quota.isdigit() and period.isdigit()) or int(period) == 0:  # "max" and -1: none
        return None
    return int(quota) / int(period)


def _limit(path: Path) -> int | None:
    text = _read(path).strip()  # "max", or a number above every machine's memory: no limit
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""  # not Linux, or not there


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
