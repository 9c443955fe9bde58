"""What routers and the controller say to each other, over the controller's socket: JSON, one message a line.

A router reads GET /fleet/table: a Table at once and at each change. It posts a Demand every second to
/fleet/demand. A router without its controller serves on with the last table.
"""

from __future__ import annotations

from typing import Literal

import msgspec

State = Literal["starting", "ramping", "ready", "draining", "lost"]


class ReplicaEntry(msgspec.Struct, frozen=True):
    """One replica, as the controller knows it. Its load comes from its own feed."""

    id: str  # model-number, such as smollm2-3; never used again
    model: str
    url: str
    state: State
    epoch: str  # of its process; empty while it starts
    version: str  # of the rollout: a new one for every change of weights or settings
    weight: float = 1.0  # share of requests, less than 1 for a canary
    region: str = ""
    pool: str = ""


class ModelEntry(msgspec.Struct, frozen=True):
    """What clients may ask for, and how it is routed and queued."""

    name: str
    aliases: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    policy: str = "default"
    max_held: int = 1024  # requests that wait at each router; further ones get 429
    hold_s: float = 30.0  # longest wait while every replica is saturated
    cold_s: float = 300.0  # longest wait while no replica is ready
    durable: bool = False  # requests with a key that arrive while none is ready are journalled
    target: int = 1  # replicas wanted now
    starting: int = 0


class Table(msgspec.Struct, frozen=True):
    generation: int  # rises with each change, over all controllers: an older one is ignored
    models: tuple[ModelEntry, ...]
    replicas: tuple[ReplicaEntry, ...]
    key: str = ""  # bearer key of the replicas, made by the controller
    routers: int = 0  # that report now; 0: not known


class VersionOutcome(msgspec.Struct, frozen=True):
    """How requests to the replicas of one version ended, in the last interval. A rollout is judged by it."""

    version: str
    ended: int  # requests that a replica answered or failed; cancelled ones do not count
    errors: int  # of these: 5xx, a broken connection, a stream without its end
    ttft_ms: tuple[float, ...] = ()  # up to 64 samples


class ModelDemand(msgspec.Struct, frozen=True):
    """Of one model at one router, in the last interval."""

    model: str
    arrived: int
    prompt_tokens: int  # estimated from bytes where not known
    output_tokens: int
    held: int  # waiting at the router now
    oldest_held_s: float
    in_flight: int
    errors: int = 0
    ttft_ms: tuple[float, ...] = ()  # up to 64 samples
    versions: tuple[VersionOutcome, ...] = ()


class Demand(msgspec.Struct, frozen=True):
    router: str  # name and epoch of the router process
    interval_s: float
    models: tuple[ModelDemand, ...]
    generation: int = 0  # of the newest table that the router has: a drain waits for it
