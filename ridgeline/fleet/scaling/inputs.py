"""Inputs: everything that one decision of the autoscaler reads, at one time of a monotonic clock."""

from __future__ import annotations

import msgspec

from ridgeline.fleet.messages import State
from ridgeline.fleet.scaling.demand import DemandSample
from ridgeline.replica.messages import Load, Started


class ReplicaSample(msgspec.Struct, frozen=True):
    """One replica and its last load report."""

    id: str
    state: State
    since: float  # when it entered its state
    heard_at: float | None = None  # time of the load below; None: never reported
    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    kv_tokens_held: int = 0
    kv_tokens: int = 0  # capacity; 0: not known
    max_running: int = 0  # 0: not known
    tokens_done: int = 0  # prompt and output, since its start
    requests_done: int = 0
    price_per_hour: float = 0.0

    @property
    def serves(self) -> bool:
        return self.state in ("ramping", "ready")

    @property
    def is_capacity(self) -> bool:
        """Whether it counts as capacity: a starting replica does."""
        return self.state in ("starting", "ramping", "ready")


class Inputs(msgspec.Struct, frozen=True):
    target: int  # replicas wanted now: from the last decision, or set by a command
    replicas: tuple[ReplicaSample, ...]
    demand: DemandSample
    price_per_hour: float = 0.0  # of the next replica
    cold_start_s: float = 60.0  # measured seconds of a start; the forecast's horizon


def sample_of(
    id: str,
    state: State,
    since: float,
    load: Load | None,
    started: Started | None,
    heard_at: float | None,
    price_per_hour: float = 0.0,
) -> ReplicaSample:
    """Make it from the lines of the replica's feed."""
    if load is None or started is None:
        return ReplicaSample(id, state, since, price_per_hour=price_per_hour)
    return ReplicaSample(
        id=id,
        state=state,
        since=since,
        heard_at=heard_at,
        running=load.running,
        waiting=load.waiting,
        queued_tokens=load.queued_tokens,
        kv_tokens_held=load.kv_blocks_held * started.block_size,
        kv_tokens=started.kv_blocks * started.block_size,
        max_running=started.max_running,
        tokens_done=load.prompt_tokens + load.output_tokens,
        requests_done=load.ended,
        price_per_hour=price_per_hour,
    )
