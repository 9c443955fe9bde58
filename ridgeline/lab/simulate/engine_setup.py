"""engine_of(): a simulated engine from a model's name and flags: limits, predicted step times, guesses."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.engine.schedule.intake import SchedulerLimits
from ridgeline.lab.errors import BadInput
from ridgeline.lab.hardware.chip import CPU
from ridgeline.lab.hardware.find_chip import find_chip
from ridgeline.lab.perfmodel.analytic_times import analytic_times
from ridgeline.lab.perfmodel.deployment import Deployment
from ridgeline.lab.perfmodel.front_times import FrontTimes
from ridgeline.lab.perfmodel.memory import memory_plan
from ridgeline.lab.perfmodel.step_formula import engine_constants
from ridgeline.lab.perfmodel.step_times import StepTimes
from ridgeline.lab.perfmodel.stored import kept_times
from ridgeline.lab.simulate.replica_options import ReplicaOptions
from ridgeline.lab.simulate.speculation import DraftFigures
from ridgeline.models.spec.find_spec import find_spec

BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """Settings of `simulate`, without its traffic."""

    limits: SchedulerLimits
    times: StepTimes
    front: FrontTimes
    lookahead: int
    drafts: DraftFigures | None


def engine_of(source: str, options: ReplicaOptions) -> EngineSetup:
    """source: a model's name, folder or file. Step times are those that `plan fit` stored, or analytic."""
    deployment = Deployment(find_spec(source), find_chip(options.hardware))
    is_cpu = deployment.chip.name == CPU
    kept = kept_times(source, deployment.chip.name)
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
    return EngineSetup(
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
