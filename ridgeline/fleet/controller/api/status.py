"""The messages of `fleet status`: the fleet, its models and its replicas."""

from __future__ import annotations

import time

import msgspec

from ridgeline.fleet.controller.controller import Controller
from ridgeline.fleet.controller.life.replica import Replica
from ridgeline.fleet.controller.managed_model import ManagedModel
from ridgeline.fleet.controller.reconcile import LOOP_FAILURES
from ridgeline.fleet.controller.room import Needs
from ridgeline.fleet.substrates.substrate import Capacity
from ridgeline.replica.messages import WeightsFrom


class ReplicaStatus(msgspec.Struct, frozen=True):
    id: str
    model: str
    state: str
    age_s: float  # since its start
    in_state_s: float
    version: str
    epoch: str
    url: str
    weight: float
    running: int
    waiting: int
    queued_tokens: int
    max_running: int
    output_tokens_per_s: float
    limit_tokens_per_s: float | None  # the machine's limit for the requests that run now
    limit_uncertainty: float  # by what fraction that limit may be too low: it was measured on a busy machine
    kv_blocks_held: int
    kv_blocks: int
    prefix_queries: int
    prefix_hits: int
    segments: dict[str, float]
    weights: WeightsFrom | None  # where they came from; None before it has started
    weight_bytes: int
    adopted: bool
    reason: str
    region: str = ""
    pool: str = ""


class ModelStatus(msgspec.Struct, frozen=True):
    name: str
    target: int
    serving: int
    starting: int
    version: str
    scales: bool
    rollout: str  # the phase; empty without a rollout
    rollout_to: str
    rollout_awaits: str  # what the canary's judgement waits for
    last_rollout: str
    blocked: str  # why a wanted replica does not start
    crash_loop: bool
    explained: str  # the autoscaler's last decision
    warnings: tuple[str, ...] = ()
    moving: int = 0  # replicas outside the places of the model, which others there replace


class FleetStatus(msgspec.Struct, frozen=True):
    fleet: str
    url: str
    pid: int
    up_s: float
    fence: int
    generation: int
    stopping: bool
    routers: int
    routers_reporting: int
    models: tuple[ModelStatus, ...]
    replicas: tuple[ReplicaStatus, ...]
    capacity: Capacity = Capacity()  # of the substrate
    reserved: Needs = Needs()  # by the replicas that name their needs


def replica_status(replica: Replica, now: float) -> ReplicaStatus:
    load, started = replica.load, replica.started
    return ReplicaStatus(
        id=replica.id,
        model=replica.model,
        state=replica.state,
        age_s=time.time() - replica.created,
        in_state_s=now - replica.since,
        version=replica.version,
        epoch=replica.epoch,
        url=replica.url,
        weight=replica.weight,
        running=load.running if load else 0,
        waiting=load.waiting if load else 0,
        queued_tokens=load.queued_tokens if load else 0,
        max_running=started.max_running if started else 0,
        output_tokens_per_s=replica.output_tokens_per_s,
        limit_tokens_per_s=_limit(replica),
        limit_uncertainty=started.limits.get("uncertainty", 0.0) if started else 0.0,
        kv_blocks_held=load.kv_blocks_held if load else 0,
        kv_blocks=started.kv_blocks if started else 0,
        prefix_queries=load.prefix_queries if load else 0,
        prefix_hits=load.prefix_hits if load else 0,
        segments=dict(replica.segments),
        weights=started.weights if started else None,
        weight_bytes=started.weight_bytes if started else 0,
        adopted=replica.was_adopted,
        reason=replica.reason,
        region=replica.region,
        pool=replica.pool,
    )


def model_status(controller: Controller, model: ManagedModel) -> ModelStatus:
    mine = controller.keeper.of(model.config.name)
    decision = controller.scaler.last.get(model.config.name)
    rollout = model.rollout
    return ModelStatus(
        name=model.config.name,
        target=model.state.target,
        serving=sum(one.serves for one in mine),
        starting=sum(one.state == "starting" for one in mine),
        version=model.state.current.version,
        scales=model.config.scales,
        rollout="" if rollout is None else rollout.phase,
        rollout_to="" if rollout is None else rollout.new,
        rollout_awaits="" if rollout is None else rollout.awaited(controller.clock()),
        last_rollout=model.last_rollout,
        blocked=model.blocked,
        crash_loop=any(one.failures >= LOOP_FAILURES for one in model.restarts.values()),
        explained="" if decision is None else decision.explain.sentence,
        warnings=() if decision is None else decision.explain.warnings,
        moving=len(model.misplaced([one.view() for one in mine])),
    )


def _limit(replica: Replica) -> float | None:
    """A step reads the weights once for all requests; above that, arithmetic is the limit."""
    limits = {} if replica.started is None else replica.started.limits
    one = limits.get("decode_tokens_per_s")
    if one is None:
        return None
    running = max(replica.load.running if replica.load is not None else 1, 1)
    return min(one * running, limits.get("prefill_tokens_per_s", one * running))
