"""From an EngineConfig to a running EngineCore: resolve, plan memory, load, warm up, with a budget of each.

Used by the engine process and by the in-process `LLM`. torch is imported here and below, nowhere above.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ridgeline.engine.config import EngineConfig
from ridgeline.engine.memory import MemoryPlan, available_memory, plan_memory, resident_bytes
from ridgeline.engine.request import Request, SamplingParams
from ridgeline.models.families import check_servable
from ridgeline.models.read_spec import read_spec
from ridgeline.models.spec import ModelSpec

if TYPE_CHECKING:
    from ridgeline.engine.core import EngineCore

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
WARM_UP_TOKENS = 32

Progress = Callable[[int, int], None]


@dataclass
class StartupBudget:
    """Where the seconds and bytes of a start went; printed by whoever started it."""

    seconds: dict[str, float] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started


@dataclass(frozen=True)
class BuiltEngine:
    core: EngineCore
    spec: ModelSpec
    plan: MemoryPlan
    backend: str
    dtype: str
    budget: StartupBudget
    limits: dict[str, float]


def build_engine(
    config: EngineConfig, path: Path, budget: StartupBudget | None = None, progress: Progress | None = None
) -> BuiltEngine:
    """Everything from files on disk to a warm engine. The memory plan is made before weights are read."""
    budget = budget or StartupBudget()
    with budget.stage("plan"):
        spec = read_spec(path)
        check_servable(spec)
        dtype = "float32" if config.dtype == "auto" else config.dtype
        plan = plan_memory(spec, config, DTYPE_BYTES[dtype], available_memory())
    with budget.stage("import"):
        _import_torch(config)
    with budget.stage("weights"):
        core = _load(config, path, spec, plan, dtype, progress)
    with budget.stage("warm-up"):
        _warm_up(core, plan)
    with budget.stage("limits"):
        limits = _measure_limits(spec, dtype)
    budget.bytes["weights"] = plan.weights_bytes
    budget.bytes["kv"] = plan.kv_bytes
    budget.bytes["rest"] = max(resident_bytes() - plan.weights_bytes, 0)
    return BuiltEngine(core, spec, plan, core.runner.name, dtype, budget, limits)


def _import_torch(config: EngineConfig) -> None:
    # Some virtual machines advertise AMX but hide the CPUID leaf that describes its tiles; torch's bf16
    # matmul then dies with SIGILL. oneDNN reads this variable when torch is imported.
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
    import torch

    torch.set_num_threads(config.threads or usable_cpus())


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


def _load(
    config: EngineConfig,
    path: Path,
    spec: ModelSpec,
    plan: MemoryPlan,
    dtype_name: str,
    progress: Progress | None,
) -> EngineCore:
    import torch

    from ridgeline.engine.core import EngineCore
    from ridgeline.engine.runner import TorchRunner
    from ridgeline.engine.sampler import Sampler
    from ridgeline.engine.scheduler import Scheduler, SchedulerLimits
    from ridgeline.models.decoder import Decoder, allocate_kv
    from ridgeline.models.weights import load_weights
    from ridgeline.ops.backend import select_backend

    dtype: torch.dtype = getattr(torch, dtype_name)
    weights = load_weights(path, spec, dtype, progress)
    decoder = Decoder(spec, weights, select_backend(config.backend), plan.max_context)
    kv_cache = allocate_kv(spec, plan.num_blocks, config.block_size, dtype, torch.device("cpu"))
    runner = TorchRunner(decoder, kv_cache, config.block_size, Sampler(spec.eos_ids))
    limits = SchedulerLimits(
        step_tokens=config.step_tokens,
        prefill_chunk=config.prefill_chunk or config.step_tokens,
        max_running=config.max_running,
        max_waiting=config.max_waiting,
        block_size=config.block_size,
        num_blocks=plan.num_blocks,
        max_context=plan.max_context,
        prefix_cache=config.prefix_cache,
        eos_ids=spec.eos_ids,
        model_salt=f"{path}:{dtype_name}",
    )
    return EngineCore(Scheduler(limits), runner, config.step_ring)


def _measure_limits(spec: ModelSpec, dtype_name: str) -> dict[str, float]:
    import torch

    from ridgeline.engine.limits import measure_limits

    return measure_limits(spec, getattr(torch, dtype_name)).as_dict()


def _warm_up(core: EngineCore, plan: MemoryPlan) -> None:
    """One short request through the whole path: pages touched, thread pools started, kernels chosen.

    By a scheduler of its own, so that the real one's figures begin at zero.
    """
    from ridgeline.engine.core import EngineCore
    from ridgeline.engine.scheduler import Scheduler

    warm = EngineCore(Scheduler(core.scheduler.limits), core.runner)
    length = min(WARM_UP_TOKENS, plan.max_context - 1)
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    warm.add(Request("warm-up", [0] * length, params))
    while warm.has_work:
        warm.step()
