"""setup_of(): makes a FleetSetup from fleet.toml: replicas, scaling and limits, and predicted step times."""

from __future__ import annotations

from ridgeline.engine.schedule.intake import SchedulerLimits
from ridgeline.fleet.config import FleetSettings
from ridgeline.fleet.config_models import FleetModel
from ridgeline.lab.errors import BadInput
from ridgeline.lab.hardware.chip import CPU
from ridgeline.lab.hardware.find_chip import find_chip
from ridgeline.lab.perfmodel.analytic_times import analytic_times
from ridgeline.lab.perfmodel.deployment import Deployment
from ridgeline.lab.perfmodel.front_times import FrontTimes
from ridgeline.lab.perfmodel.memory import memory_plan
from ridgeline.lab.perfmodel.step_formula import engine_constants
from ridgeline.lab.perfmodel.stored import kept_times
from ridgeline.lab.simulate.fleet.replica_options import ReplicaOptions
from ridgeline.lab.simulate.fleet.setup import FleetSetup
from ridgeline.lab.simulate.speculation import DraftFigures
from ridgeline.models.spec.find_spec import find_spec
from ridgeline.options import build, check_values

BLOCK_TOKENS = 16


def model_of(settings: FleetSettings, name: str) -> FleetModel:
    if name:
        found = settings.model(name)
        if found is None:
            known = ", ".join(model.name for model in settings.models)
            raise BadInput(f"the fleet has no model {name!r}; it has {known}")
        return found
    if len(settings.models) > 1:
        known = ", ".join(model.name for model in settings.models)
        raise BadInput(f"the fleet has several models; choose one with --model: {known}")
    return settings.models[0]


def setup_of(settings: FleetSettings, model: FleetModel, options: ReplicaOptions) -> FleetSetup:
    served = {key: value for key, value in model.serve.items() if key in ReplicaOptions.__dataclass_fields__}
    options = build(ReplicaOptions, _values(options), check_values(ReplicaOptions, served, "[models.serve] "))
    deployment = Deployment(find_spec(model.source), find_chip(options.hardware))
    is_cpu = deployment.chip.name == CPU
    kept = kept_times(model.source, deployment.chip.name)
    if kept is not None:
        times, front = kept
    else:
        times = analytic_times(deployment)
        half = engine_constants(deployment).first_s / 2
        front = FrontTimes(request_s=half, first_s=half, chunk_s=half)
    running = options.max_running or (64 if is_cpu else 256)
    context = options.max_context or deployment.shape.max_context
    step_tokens = options.step_tokens or (512 if is_cpu else 8192)
    kv_tokens = options.kv_tokens or _kv_tokens(deployment)
    blocks = max(1, kv_tokens // BLOCK_TOKENS)
    return FleetSetup(
        limits=SchedulerLimits(
            step_tokens=step_tokens,
            prefill_chunk=step_tokens,
            max_running=running,
            max_waiting=max(512, 2 * running),
            block_size=BLOCK_TOKENS,
            num_blocks=blocks,
            max_context=min(context, blocks * BLOCK_TOKENS),
        ),
        times=times,
        front=front,
        lookahead=0 if is_cpu else 1,
        replicas=model.model.replicas,
        routers=settings.fleet.routers,
        waiting=model.limits,
        scaling=model.scaling if model.scales else None,
        rollout=model.rollout,
        cold_start_s=options.cold_start_s,
        price_per_hour=model.resources.price,
        places=model.spread,
        region=settings.fleet.region,
        latency_ms=settings.latency_ms,
        drafts=_drafts(options),
    )


def _drafts(options: ReplicaOptions) -> DraftFigures | None:
    if not options.draft_rates:
        return None
    try:
        rates = tuple(float(rate) for rate in options.draft_rates.split(","))
    except ValueError:
        raise BadInput(
            f"--draft-rates {options.draft_rates}: give numbers from 0 to 1 by comma, such as 0.7,0.5"
        ) from None
    return DraftFigures(rates, options.draft_ms / 1e3)


def _kv_tokens(deployment: Deployment) -> int:
    memory = memory_plan(deployment.shape, deployment.chip, deployment.kept)
    room = max(0, memory.kv_room) // max(1, memory.kv_per_token)
    if not room:
        raise BadInput(
            f"{deployment.shape.name} leaves no memory for KV on {deployment.chip.name}: "
            "choose an accelerator with more memory (--hardware)"
        )
    return int(room)


def _values(options: ReplicaOptions) -> dict[str, object]:
    return {name: getattr(options, name) for name in ReplicaOptions.__dataclass_fields__}
