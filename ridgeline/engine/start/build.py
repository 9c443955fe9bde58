"""From an EngineConfig to a running EngineCore: resolve, plan memory, load, warm up, with a budget of each.

Used by the engine process and by the in-process `LLM`. Which backend serves is chosen here, by
`backend_choice`; the backends' own parts are in `native_build`, `torch_build` and `cuda_build`, imported when
chosen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ridgeline.engine.config import EngineConfig
from ridgeline.engine.errors import BackendUnavailable, InvalidConfig, InvalidRequest
from ridgeline.engine.grammar.compiler import GrammarCompiler
from ridgeline.engine.limits.calibration import (
    DEFAULT_STEP_TOKENS,
    StepChoice,
    load_calibration,
    this_machine,
)
from ridgeline.engine.plan.request import Request, SamplingParams
from ridgeline.engine.start.backend_choice import BackendChoice, choose_backend
from ridgeline.engine.start.loading import BackendBuild, Loaded, Progress, StepSizes
from ridgeline.engine.start.memory import MemoryPlan, available_memory, plan_memory, resident_bytes
from ridgeline.engine.start.memory_receipt import MemoryReceipt
from ridgeline.machine import usable_cpus
from ridgeline.models.files.generation_config import NO_DEFAULTS, SamplingDefaults, sampling_defaults
from ridgeline.models.files.registry import find_known
from ridgeline.models.spec.families import check_servable
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.read_spec import read_spec

if TYPE_CHECKING:
    from ridgeline.engine.run.core import EngineCore

DEFAULT_MAX_RUNNING = 64
CUDA_STEP_TOKENS, CUDA_MAX_RUNNING = 8192, 256
BACKGROUND_TOKENS, CUDA_BACKGROUND_TOKENS = 8, 32  # what a step takes on at little cost
WARM_UP_TOKENS = 8  # more would show nothing new, and hold up the start for as long as they are computed


@dataclass
class StartupBudget:
    """Where the seconds and bytes of a start went; printed by whoever started it."""

    seconds: dict[str, float] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    _inner_s: float = 0.0  # of the stages within the one that is on

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """The time of a stage within another is the inner one's alone: all of them add up to the whole."""
        started, outer_s, self._inner_s = time.monotonic(), self._inner_s, 0.0
        self.seconds.setdefault(name, 0.0)
        yield
        took = time.monotonic() - started
        self.seconds[name] += took - self._inner_s
        self._inner_s = outer_s + took


@dataclass(frozen=True)
class BuiltEngine:
    core: EngineCore
    spec: ModelSpec
    plan: MemoryPlan
    backend: str  # native, torch or cuda
    dtype: str  # the weights' format
    summary: str  # the backend with its units and formats, for people
    notes: tuple[str, ...]  # why this backend, what a setting costs; for people
    budget: StartupBudget
    limits: dict[str, float]
    sampling: SamplingDefaults = NO_DEFAULTS  # of requests that leave it out
    memory: Callable[[], MemoryReceipt] | None = None  # of a GPU

    @property
    def receipt(self) -> MemoryReceipt | None:
        """A GPU's memory, planned and observed, as it is now and with the peaks so far."""
        return None if self.memory is None else self.memory()


def build_engine(
    config: EngineConfig,
    path: Path,
    budget: StartupBudget | None = None,
    progress: Progress | None = None,
    *,
    for_strangers: bool = False,
) -> BuiltEngine:
    """Everything from files on disk to a warm engine. The memory plan is made before weights are read.

    for_strangers: their grammars are tried out before they are trusted.
    """
    budget = budget or StartupBudget()
    with budget.stage("plan"):
        spec = read_spec(path)
        check_servable(spec)
        sampling = checked_sampling_defaults(config, path)
        choice = choose_backend(config, spec)
        backend = _backend_build(choice, config, path, spec, budget)
        sizes = step_sizes(config, choice, spec, backend.weights_bytes)
    grammars = GrammarCompiler(path, spec.vocab_size, spec.eos_ids, tries=for_strangers)
    with budget.stage("import"):
        backend.prepare()
    with budget.stage("plan"):
        plan = plan_memory(spec, config, backend.footprint(sizes), available_memory())
    with budget.stage("weights"):
        loaded = backend.load(plan, sizes, progress)
        core = _core(config, path, spec, plan, sizes, loaded, choice.name)
        core.grammars = grammars
    if loaded.before_first_step is not None:
        with budget.stage("kernels"):
            loaded.before_first_step()
    with budget.stage("warm-up"):
        _warm_up(core, plan)
    with budget.stage("limits"):
        limits = backend.limits().as_dict()
    budget.bytes["weights"] = loaded.weights_bytes
    budget.bytes["kv"] = plan.kv_bytes
    if loaded.memory is None:
        budget.bytes["rest"] = max(resident_bytes() - loaded.weights_bytes, 0)
    else:
        budget.bytes |= {**loaded.memory().as_bytes(), "rest": resident_bytes()}
    return BuiltEngine(
        core=core,
        spec=spec,
        plan=plan,
        backend=choice.name,
        dtype=loaded.weights,
        summary=f"{choice.name} ({loaded.unit}), weights {loaded.weights}, KV {loaded.kv}",
        notes=((f"{choice.name} because {choice.reason}",) if choice.reason else ()) + loaded.notes,
        budget=budget,
        limits=limits,
        sampling=sampling,
        memory=loaded.memory,
    )


def checked_sampling_defaults(config: EngineConfig, path: Path) -> SamplingDefaults:
    """Raises InvalidConfig where a request that takes them would be refused."""
    known = find_known(config.model)
    defaults = sampling_defaults(
        path,
        config.generation_config,
        config.override_generation_config,
        known.sampling if known is not None else None,
    )
    try:
        SamplingParams(**defaults.values())
    except InvalidRequest as error:
        raise InvalidConfig(
            f"{defaults.source}: {error}; --generation-config none leaves the file's defaults out"
        ) from None
    return defaults


def step_sizes(config: EngineConfig, choice: BackendChoice, spec: ModelSpec, weights_bytes: int) -> StepSizes:
    """The step's budget and prefill chunk: as asked for, else as calibrated, else one default for both."""
    step_tokens, chunk, running = config.step_tokens, config.prefill_chunk, config.max_running
    if choice.name == "cuda":
        step_tokens, running = step_tokens or CUDA_STEP_TOKENS, running or CUDA_MAX_RUNNING
    if step_tokens is None and choice.name == "native":
        calibrated = _calibrated_choice(config, spec, weights_bytes)
        if calibrated is not None:
            step_tokens, chunk = calibrated.step_tokens, chunk or calibrated.prefill_chunk
    step_tokens = step_tokens or DEFAULT_STEP_TOKENS
    return StepSizes(step_tokens, min(chunk or step_tokens, step_tokens), running or DEFAULT_MAX_RUNNING)


def _calibrated_choice(config: EngineConfig, spec: ModelSpec, weights_bytes: int) -> StepChoice | None:
    calibration = load_calibration(this_machine(config.threads))
    return None if calibration is None else calibration.choice(spec.parameters, weights_bytes)


def _backend_build(
    choice: BackendChoice, config: EngineConfig, path: Path, spec: ModelSpec, budget: StartupBudget
) -> BackendBuild:
    threads = config.threads or usable_cpus()
    if choice.name == "native":
        from ridgeline.engine.start.native_build import NativeBuild

        return NativeBuild(config, path, spec, threads)
    if choice.name == "cuda":
        from ridgeline.engine.start.cuda_build import CudaBuild

        return CudaBuild(config, path, spec, threads, budget.stage)
    from ridgeline.engine.start.torch_build import TorchBuild

    return TorchBuild(config, path, spec, threads)


def _core(
    config: EngineConfig,
    path: Path,
    spec: ModelSpec,
    plan: MemoryPlan,
    sizes: StepSizes,
    loaded: Loaded,
    backend: str,
) -> EngineCore:
    from ridgeline.engine.plan.scheduler import Scheduler, SchedulerLimits
    from ridgeline.engine.run.core import EngineCore

    limits = SchedulerLimits(
        step_tokens=sizes.step_tokens,
        prefill_chunk=sizes.prefill_chunk,
        max_running=sizes.max_running,
        max_waiting=config.max_waiting,
        block_size=config.block_size,
        num_blocks=plan.num_blocks,
        max_context=plan.max_context,
        prefix_cache=config.prefix_cache,
        background_tokens=config.background_tokens
        or (CUDA_BACKGROUND_TOKENS if backend == "cuda" else BACKGROUND_TOKENS),
        eos_ids=spec.eos_ids,
        model_salt=f"{path}:{loaded.runner.name}:{loaded.weights}:{loaded.kv}",
    )
    lookahead = None if config.overlap else 0  # None: as far as the runner likes
    return EngineCore(Scheduler(limits), loaded.runner, config.step_ring, lookahead=lookahead)


def _warm_up(core: EngineCore, plan: MemoryPlan) -> None:
    """One short request through the whole path: pages touched, thread pools started, kernels chosen.

    A backend that cannot answer it does not start. By a scheduler of its own, so that the real one's figures
    begin at zero.
    """
    from ridgeline.engine.plan.scheduler import Scheduler
    from ridgeline.engine.run.core import EngineCore

    warm = EngineCore(Scheduler(core.scheduler.limits), core.runner)
    length = min(WARM_UP_TOKENS, plan.max_context - 1)
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    warm.add(Request("warm-up", [0] * length, params))
    while warm.has_work:
        for delta in warm.step():
            if delta.error is not None:
                raise BackendUnavailable(f"the {core.runner.name} backend's first step failed: {delta.error}")
    forget_all = getattr(core.runner, "forget_all", None)
    if forget_all is not None:  # no plan of the real scheduler will say that this sequence has ended
        forget_all()
