"""From an EngineConfig to a running EngineCore: resolve, plan memory, load, warm up, and time each stage.

Used by the engine process and by the in-process `LLM`. `backend_choice` chooses the backend; the backends'
own parts are in `native_build`, `torch_build` and `cuda_build`, imported when chosen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
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
from ridgeline.engine.schedule.request import Request, SamplingParams
from ridgeline.engine.start.backend_choice import BackendChoice, choose_backend
from ridgeline.engine.start.drafter.build import DrafterBuild
from ridgeline.engine.start.drafter.choice import choose_speculation
from ridgeline.engine.start.loading import BackendBuild, Loaded, Progress, StepSizes, kv_notes
from ridgeline.engine.start.memory import MemoryPlan, available_memory, plan_memory, resident_bytes
from ridgeline.engine.start.memory_receipt import MemoryReceipt
from ridgeline.machine import compute_threads
from ridgeline.models.files.generation_config import NO_DEFAULTS, SamplingDefaults, sampling_defaults
from ridgeline.models.files.registry import find_known
from ridgeline.models.spec.families import check_servable
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.read_spec import read_spec

if TYPE_CHECKING:
    from ridgeline.engine.run.core import EngineCore

DEFAULT_MAX_RUNNING = 64
CUDA_STEP_TOKENS, CUDA_MAX_RUNNING = 8192, 256
BACKGROUND_TOKENS, CUDA_BACKGROUND_TOKENS = 8, 32  # tokens that add little to a step's time
WARM_UP_TOKENS = 8  # more would test nothing new and delay the start


@dataclass
class StartupBudget:
    """The seconds and bytes of each stage of a start; printed by the process that started it."""

    seconds: dict[str, float] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    _inner_s: float = 0.0  # seconds of the stages nested in the current one

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage. A nested stage's time is not counted twice: all stages add up to the total."""
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
    summary: str  # the backend with its units and formats, for the start-up message
    notes: tuple[str, ...]  # why this backend, what a setting costs; for the start-up message
    budget: StartupBudget
    limits: dict[str, float]
    sampling: SamplingDefaults = NO_DEFAULTS  # for requests that do not set them
    memory: Callable[[], MemoryReceipt] | None = None  # GPU only
    kv_dtype: str = ""  # of the KV cache, with "auto" resolved

    @property
    def receipt(self) -> MemoryReceipt | None:
        """A GPU's memory, planned and observed, now and with the peaks so far."""
        return None if self.memory is None else self.memory()


def build_engine(
    config: EngineConfig,
    path: Path,
    budget: StartupBudget | None = None,
    progress: Progress | None = None,
    *,
    untrusted_grammars: bool = False,
) -> BuiltEngine:
    """Build a warm engine from the files on disk. The memory plan is made before weights are read.

    untrusted_grammars: compile each grammar in a child process first.
    """
    budget = budget or StartupBudget()
    with budget.stage("plan"):
        spec = read_spec(path)
        check_servable(spec)
        sampling = checked_sampling_defaults(config, path)
        choice = choose_backend(config, spec)
        backend = _backend_build(choice, budget, config, path, spec)
        sizes = step_sizes(config, choice, spec, backend.weights_bytes)
        drafting = choose_speculation(config, choice.name, spec, path)
        drafter = DrafterBuild(drafting, config, spec, partial(_backend_build, choice, StartupBudget()))
    grammars = GrammarCompiler(path, spec.vocab_size, spec.eos_ids, untrusted=untrusted_grammars)
    with budget.stage("import"):
        backend.prepare()
    with budget.stage("plan"):
        footprint = backend.footprint(sizes)
        room = drafter.footprint(sizes, footprint)
        plan = plan_memory(spec, config, footprint, available_memory(), room)
    with budget.stage("weights"):
        loaded = backend.load(plan, sizes, progress)
        core = _core(config, path, spec, plan, sizes, loaded, choice.name)
        core.grammars = grammars
        core.speculation = drafter.build(loaded, plan, sizes)
    if loaded.before_first_step is not None:
        with budget.stage("kernels"):
            loaded.before_first_step()
    with budget.stage("warm-up"):
        _warm_up(core)
    if loaded.after_warm_up is not None:
        with budget.stage("graphs"):
            loaded.after_warm_up()
    core.start_counting_experts()
    with budget.stage("limits"):
        limits = backend.limits().as_dict()
    budget.bytes["weights"] = loaded.weights_bytes
    budget.bytes["kv"] = plan.kv_bytes
    if loaded.memory is None:
        if plan.drafter_bytes:
            budget.bytes |= {"drafter": drafter.weights_bytes, "drafter_kv": plan.drafter_kv_bytes}
        in_memory = loaded.weights_bytes - loaded.mapped_bytes + drafter.resident_bytes
        budget.bytes["rest"] = max(resident_bytes() - in_memory, 0)
    else:
        budget.bytes |= {**loaded.memory().as_bytes(), "rest": resident_bytes()}
    return BuiltEngine(
        core=core,
        spec=spec,
        plan=plan,
        backend=choice.name,
        dtype=loaded.weights,
        summary=f"{choice.name} ({loaded.unit}), weights {loaded.weights}, KV {loaded.kv}",
        notes=((f"{choice.name} because {choice.reason}",) if choice.reason else ())
        + loaded.notes
        + (kv_notes(spec, path, loaded.kv) if config.load_format == "auto" else ())
        + drafting.notes,
        budget=budget,
        limits=limits,
        sampling=sampling,
        memory=loaded.memory,
        kv_dtype=loaded.kv,
    )


def checked_sampling_defaults(config: EngineConfig, path: Path) -> SamplingDefaults:
    """Raises InvalidConfig if a request that uses these defaults would be rejected."""
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
            f"{defaults.source}: {error}; --generation-config none ignores the file's defaults"
        ) from None
    return defaults


def step_sizes(config: EngineConfig, choice: BackendChoice, spec: ModelSpec, weights_bytes: int) -> StepSizes:
    """The step's budget and prefill chunk: as configured, else as calibrated, else one default for both."""
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
    choice: BackendChoice, budget: StartupBudget, config: EngineConfig, path: Path, spec: ModelSpec
) -> BackendBuild:
    threads = config.threads or compute_threads()
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
    from ridgeline.engine.run.core import EngineCore
    from ridgeline.engine.schedule.scheduler import Scheduler, SchedulerLimits

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
    lookahead = None if config.overlap else 0  # None: the runner's own value
    scheduler = Scheduler(limits)
    scheduler.index.evicted = {}
    return EngineCore(scheduler, loaded.runner, config.step_ring, lookahead=lookahead)


def _warm_up(core: EngineCore) -> None:
    """A short request through the whole path: touches pages, starts thread pools, selects kernels. Then one
    for a drafter that computes.

    A backend that cannot answer them does not start. They use a separate scheduler, so that the real one's
    counters start at zero.
    """
    from ridgeline.engine.run.core import EngineCore
    from ridgeline.engine.schedule.scheduler import Scheduler
    from ridgeline.engine.speculate.rehearsal import OUTPUT, PROMPT, Rehearsal

    _answer(EngineCore(Scheduler(core.scheduler.limits), core.runner), WARM_UP_TOKENS, 2)
    if core.speculation is not None and core.speculation.asking is not None:
        rehearsal = Rehearsal(core.speculation)
        warm = EngineCore(Scheduler(core.scheduler.limits), core.runner, speculation=rehearsal)
        _answer(warm, PROMPT, OUTPUT)
        rehearsal.end()
    drop_sequences = getattr(core.runner, "drop_sequences", None)
    if drop_sequences is not None:  # no plan of the real scheduler will retire these sequences
        drop_sequences()


def _answer(warm: EngineCore, prompt: int, output: int) -> None:
    length = max(1, min(prompt, warm.scheduler.limits.context - output))
    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    warm.add(Request("warm-up", [0] * length, params))
    while warm.has_work:
        for delta in warm.step():
            if delta.error is not None:
                raise BackendUnavailable(f"the {warm.runner.name} backend's first step failed: {delta.error}")
