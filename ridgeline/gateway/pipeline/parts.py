"""Parts: the objects that a worker's request handlers share, made once by the worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ridgeline.gateway.accounting.ledger import Ledger
from ridgeline.gateway.accounting.prices import Prices
from ridgeline.gateway.caching.exact import ExactCache
from ridgeline.gateway.catalog import Catalog
from ridgeline.gateway.guard.guards import Guards
from ridgeline.gateway.limits.held_bytes import HeldBytes
from ridgeline.gateway.limits.limiter_types import Limiter
from ridgeline.gateway.objects.spool import Spools
from ridgeline.gateway.observe.access_log import AccessLog
from ridgeline.gateway.observe.metrics import GatewayMetrics
from ridgeline.gateway.offload.offload import Offload
from ridgeline.gateway.pipeline.deadline_sweep import DeadlineSweep
from ridgeline.gateway.settings import GatewaySettings
from ridgeline.gateway.tenants.key_watch import KeyWatch
from ridgeline.gateway.tenants.owned import OwnedObjects
from ridgeline.gateway.upstreams.upstreams import Upstreams

if TYPE_CHECKING:  # made only if configured: other workers import neither them nor numpy
    from ridgeline.gateway.caching.semantic import SemanticCache
    from ridgeline.gateway.observe.traces import Tracer
    from ridgeline.gateway.routing.router import ModelRouter


@dataclass(slots=True)
class Parts:
    settings: GatewaySettings
    catalog: Catalog
    keys: KeyWatch
    limiter: Limiter
    guards: Guards
    upstreams: Upstreams
    ledger: Ledger
    prices: Prices
    metrics: GatewayMetrics
    access_log: AccessLog
    owned: OwnedObjects
    body_bytes: HeldBytes
    spools: Spools
    offload: Offload
    router: ModelRouter | None = None
    exact: ExactCache | None = None
    semantic: SemanticCache | None = None
    tracer: Tracer | None = None
    deadlines: DeadlineSweep = field(default_factory=DeadlineSweep)
    draining: bool = False
