"""Assembly: makes a worker's parts from the settings, starts them in order and closes them in reverse."""

from __future__ import annotations

import asyncio
import contextlib
import os
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from ridgeline.fleet.router.observe.metrics import fleets_text
from ridgeline.gateway.accounting.ledger import Ledger
from ridgeline.gateway.accounting.prices import Prices
from ridgeline.gateway.caching.exact import ExactCache
from ridgeline.gateway.catalog import Catalog
from ridgeline.gateway.errors import key_revoked
from ridgeline.gateway.guard.guards import Guards
from ridgeline.gateway.limits.handover_limiter import HandoverLimiter
from ridgeline.gateway.limits.held_bytes import HeldBytes
from ridgeline.gateway.limits.limiter_types import Limiter, Subject
from ridgeline.gateway.limits.memory_limiter import MemoryLimiter
from ridgeline.gateway.limits.redis_limiter import RedisLimiter
from ridgeline.gateway.objects.batch_booking import BatchBooking
from ridgeline.gateway.objects.spool import Spools, uploads_path
from ridgeline.gateway.observe.access_log import AccessLog
from ridgeline.gateway.observe.metrics import GatewayMetrics, Readings, UpstreamReading
from ridgeline.gateway.offload.offload import Offload, plain
from ridgeline.gateway.pipeline.deadline_sweep import DeadlineSweep
from ridgeline.gateway.pipeline.endpoints import NAMES
from ridgeline.gateway.pipeline.own_embeddings import OwnEmbeddings
from ridgeline.gateway.pipeline.parts import Parts
from ridgeline.gateway.settings import GatewaySettings
from ridgeline.gateway.tenants.key_table import KeyTable
from ridgeline.gateway.tenants.key_watch import KeyWatch
from ridgeline.gateway.tenants.owned import OwnedObjects
from ridgeline.gateway.tenants.store import Store
from ridgeline.gateway.upstreams.upstreams import Upstreams

if TYPE_CHECKING:
    from ridgeline.gateway.caching.semantic import SemanticCache
    from ridgeline.gateway.limits.redis_client import RedisClient
    from ridgeline.gateway.routing.embedder import Embedder
    from ridgeline.gateway.routing.router import ModelRouter
    from ridgeline.gateway.routing.routing_request import RoutingRequest

RESTORE_S = 2.0  # longest delay of the first request by batches of earlier processes


class Assembly:
    def __init__(self, parts: Parts, stack: AsyncExitStack) -> None:
        self.parts = parts
        self.batches = BatchBooking(parts)
        self._stack = stack
        self._booking: asyncio.Task[None] | None = None

    @classmethod
    async def make(cls, settings: GatewaySettings, number: int) -> Assembly:
        async with AsyncExitStack() as stack:
            parts = await _parts(settings, number, stack)
            return cls(parts, stack.pop_all())

    async def start_booking(self) -> None:
        """Watch the batches of all workers. One worker does this.

        Returns when the batches of earlier processes are reserved, or after RESTORE_S: an unreachable store
        or ledger does not delay the start. A worker that took over limits already knows the cost of batches.
        """
        limiter, batches = self.parts.limiter, self.batches
        if isinstance(limiter, HandoverLimiter) and limiter.has_adopted:
            batches.restored.set()
        self._booking = asyncio.create_task(batches.run())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(batches.restored.wait(), RESTORE_S)

    async def stop_booking(self) -> None:
        task, self._booking = self._booking, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def close(self) -> None:
        await self.stop_booking()
        await self._stack.aclose()

    def metrics_page(self) -> str:
        parts = self.parts
        ledger = parts.ledger.state()
        parts.metrics.inflight = len(parts.deadlines.live)
        caches = [cache.reading() for cache in (parts.exact, parts.semantic) if cache is not None]
        return self._fleets_page() + parts.metrics.render(
            Readings(
                upstreams=[
                    UpstreamReading(one.name, one.breaker, one.inflight, one.waiting, one.credentials)
                    for one in parts.upstreams.snapshot()
                ],
                caches=caches,
                ledger_backlog_rows=max(ledger.written - ledger.moved, 0),
                ledger_backlog_bytes=ledger.waiting_bytes,
                ledger_rows_dropped=ledger.dropped,
                ledger_store_away_s=ledger.store_away_s,
                policy_age_s=parts.keys.snapshot()["policy_age_s"],
                limits_degraded=parts.limiter.degraded,
                spans_dropped=parts.tracer.dropped if parts.tracer is not None else 0,
                access_lines_dropped=parts.access_log.dropped,
            )
        )

    def _fleets_page(self) -> str:
        """The metrics of each fleet's router, under their own names."""
        fleets = self.parts.upstreams.fleets()
        return fleets_text(fleets) if fleets else ""

    def status(self) -> dict[str, Any]:
        """State for the admin API."""
        parts = self.parts
        return {
            "pid": os.getpid(),
            "under_way": len(parts.deadlines.live),
            "draining": parts.draining,
            "upstreams": parts.upstreams.snapshot(),
            "ledger": parts.ledger.state(),
            "policy": parts.keys.snapshot(),
        }


async def _parts(settings: GatewaySettings, number: int, stack: AsyncExitStack) -> Parts:
    store = Store(settings.store, settings.state_dir)
    stack.push_async_callback(store.close)
    deadlines = DeadlineSweep()
    keys = KeyWatch(store, changed=partial(_end_revoked, deadlines))
    await keys.start()
    stack.push_async_callback(keys.stop)

    upstreams = Upstreams(settings.upstreams, settings.retries, region=settings.gateway.region)
    upstreams.start()
    stack.push_async_callback(upstreams.stop)

    prices = Prices(settings.models, settings.upstreams, settings.prices)
    ledger = Ledger(
        settings.ledger,
        settings.state_dir,
        f"worker-{number}",
        store_url=settings.store.url,
        cost_of=prices.cost,
        usage_of=upstreams.usage_of,
    )
    await ledger.start()
    stack.push_async_callback(ledger.stop)

    limiter = await _limiter(settings, ledger)
    stack.push_async_callback(limiter.close)
    embedder = _embedder(settings, upstreams, ledger, prices)
    offload = Offload(settings)
    stack.push_async_callback(offload.close)
    guards = Guards(settings.guards, offload)
    stack.push_async_callback(guards.close)
    await guards.start()
    access_log = AccessLog(settings.observe)
    stack.callback(access_log.close)
    tracer = None
    if settings.observe.otlp_endpoint:
        from ridgeline.gateway.observe.traces import Tracer

        tracer = Tracer(settings.observe, {one.name: one.kind for one in settings.upstreams})
        stack.callback(tracer.close)
    gateway = settings.gateway
    on_disk = HeldBytes(gateway.max_spooled_bytes, gateway.max_spooled_bytes_per_key, "max_spooled_bytes")
    spools = Spools(uploads_path(settings.state_dir, f"{number}-{os.getpid()}"), on_disk)
    owned = OwnedObjects(store)
    stack.push_async_callback(owned.close)
    models = [*(one.name for one in settings.models), *(one.name for one in settings.routes)]
    parts = Parts(
        settings=settings,
        catalog=Catalog(settings),
        keys=keys,
        limiter=limiter,
        guards=guards,
        upstreams=upstreams,
        ledger=ledger,
        prices=prices,
        metrics=GatewayMetrics(settings.observe, models, [one.name for one in settings.upstreams], NAMES),
        access_log=access_log,
        owned=owned,
        body_bytes=HeldBytes(gateway.max_held_bytes, gateway.max_held_bytes_per_key, "max_held_bytes"),
        spools=spools,
        offload=offload,
        router=_router(settings, embedder, offload),
        exact=ExactCache(settings.cache, await _cache_redis(settings, stack), prefix=settings.redis.prefix),
        semantic=_semantic(settings, embedder),
        tracer=tracer,
        deadlines=deadlines,
    )
    parts.deadlines.start()
    stack.callback(parts.deadlines.stop)
    return parts


def _end_revoked(deadlines: DeadlineSweep, table: KeyTable) -> None:
    """End requests of keys that were revoked together with their running requests."""
    for request in list(deadlines.live):
        if request.key is not None and table.ends_requests(request.key.id):
            request.end_with(key_revoked())


async def _limiter(settings: GatewaySettings, ledger: Ledger) -> Limiter:
    async def spent(subject: Subject, since_ms: int) -> int:
        return await ledger.spent(subject.kind, subject.id, since_ms)

    if not settings.redis.url:
        return HandoverLimiter(MemoryLimiter(spent))
    limiter = RedisLimiter(settings.redis, spent)
    await limiter.start()
    return limiter


def _embedder(
    settings: GatewaySettings, upstreams: Upstreams, ledger: Ledger, prices: Prices
) -> Embedder | None:
    config = settings.embeddings
    if not config.upstream:
        return None
    from ridgeline.gateway.routing.embedder import Embedder

    ours = {one.name for one in settings.upstreams if one.is_ours}
    is_hosted = config.upstream not in ours
    return Embedder(config, OwnEmbeddings(config, upstreams, ledger, prices, is_hosted).post)


def _router(settings: GatewaySettings, embedder: Embedder | None, offload: Offload) -> ModelRouter | None:
    if not settings.routes:
        return None
    from ridgeline.gateway.routing.reading import Reading
    from ridgeline.gateway.routing.router import ModelRouter

    async def read_large(request: RoutingRequest) -> Reading:
        reading: Reading = await offload.run(request.tenant, "reading", request.kind, plain(request.fields))
        return reading

    return ModelRouter(settings.routes, settings.rules, embedder, read_large=read_large)


def _semantic(settings: GatewaySettings, embedder: Embedder | None) -> SemanticCache | None:
    if embedder is None:
        return None
    from ridgeline.gateway.caching.semantic import SemanticCache

    return SemanticCache(settings.cache, embedder)


async def _cache_redis(settings: GatewaySettings, stack: AsyncExitStack) -> RedisClient | None:
    if settings.cache.place != "redis":
        return None
    from ridgeline.gateway.limits.redis_client import RedisClient

    client = RedisClient(settings.redis)
    await client.start()
    stack.push_async_callback(client.close)
    return client
