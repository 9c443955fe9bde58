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
    element_bytes: int = 4  # of the embedding; a draft head computes in the same type


@dataclass(frozen=True, slots=True)
class DeviceRoom:
    """A GPU's memory. It is not shared, so the KV cache takes all that fits and is useful."""

    free_bytes: int
    most_kv_tokens: int
    lower: str  # settings that would reduce the footprint, for error messages


@dataclass(frozen=True, slots=True)
class DrafterFootprint:
    """The memory of a draft model or head, in the same place as the served model's."""

    weights_bytes: int = 0
    kv_bytes_per_token: int = 0  # of a draft model: its cache holds as many tokens as the served model's
    kv_bytes_per_sequence: int = 0  # of a head: a part of its cache for each sequence, of a fixed size
    most_sequences: int = 0
    activation_bytes: int = 0
    reserve_bytes: int = 0


NO_DRAFTER = DrafterFootprint()
HEAD_KV_SHARE = 1 / 8  # of the memory for KV: the most that a head's cache takes
HEAD_KV_COPIES = 2  # a head's cache is copied when it grows, and the part that is read at each step


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The drafter's bytes are beside the served model's, not among them."""

    weights_bytes: int
    kv_bytes: int
    activation_bytes: int
    num_blocks: int
    kv_tokens: int
    max_context: int
    available_bytes: int
    reserve_bytes: int = 0
    drafter_bytes: int = 0  # weights and activations
    drafter_kv_bytes: int = 0
    drafter_reserve_bytes: int = 0
    drafter_sequences: int = 0  # that a head has room for; the others have no guesses


def plan_memory(
    spec: ModelSpec,
    config: EngineConfig,
    footprint: Footprint,
    available_bytes: int,
    drafter: DrafterFootprint = NO_DRAFTER,
) -> MemoryPlan:
    """Weights first, then the largest step's activations, then KV; a drafter's with the model's. If it does
    not fit, says what to lower.

    available_bytes: of main memory; a device has its own value.
    """
    max_context = planned_context(spec, config)
    device = footprint.device
    kv_token_bytes = footprint.kv_bytes_per_token + drafter.kv_bytes_per_token
    weights = footprint.weights_bytes + drafter.weights_bytes
    rest = footprint.activation_bytes + footprint.reserve_bytes
    rest += drafter.activation_bytes + drafter.reserve_bytes
    available = available_bytes if device is None else device.free_bytes
    fraction = config.memory_fraction or (DEFAULT_FRACTION if device is None else DEVICE_FRACTION)
    fraction *= config.memory_share
    budget = int(available * fraction) - weights - rest
    sequences = _sequences_of_a_head(drafter, budget)
    head_kv = sequences * drafter.kv_bytes_per_sequence
    budget -= HEAD_KV_COPIES * head_kv
    if budget < kv_token_bytes * config.block_size:
        where = "available" if device is None else "free on the GPU"
        lower = SMALLER_ON_A_CPU if device is None else device.lower
        raise OutOfMemoryPlan(
            f"weights of {weights / GIB:.2f} GiB and {rest / GIB:.2f} GiB of activations"
            f"{_drafters_part(drafter)} do not fit "
            f"in {fraction:.0%} of the {available / GIB:.2f} GiB {where}: {lower}, or raise --memory-fraction"
        )
    wanted = _wanted_kv_tokens(config, max_context, footprint, kv_token_bytes)
    fitting = budget // kv_token_bytes
    if wanted > fitting and (config.kv_tokens or config.kv_memory_gib):
        both = " (with the draft model's)" if drafter.kv_bytes_per_token else ""
        raise OutOfMemoryPlan(
            f"a KV cache of {wanted} tokens needs {wanted * kv_token_bytes / GIB:.2f} GiB{both}, but only "
            f"{budget / GIB:.2f} GiB are left after the weights: lower --kv-tokens or --kv-memory-gib "
            f"(at most {fitting} tokens), or raise --memory-fraction"
        )
    num_blocks = min(wanted, fitting) // config.block_size
    if num_blocks < 1:
        raise OutOfMemoryPlan(f"the KV cache cannot hold a single block of {config.block_size} tokens")
    kv_tokens = num_blocks * config.block_size
    return MemoryPlan(
        weights_bytes=footprint.weights_bytes,
        kv_bytes=kv_tokens * footprint.kv_bytes_per_token,
        activation_bytes=footprint.activation_bytes,
        num_blocks=num_blocks,
        kv_tokens=kv_tokens,
        max_context=min(max_context, kv_tokens),
        available_bytes=available,
        reserve_bytes=footprint.reserve_bytes,
        drafter_bytes=drafter.weights_bytes + drafter.activation_bytes + (HEAD_KV_COPIES - 1) * head_kv,
        drafter_kv_bytes=head_kv + kv_tokens * drafter.kv_bytes_per_token,
        drafter_reserve_bytes=drafter.reserve_bytes,
        drafter_sequences=sequences,
    )


def draft_model_plan(plan: MemoryPlan, drafter: DrafterFootprint, max_context: int) -> MemoryPlan:
    """The part of a plan that is the draft model's, as its own build reads it. max_context: of that model"""
    return MemoryPlan(
        weights_bytes=drafter.weights_bytes,
        kv_bytes=plan.drafter_kv_bytes,
        activation_bytes=drafter.activation_bytes,
        num_blocks=plan.num_blocks,
        kv_tokens=plan.kv_tokens,
        max_context=min(max_context, plan.max_context),
        available_bytes=plan.available_bytes,
        reserve_bytes=drafter.reserve_bytes,
    )


def _sequences_of_a_head(drafter: DrafterFootprint, budget: int) -> int:
    if not drafter.kv_bytes_per_sequence:
        return drafter.most_sequences
    fitting = int(budget * HEAD_KV_SHARE) // (HEAD_KV_COPIES * drafter.kv_bytes_per_sequence)
    return max(1, min(drafter.most_sequences, fitting))


def _drafters_part(drafter: DrafterFootprint) -> str:
    whole = drafter.weights_bytes + drafter.activation_bytes + drafter.reserve_bytes
    return f" ({whole / GIB:.2f} GiB of them for --speculate)" if whole else ""


def planned_context(spec: ModelSpec, config: EngineConfig) -> int:
    """The longest sequence requested; the KV cache may turn out to hold less."""
    if config.max_context is None:
        return spec.max_context
    if config.max_context > spec.max_context:
        raise OutOfMemoryPlan(
            f"--max-context {config.max_context} exceeds the model's context of {spec.max_context}"
        )
    return config.max_context


def _wanted_kv_tokens(
    config: EngineConfig, max_context: int, footprint: Footprint, kv_token_bytes: int
) -> int:
    """kv_token_bytes: with those of a draft model"""
    if config.kv_tokens is not None:
        return config.kv_tokens
    if config.kv_memory_gib is not None:
        return int(config.kv_memory_gib * GIB) // kv_token_bytes
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
