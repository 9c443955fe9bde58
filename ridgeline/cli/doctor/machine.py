"""Reads processor, cores, memory and limits of this machine from the system's files. For `doctor`.

Every function takes the root directory that it reads, so that tests can describe another machine.
"""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

from ridgeline.machine import ROOT, allowed_cpus, compute_threads, cpu_quota

# Instruction sets, best last; names as in /proc/cpuinfo.
X86_SETS = {
    "AVX2": ("avx2",),
    "AVX-512": ("avx512f",),
    "VNNI": ("avx512_vnni", "avx_vnni"),
    "BF16": ("avx512_bf16",),
    "AMX": ("amx_tile",),
}
ARM_SETS = {
    "NEON": ("asimd",),
    "dot product": ("asimddp",),
    "I8MM": ("i8mm",),
    "BF16": ("bf16",),
    "SVE": ("sve",),
}


@dataclass(frozen=True, slots=True)
class Processor:
    model: str
    flags: frozenset[str]
    is_x86: bool

    @property
    def sets(self) -> list[str]:
        """The instruction sets it says it has, by their common names."""
        known = X86_SETS if self.is_x86 else ARM_SETS
        return [name for name, flags in known.items() if self.flags.intersection(flags)]

    @property
    def missing_sets(self) -> list[str]:
        known = X86_SETS if self.is_x86 else ARM_SETS
        return [name for name in known if name not in self.sets]


@dataclass(frozen=True, slots=True)
class Cores:
    present: int
    affinity: int  # cores this process may run on
    quota: float | None  # the control group's share, in cores
    threads: int  # that compute by default: one for each core of the fastest kind

    @property
    def usable(self) -> int:
        return self.affinity if self.quota is None else min(self.affinity, max(1, int(self.quota)))


@dataclass(frozen=True, slots=True)
class Memory:
    total_bytes: int
    available_bytes: int
    group_limit_bytes: int | None  # the control group's limit, if it has one
    group_used_bytes: int | None

    @property
    def usable_bytes(self) -> int:
        """Bytes that a new process can still use."""
        if self.group_limit_bytes is None:
            return self.available_bytes
        return min(self.available_bytes, max(0, self.group_limit_bytes - (self.group_used_bytes or 0)))


def processor(root: Path = ROOT) -> Processor:
    fields: dict[str, str] = {}
    for line in _read(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    flags = fields.get("flags") or fields.get("Features") or ""
    model = fields.get("model name") or platform.processor() or platform.machine()
    is_x86 = "flags" in fields or platform.machine().lower() in ("x86_64", "amd64")
    return Processor(model, frozenset(flags.split()), is_x86)


def cores(root: Path = ROOT) -> Cores:
    return Cores(os.cpu_count() or 1, len(allowed_cpus()), cpu_quota(root), compute_threads(root))


def memory(root: Path = ROOT) -> Memory:
    kib: dict[str, int] = {}
    for line in _read(root / "proc/meminfo").splitlines():
        key, _, value = line.partition(":")
        kib[key] = int(value.split()[0])
    total = kib.get("MemTotal", 0) * 1024 or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = kib.get("MemAvailable", 0) * 1024 or total // 2
    group = root / "sys/fs/cgroup"
    return Memory(total, available, _number(group / "memory.max"), _number(group / "memory.current"))


def gpu_driver(root: Path = ROOT) -> str:
    """The version of NVIDIA's kernel module; empty where there is none."""
    found = re.search(r"\bKernel Module\b.*?(\d+\.[\d.]+)", _read(root / "proc/driver/nvidia/version"))
    return found[1] if found else ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""  # not Linux, or no control groups


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None
