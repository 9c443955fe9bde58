"""Health: checks upstreams beside the requests: the progress of their streams, and probes.

An upstream that answers pings but computes nothing is down: if none of its running streams gets a byte, its
breaker opens. Two failed probes in a row open it too; a successful probe allows a trial request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from ridgeline.proxy.breaker import Breaker
from ridgeline.proxy.errors import ProxyError
from ridgeline.proxy.http_client import HttpClient, Timeouts
from ridgeline.proxy.origin import Origin

TICK_S = 0.5
PROBES = 2  # failed in a row
PROBE_BYTES = 4 << 20

log = logging.getLogger(__name__)


class Watched(Protocol):
    """An upstream, as `Health` needs it. `Health` sets the fields from `heard_at` on."""

    name: str
    origin: Origin
    breaker: Breaker
    heard_at: float  # when an answer last began, or had received bytes at a check
    stalled_at: float  # when its streams last stalled
    probe: str  # ok, failed, none
    probe_failures: int  # in a row
    probe_due: float

    @property
    def stall_s(self) -> float:
        """Running streams without a byte for this time open the breaker; 0: never."""

    @property
    def probe_s(self) -> float:
        """Seconds between probes; 0: none."""

    @property
    def probe_timeout_s(self) -> float: ...
    @property
    def probe_path(self) -> str: ...

    def probe_lines(self, now: float) -> bytes:
        """Header lines of a probe, made by `header_lines`."""


class Health:
    def __init__(self, upstreams: Sequence[Watched], client: HttpClient, clock: Callable[[], float]) -> None:
        self._upstreams, self._client, self._clock = upstreams, client, clock
        self._task: asyncio.Task[None] | None = None
        self._probes: set[asyncio.Task[bool]] = set()

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._watch())

    async def stop(self) -> None:
        tasks = [task for task in (self._task, *self._probes) if task is not None]
        self._task = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self._look()
            except Exception:
                log.exception("could not check the upstreams' health")

    def _look(self) -> None:
        now = self._clock()
        for upstream in self._upstreams:
            if upstream.stall_s:
                self.check_progress(upstream)
            if upstream.probe_s and now >= upstream.probe_due:
                upstream.probe_due = now + max(upstream.probe_s, upstream.probe_timeout_s)
                task = asyncio.get_running_loop().create_task(self.probe(upstream))
                self._probes.add(task)
                task.add_done_callback(self._probes.discard)

    def check_progress(self, upstream: Watched) -> None:
        """Opens the breaker if streams are running and none got a byte for `stall_s`."""
        waiting = False
        for connection in self._client.pool.live:
            answer = connection.answer
            if connection.origin is upstream.origin and answer is not None:
                if answer.status:
                    upstream.heard_at = max(upstream.heard_at, answer.last_at)
                # A slow reader or an answer that is not streamed says nothing about the upstream.
                if answer.is_stream and not answer.is_paused:
                    waiting = waiting or self._clock() - answer.last_at > upstream.stall_s
        silent_s = self._clock() - max(upstream.heard_at, upstream.stalled_at)
        if waiting and silent_s > upstream.stall_s:
            upstream.stalled_at = self._clock()  # a trial request gets the same time
            if upstream.breaker.is_closed or upstream.breaker.has_trial:
                log.warning("upstream %s: its streams stalled; breaker opened", upstream.name)
                upstream.breaker.trip()

    async def probe(self, upstream: Watched) -> bool:
        """Probe, and tell the breaker. Any answer but a 5xx means that the upstream is up."""
        is_up = await self._is_up(upstream)
        upstream.probe = "ok" if is_up else "failed"
        if is_up:
            upstream.probe_failures = 0
            upstream.breaker.allow_trial()
            return True
        upstream.probe_failures += 1
        if upstream.probe_failures >= PROBES:
            if upstream.breaker.is_closed:
                log.warning("upstream %s: probes fail", upstream.name)
            upstream.breaker.trip()
        return False

    async def _is_up(self, upstream: Watched) -> bool:
        timeout_s = upstream.probe_timeout_s
        now = self._clock()
        try:
            answer = await self._client.ask(
                upstream.origin,
                "GET",
                upstream.probe_path,
                [(b"accept", b"application/json")],
                timeouts=Timeouts(timeout_s, timeout_s, timeout_s),
                until=now + timeout_s,
                fixed=upstream.probe_lines(now),
            )
            await answer.read(PROBE_BYTES)
        except ProxyError:
            return False
        return answer.status < 500
