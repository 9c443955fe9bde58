"""The messages between routers and controller, over the controller's socket: JSON, one message a line.

A router reads GET /fleet/table: a Table at once and at each change. It posts a Demand every second to
/fleet/demand. A router without its controller keeps serving with the last table.
"""

from __future__ import annotations

from typing import Literal

import msgspec

State = Literal["starting", "ramping", "ready", "draining", "lost"]


class ReplicaEntry(msgspec.Struct, frozen=True):
    """One replica, as the controller knows it. Routers read its load from its feed."""

    id: str  # model-number, such as smollm2-3; never used again
    model: str
    url: str
    state: State
    epoch: str  # changes with each process; empty while it starts
    version: str  # changes with weights and settings
    weight: float = 1.0  # requests it gets, as a multiple of another replica's; less than 1 for a canary
    region: str = ""
    pool: str = ""


class ModelEntry(msgspec.Struct, frozen=True):
    """A model that clients may ask for, and how its requests are routed and queued."""

    name: str
    aliases: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    policy: str = "default"
    max_held: int = 1024  # requests that wait at each router; further ones get 429
    hold_s: float = 30.0  # longest wait while every replica is saturated
    cold_s: float = 300.0  # longest wait while no replica is ready
    durable: bool = False  # journal requests with a key that arrive while no replica is ready
    target: int = 1  # replicas wanted now
    starting: int = 0
    residency: tuple[str, ...] = ()  # regions that it may run in, with * for parts; empty: all
    regions: tuple[str, ...] = ()  # that its replicas are placed in; empty: not known


class Table(msgspec.Struct, frozen=True):
    generation: int  # rises with each change, across controllers: routers ignore an older table
    models: tuple[ModelEntry, ...]
    replicas: tuple[ReplicaEntry, ...]
    key: str = ""  # bearer key of the replicas, made by the controller
    routers: int = 0  # routers that report now; 0: not known
    latency_ms: dict[str, dict[str, float]] = {}  # from a region to others


class VersionOutcome(msgspec.Struct, frozen=True):
    """How requests to replicas of one version ended in the last interval: a rollout is judged by it."""

    version: str
    ended: int  # requests that a replica answered or failed; cancelled ones do not count
    errors: int  # those that ended with 5xx, a broken connection, or a stream without its end
    ttft_ms: tuple[float, ...] = ()  # up to 64 samples


class ModelDemand(msgspec.Struct, frozen=True):
    """The demand for one model at one router, in the last interval."""

    model: str
    arrived: int
    prompt_tokens: int  # estimated from bytes if not known
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
    generation: int = 0  # of the router's newest table: a drain waits for it
