"""FleetRequest: one request for a fleet, as a gateway's worker or a router's app gives it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ridgeline.fleet.placement.regions import Rules
from ridgeline.proxy.body import StoredBody
from ridgeline.proxy.http_client import NEVER
from ridgeline.proxy.json_fields import Fields
from ridgeline.proxy.request_head import Headers


@dataclass(frozen=True, slots=True)
class FleetRequest:
    method: str
    path: str
    headers: Headers
    body: bytes | StoredBody
    model: str  # a name, an alias or an adapter
    fields: Fields = field(default_factory=dict)  # fields of the body, as sent; empty for a form
    stream: bool = False
    tenant: str = ""
    weight: float = 1.0  # weight of the tenant in the order of held requests
    priority: int = 1  # 0 goes first
    until: float = NEVER  # deadline of the whole answer, on the monotonic clock
    repeatable: bool = True  # False if it creates an object: sent again only if it was certainly not executed
    request_id: str = ""
    residency: Rules = ()  # of the tenant: regions in which it may be computed
    is_counted: bool = False  # it came at a router before this one: no new demand
    is_accepted: bool = False  # it is in the journal: neither max_held nor hold_s applies
