"""Upstream: one server in a worker: its address, slots, keys, breaker and counts."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from ridgeline.fleet.placement.regions import Rules, all_allow
from ridgeline.gateway.upstreams.config import RetryConfig, UpstreamConfig
from ridgeline.gateway.upstreams.credentials import read_credentials
from ridgeline.proxy.breaker import Breaker, Pass
from ridgeline.proxy.fair_queue import FairQueue
from ridgeline.proxy.http_client import HttpClient, Timeouts
from ridgeline.proxy.origin import read_url

if TYPE_CHECKING:
    from ridgeline.fleet.router.fleet_router import FleetRouter

log = logging.getLogger(__name__)

_PROBES = {"ridgeline": "/ready", "fleet": "/fleet/status"}


class UpstreamState(msgspec.Struct, frozen=True):
    """For metrics and the admin API. Names of keys, never keys; no address."""

    name: str
    kind: str
    breaker: str  # closed, open, half_open
    breaker_opened: int  # times
    inflight: int
    waiting: int
    credentials: dict[str, int]  # number by state: usable, resting, dead
    unusable_credentials: dict[str, str]  # name → resting or dead
    requests: int  # sent, retries and hedges included
    failures: int
    probe: str  # ok, failed, none


class Upstream:
    def __init__(
        self,
        config: UpstreamConfig,
        retries: RetryConfig,
        clock: Callable[[], float],
        client: HttpClient,
        region: str = "",
    ) -> None:
        """region: of this gateway."""
        self.config = config
        self.name = config.name
        self.origin = read_url(
            config.address, config.ca_file, f"[[upstreams]] {config.name}: url", config.keep_alive_s
        )
        self.credentials = read_credentials(config)
        self.breaker = Breaker(retries.breaker_limits, clock)
        self.queue = FairQueue(config.max_concurrent, config.max_waiting, clock=clock)
        self.timeouts = Timeouts(config.connect_timeout_s, config.first_byte_timeout_s, config.idle_timeout_s)
        self.requests = self.failures = 0
        self.heard_at = clock()  # when an answer last began, or had received bytes at a check
        self.stalled_at = 0.0  # when its streams were last found stalled
        self.probe = "none"
        self.probe_failures = 0  # in a row
        self.probe_due = clock() + random.uniform(0, self.probe_s)  # random: workers do not all probe at once
        self._clock = clock
        self.fleet = self._fleet(client, region) if config.kind == "fleet" else None

    def _fleet(self, client: HttpClient, region: str) -> FleetRouter:
        """The router of a fleet, in this process: a request crosses one proxy, not two."""
        from ridgeline.fleet.router.config import FleetTuning
        from ridgeline.fleet.router.fleet_router import FleetRouter

        config = self.config
        tuning = FleetTuning(
            progress_s=config.progress_s,
            migrations=config.migrations,
            connect_timeout_s=config.connect_timeout_s,
            first_byte_timeout_s=config.first_byte_timeout_s,
            idle_timeout_s=config.idle_timeout_s,
        )
        key = self.credentials.keys[0]
        return FleetRouter(
            self.origin,
            lines=key.lines,
            tuning=tuning,
            client=client,
            name=f"gateway-{self.name}-{os.getpid()}",
            region=region,
        )

    def may_compute(self, residency: Rules) -> bool:
        """Whether its region is allowed. A fleet decides by the region of each replica."""
        return self.fleet is not None or all_allow(residency, self.config.region)

    @property
    def probe_s(self) -> float:
        """Seconds between probes; 0: none."""
        if self.config.probe_s is not None:
            return self.config.probe_s
        return 5.0 if self.config.kind == "ridgeline" else 0.0

    @property
    def probe_timeout_s(self) -> float:
        return self.config.probe_timeout_s

    @property
    def stall_s(self) -> float:
        return self.config.stall_s

    def probe_lines(self, now: float) -> bytes:
        """Headers of a probe: with a usable key, if there is one."""
        key = self.credentials.pick("", now)
        return b"" if key is None else key.lines

    @property
    def probe_path(self) -> str:
        return self.config.probe_path or _PROBES.get(self.config.kind, "/v1/models")

    @property
    def is_usable(self) -> bool:
        """Whether a request can be sent now, or as soon as a limit has room."""
        now = self._clock()
        return self.breaker.may_admit() and any(not key.is_dead(now) for key in self.credentials.keys)

    def fail(self, given: Pass) -> None:
        """A request failed because of the upstream."""
        self.failures += 1
        was_closed = self.breaker.is_closed
        self.breaker.failure(given)
        if was_closed and not self.breaker.is_closed:
            log.warning("upstream %s: failed too often; breaker opened", self.name)

    def reset(self, credential: str | None = None) -> None:
        """Reset its breaker, or the state of one of its keys."""
        for key in self.credentials.keys:
            if credential is None or key.name == credential:
                key.revive()
        if credential is None:
            self.breaker.reset()
            self.probe_failures = 0

    def state(self) -> UpstreamState:
        now = self._clock()
        states = {key.name: key.state(now) for key in self.credentials.keys}
        return UpstreamState(
            self.name,
            self.config.kind,
            self.breaker.state,
            self.breaker.opened,
            self.queue.in_use,
            self.queue.waiting,
            self.credentials.states(now),
            {name: state for name, state in states.items() if state != "usable"},
            self.requests,
            self.failures,
            self.probe,
        )
