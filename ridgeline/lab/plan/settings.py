"""The engine settings that a plan chooses, each with its reason; as a config file and as scheduler limits.

`make_plan` simulates with the limits, `result` writes the file, `ridgeline serve --config` runs it. Only for
ridgeline: another engine gets its command line.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ridgeline.engine.config import EngineConfig
from ridgeline.engine.limits.calibration import DEFAULT_STEP_TOKENS, load_calibration
from ridgeline.engine.schedule.intake import SchedulerLimits
from ridgeline.lab.perfmodel.deployment import Deployment
from ridgeline.lab.plan.demand import Demand
from ridgeline.lab.plan.engines import gpu_precision
from ridgeline.lab.plan.search import Candidate
from ridgeline.models.files.hub import hub_id
from ridgeline.models.files.registry import find_known
from ridgeline.models.spec.coverage import PLANNED_FORMATS, Backend
from ridgeline.options import build, options_of, read_file

# The engine's defaults; see `engine.start.build`.
CPU_RUNNING, GPU_RUNNING, GPU_STEP_TOKENS = 64, 256, 8192
LEAST_KV_TOKENS = 16_384
SECTIONS = {"engine": EngineConfig}


@dataclass(frozen=True, slots=True)
class EngineSettings:
    config: EngineConfig
    limits: SchedulerLimits
    reasons: dict[str, str] = field(default_factory=dict)  # by key of the config

    def changed(self) -> dict[str, Any]:
        """The settings that differ from the engine's defaults."""
        defaults = {option.name: option.default for option in options_of(EngineConfig)}
        return {name: value for name, value in asdict(self.config).items() if value != defaults[name]}


def engine_settings(
    model: str, candidate: Candidate, demand: Demand, *, given: dict[str, Any] | None = None
) -> EngineSettings:
    """given: the user's settings; they take precedence, and the plan uses them."""
    deployment, given = candidate.deployment, given or {}
    is_cpu = deployment.chip.name == "cpu"
    backend: Backend = "native" if is_cpu else "cuda"
    values: dict[str, Any] = {"model": model_setting(model)}
    reasons = {"model": f"{deployment.shape.parameters / 1e9:.3g} billion parameters, {candidate.precision}"}

    def decide(key: str, value: Any, reason: str) -> None:
        values[key], reasons[key] = value, reason

    kept_by_default = str(deployment.shape.stored)
    if not is_cpu and deployment.backend == "ridgeline":
        kept_by_default = str(gpu_precision(deployment.shape, deployment.chip))
    if candidate.precision != kept_by_default and candidate.precision in PLANNED_FORMATS[backend]:
        decide("weights", candidate.precision, "the precision that was planned with")
    if deployment.kv_precision not in (("bfloat16",) if is_cpu else ("bfloat16", "float16")):
        decide("kv_dtype", deployment.kv_precision, "the precision that was planned with")
    step_tokens, chunk, why = _step_sizes(deployment, is_cpu)
    decide("step_tokens", step_tokens, why)
    decide("prefill_chunk", chunk, why)
    most = CPU_RUNNING if is_cpu else GPU_RUNNING
    running = min(most, candidate.memory.requests_that_fit)
    decide("max_running", running, "the engine's own" if running == most else "more would not fit memory")
    room = max(0, candidate.memory.kv_room) // max(1, candidate.memory.kv_per_token)
    if is_cpu:
        wanted = max(LEAST_KV_TOKENS, running * demand.longest)
        kv_tokens = _in_blocks(min(wanted, room // 2))
        why = f"room for {running} sequences of up to {demand.longest:,} tokens"
        decide(
            "kv_tokens", kv_tokens, why if kv_tokens >= wanted else "half of the memory that is free for it"
        )
    else:
        kv_tokens = _in_blocks(min(room, running * deployment.shape.max_context))
    for key, value in given.items():
        decide(key, value, "as asked for")
    config = build(EngineConfig, values)
    blocks = (config.kv_tokens or kv_tokens) // config.block_size
    step_tokens = config.step_tokens or step_tokens
    limits = SchedulerLimits(
        step_tokens=step_tokens,
        prefill_chunk=min(config.prefill_chunk or step_tokens, step_tokens),
        max_running=config.max_running or most,
        max_waiting=config.max_waiting,
        block_size=config.block_size,
        num_blocks=max(1, blocks),
        max_context=min(
            config.max_context or deployment.shape.max_context, max(1, blocks) * config.block_size
        ),
        prefix_cache=config.prefix_cache,
    )
    return EngineSettings(config, limits, reasons)


def config_file(settings: EngineSettings, header: list[str]) -> str:
    """plan.toml: only the plan's choices, each key under its reason."""
    lines = [*(f"# {line}".rstrip() for line in header), "", "[engine]"]
    for key, value in {"model": settings.config.model, **settings.changed()}.items():
        lines += [f"# {settings.reasons.get(key, 'as planned')}", f"{key} = {json.dumps(value)}"]
    return "\n".join(lines) + "\n"


def read_config(path: Path) -> EngineConfig:
    """As read by `ridgeline serve --config`."""
    return build(EngineConfig, read_file(path, SECTIONS).get("engine", {}))


def model_setting(model: str) -> str:
    """A short name in full, a path as absolute."""
    known = find_known(model)
    if known is not None:
        return known.name
    if (on_hub := hub_id(model)) is not None:
        return f"hf:{on_hub}"
    path = Path(model).expanduser().resolve()
    return str(path.parent if path.name == "config.json" else path)


def _step_sizes(deployment: Deployment, is_cpu: bool) -> tuple[int, int, str]:
    if not is_cpu:
        return GPU_STEP_TOKENS, GPU_STEP_TOKENS, "the engine's own on a GPU"
    calibration = load_calibration()
    shape = deployment.shape
    choice = None
    if calibration is not None:
        choice = calibration.choice(shape.parameters, shape.weight_bytes(deployment.precision))
    if choice is not None:
        return choice.step_tokens, choice.prefill_chunk, f"calibrated on this machine: {choice.reason}"
    return (
        DEFAULT_STEP_TOKENS,
        DEFAULT_STEP_TOKENS,
        "the engine's own; `ridgeline doctor --calibrate` measures",
    )


def _in_blocks(tokens: int, block: int = 16) -> int:
    return max(block, math.floor(tokens / block) * block)
