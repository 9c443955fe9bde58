"""The memory plan: bytes for weights, KV cache and the rest, decided before anything is loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ridgeline.engine.config import EngineConfig
from ridgeline.engine.errors import OutOfMemoryPlan
from ridgeline.models.spec.model_spec import ModelSpec

GIB = 1 << 30
# Default: room for this many tokens (or one full context, if that is more). Enough for dozens of chats
# without filling a laptop's memory with the cache of a small model.
DEFAULT_KV_TOKENS = 65_536
DEFAULT_FRACTION = 0.6  # other programs use the machine's memory too
DEVICE_FRACTION = 0.9
SMALLER_ON_A_CPU = "choose a smaller --weights format or model, lower --step-tokens"
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Footprint:
    """The memory a backend needs for a model, known before anything is loaded."""

    weights_bytes: int
    kv_bytes_per_token: int
    activation_bytes: int  # peak of the largest step
    reserve_bytes: int = 0  # used by libraries and graphs, not allocated here
    device: DeviceRoom | None = None  # the device that holds all this; None: main memory


@dataclass(frozen=True, slots=True)
class DeviceRoom:
    """A GPU's memory. It is not shared, so the KV cache takes all that fits and is useful."""

    free_bytes: int
    most_kv_tokens: int
    lower: str  # settings that would reduce the footprint, for error messages


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    weights_bytes: int
    kv_bytes: int
    activation_bytes: int
    num_blocks: int
    kv_tokens: int
    max_context: int
    available_bytes: int
    reserve_bytes: int = 0


def plan_memory(
    spec: ModelSpec, config: EngineConfig, footprint: Footprint, available_bytes: int
) -> MemoryPlan:
    """Weights first, then the largest step's activations, then KV. If it does not fit, says what to lower.

    available_bytes: of main memory; a device has its own value.
    """
    max_context = planned_context(spec, config)
    kv_token_bytes, device = footprint.kv_bytes_per_token, footprint.device
    weights, activations = footprint.weights_bytes, footprint.activation_bytes
    rest = activations + footprint.reserve_bytes
    available = available_bytes if device is None else device.free_bytes
    fraction = config.memory_fraction or (DEFAULT_FRACTION if device is None else DEVICE_FRACTION)
    fraction *= config.memory_share
    budget = int(available * fraction) - weights - rest
    if budget < kv_token_bytes * config.block_size:
        where = "available" if device is None else "free on the GPU"
        lower = SMALLER_ON_A_CPU if device is None else device.lower
        raise OutOfMemoryPlan(
            f"weights of {weights / GIB:.2f} GiB and {rest / GIB:.2f} GiB of activations do not fit "
            f"in {fraction:.0%} of the {available / GIB:.2f} GiB {where}: {lower}, or raise --memory-fraction"
        )
    wanted = _wanted_kv_tokens(config, max_context, footprint)
    fitting = budget // kv_token_bytes
    if wanted > fitting and (config.kv_tokens or config.kv_memory_gib):
        raise OutOfMemoryPlan(
            f"a KV cache of {wanted} tokens needs {wanted * kv_token_bytes / GIB:.2f} GiB, but only "
            f"{budget / GIB:.2f} GiB are left after the weights: lower --kv-tokens or --kv-memory-gib "
            f"(at most {fitting} tokens), or raise --memory-fraction"
        )
    num_blocks = min(wanted, fitting) // config.block_size
    if num_blocks < 1:
        raise OutOfMemoryPlan(f"the KV cache cannot hold a single block of {config.block_size} tokens")
    kv_tokens = num_blocks * config.block_size
    return MemoryPlan(
        weights_bytes=weights,
        kv_bytes=kv_tokens * kv_token_bytes,
        activation_bytes=activations,
        num_blocks=num_blocks,
        kv_tokens=kv_tokens,
        max_context=min(max_context, kv_tokens),
        available_bytes=available,
        reserve_bytes=footprint.reserve_bytes,
    )


def planned_context(spec: ModelSpec, config: EngineConfig) -> int:
    """The longest sequence requested; the KV cache may turn out to hold less."""
    if config.max_context is None:
        return spec.max_context
    if config.max_context > spec.max_context:
        raise OutOfMemoryPlan(
            f"--max-context {config.max_context} exceeds the model's context of {spec.max_context}"
        )
    return config.max_context


def _wanted_kv_tokens(config: EngineConfig, max_context: int, footprint: Footprint) -> int:
    if config.kv_tokens is not None:
        return config.kv_tokens
    if config.kv_memory_gib is not None:
        return int(config.kv_memory_gib * GIB) // footprint.kv_bytes_per_token
    default = DEFAULT_KV_TOKENS if footprint.device is None else footprint.device.most_kv_tokens
    return max(default, max_context)


def available_memory() -> int:
    """Bytes this process may still allocate: the machine's free memory, or its cgroup's if that is less."""
    available = _meminfo_available()
    try:
        limit = int((CGROUP / "memory.max").read_text())
        current = int((CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        # The page cache counts as used but can be reclaimed: a model just pulled must not fill the limit.
        reclaimable = int(stat["inactive_file"])
    except (OSError, ValueError, KeyError):  # no cgroup v2, or its limit is "max"
        return available
    return min(available, max(limit - current + reclaimable, 0))


def _meminfo_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    # Not Linux: assume half of the installed memory.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def resident_bytes() -> int:
    """Resident memory of this process."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
