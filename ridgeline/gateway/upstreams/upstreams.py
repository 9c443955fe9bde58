"""Upstreams: gets an answer for a request from one of its targets.

Called by the pipeline for every request that no cache answers. Targets are tried in order or drawn by weight;
`attempts` has the retries at each of them. Once a body has begun, nothing is ever sent again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING

from ridgeline.fleet.placement.regions import Rules
from ridgeline.gateway.accounting.usage import Usage
from ridgeline.gateway.errors import Forbidden, UpstreamFailed
from ridgeline.gateway.upstreams.attempts import Attempts, Means
from ridgeline.gateway.upstreams.call import Call
from ridgeline.gateway.upstreams.config import RetryConfig, UpstreamConfig
from ridgeline.gateway.upstreams.opened import Attempt, AttemptKind, Opened
from ridgeline.gateway.upstreams.outgoing import Outgoing, Prepare, Target
from ridgeline.gateway.upstreams.upstream import Upstream, UpstreamState
from ridgeline.gateway.upstreams.usage_reports import reported_usage
from ridgeline.proxy.health import Health
from ridgeline.proxy.http_client import HttpClient
from ridgeline.proxy.retry_budget import RetryBudget

if TYPE_CHECKING:
    from ridgeline.fleet.router.fleet_router import FleetRouter

__all__ = ["Attempt", "Opened", "UpstreamState", "Upstreams"]

OpenedTask = asyncio.Task[Opened | None]


class Upstreams:
    """One per worker. `start` begins health checks, `stop` aborts running requests."""

    def __init__(
        self,
        configs: Sequence[UpstreamConfig],
        retries: RetryConfig | None = None,
        *,
        client: HttpClient | None = None,
        clock: Callable[[], float] = monotonic,
        rng: random.Random | None = None,
        region: str = "",
    ) -> None:
        """region: of this gateway."""
        config = retries or RetryConfig()
        self._client = client or HttpClient()
        self._upstreams = {one.name: Upstream(one, config, clock, self._client, region) for one in configs}
        self._budget = RetryBudget(config.budget_ratio, config.budget_per_s, clock)
        self._means = Means(self._client, config, self._budget, clock, rng or random.Random())
        self._health = Health(list(self._upstreams.values()), self._client, clock)

    async def open(
        self,
        targets: Sequence[Target],
        prepare: Prepare,
        *,
        tenant: str,
        weight: float = 1.0,
        priority: int = 1,
        strategy: str = "ordered",
        deadline: float,
        hedge_after_s: float | None = None,
        attempts: list[Attempt] | None = None,
        repeatable: bool = True,
        residency: Rules = (),
    ) -> Opened:
        """An answer whose body has begun, or a GatewayError.

        attempts: filled also when it raises; a hedge that lost is noted a moment later. deadline: for the
        whole answer, by the monotonic clock. hedge_after_s: after this time without a byte, a second target
        gets the request too; the first byte wins, and the other request is aborted. repeatable: false for a
        request that creates an object upstream: a lost answer must not create it twice. residency: regions
        that may compute it.
        """
        self._budget.request()
        tried = [] if attempts is None else attempts
        if residency:
            targets = self._allowed(targets, residency)
        call = Call(prepare, tenant, weight, priority, deadline, tried, repeatable, residency)
        if len(targets) == 1:
            opened = await self._ask(targets[0], call, "first", is_last=True)
        else:
            order = list(targets) if strategy == "ordered" else drawn(targets, self._means.rng)
            if hedge_after_s is None:
                opened = await self._ask_each(order, call, "first")
            else:
                opened = await self._ask_hedged(order, call, hedge_after_s)
        if opened is None:
            raise call.error()
        return opened

    async def fetch(
        self, target: Target, outgoing: Outgoing, *, limit: int, within_s: float, priority: int = 1
    ) -> bytes:
        """A request of the gateway itself: the body of a 200, at most `limit` bytes, or a GatewayError."""
        body, status = await self.look_up(target, outgoing, limit=limit, within_s=within_s, priority=priority)
        if status != 200:
            raise UpstreamFailed(f"the upstream answered {status}")
        return body

    async def look_up(
        self, target: Target, outgoing: Outgoing, *, limit: int, within_s: float, priority: int = 1
    ) -> tuple[bytes, int]:
        """The same with any status, which is returned too."""
        deadline = self._means.clock() + within_s
        opened = await self.open(
            [target], lambda _: outgoing, tenant="", priority=priority, deadline=deadline
        )
        try:
            body = await opened.read(limit)
            opened.close(opened.answer.status < 500)
        finally:
            opened.abort()  # no effect if it was closed
        return body, opened.answer.status

    async def usage_of(self, upstream: str, request_id: str, at_ms: int = 0) -> Usage | None:
        """A request's final usage; None if its upstream cannot know. Raises if it may know later."""
        known = self._upstreams.get(upstream)
        return None if known is None else await reported_usage(self._client, known, request_id, at_ms)

    # ── health ──

    def start(self) -> None:
        self._health.start()
        for fleet in self.fleets().values():
            fleet.start()

    async def stop(self) -> None:
        await self._health.stop()
        await asyncio.gather(*(fleet.stop() for fleet in self.fleets().values()))
        self._client.close()

    async def probe(self) -> dict[str, bool]:
        """Probe every upstream now, also those without regular probes."""
        results = await asyncio.gather(*(self._health.probe(one) for one in self._upstreams.values()))
        return dict(zip(self._upstreams, results, strict=True))

    def fleets(self) -> dict[str, FleetRouter]:
        """The routers of upstreams of kind fleet, by their upstream's name."""
        return {one.name: one.fleet for one in self._upstreams.values() if one.fleet is not None}

    def any_usable(self) -> bool:
        return any(one.is_usable for one in self._upstreams.values())

    def reset(self, upstream: str | None = None, credential: str | None = None) -> None:
        """Reset dead keys and open breakers: of all upstreams, one upstream, or one of its keys."""
        for one in self._upstreams.values():
            if upstream is None or one.name == upstream:
                one.reset(credential)

    def snapshot(self) -> list[UpstreamState]:
        return [one.state() for one in self._upstreams.values()]

    @property
    def retries(self) -> tuple[int, int]:
        """Retries and hedges that were sent, and those that the budget refused."""
        return self._budget.taken, self._budget.refused

    # ── one target, or several ──

    def _allowed(self, targets: Sequence[Target], residency: Rules) -> list[Target]:
        """The targets in allowed regions. An upstream without a region is in none."""
        allowed = [one for one in targets if self._upstreams[one.upstream].may_compute(residency)]
        if not allowed:
            rules = " and ".join(", ".join(rule) for rule in residency)
            raise Forbidden(
                f"residency allows the regions {rules}; no upstream of the model is in one of them",
                code="residency",
            )
        return allowed

    async def _ask(self, target: Target, call: Call, kind: AttemptKind, is_last: bool) -> Opened | None:
        upstream = self._upstreams[target.upstream]
        return await Attempts(self._means, upstream, target, call, kind, is_last).run()

    async def _ask_each(self, order: Sequence[Target], call: Call, kind: AttemptKind) -> Opened | None:
        for number, target in enumerate(order, start=1):
            opened = await self._ask(target, call, kind, is_last=number == len(order))
            if opened is not None:
                return opened
            kind = "fallback"
        return None

    async def _ask_hedged(self, order: Sequence[Target], call: Call, after_s: float) -> Opened | None:
        first: OpenedTask = asyncio.create_task(self._ask(order[0], call, "first", is_last=False))
        tasks = [first]
        winner: OpenedTask | None = None
        try:
            await asyncio.wait(tasks, timeout=after_s)
            others = [target for target in order[1:] if self._upstreams[target.upstream].is_usable]
            if not first.done() and others and self._budget.take():
                tasks.append(asyncio.create_task(self._ask_each(others, call, "hedge")))
            pending = set(tasks)
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                winner = next((task for task in done if task.result() is not None), None)
                if winner is not None:
                    return winner.result()
        finally:
            for task in tasks:
                if task is not winner:
                    _give_up(task)
        return await self._ask_each(order[1:], call, "fallback") if len(tasks) == 1 else None


def drawn(targets: Sequence[Target], rng: random.Random) -> list[Target]:
    """In random order: each next target is drawn by weight from those left."""
    left, order = list(targets), []
    while len(left) > 1:
        chosen = rng.choices(range(len(left)), [target.weight for target in left])[0]
        order.append(left.pop(chosen))
    return order + left


def _give_up(task: OpenedTask) -> None:
    """End a request that lost, and an answer that it may have opened at the same time."""

    def dispose(done: OpenedTask) -> None:
        if not done.cancelled() and done.exception() is None and (opened := done.result()) is not None:
            opened.abort()

    if task.done():
        dispose(task)
    else:
        task.cancel()
        task.add_done_callback(dispose)
