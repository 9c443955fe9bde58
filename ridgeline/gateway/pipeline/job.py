"""Job: what the steps of one request find out for the next, apart from what its row will say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ridgeline.gateway.body import Fields
from ridgeline.gateway.catalog import PublicModel
from ridgeline.gateway.dialects.families import Family
from ridgeline.gateway.dialects.streams.usage_reader import Hide
from ridgeline.gateway.errors import GatewayError
from ridgeline.gateway.objects.forms import Form
from ridgeline.gateway.upstreams.outgoing import Target

if TYPE_CHECKING:
    from ridgeline.gateway.caching.answers import CacheUse
    from ridgeline.gateway.routing.routing_request import Decision, RoutingRequest


class Sent(NamedTuple):
    """How one target was asked."""

    family: Family
    is_translated: bool = False
    hide: Hide = ""  # of the usage that we asked for, what the client had not


@dataclass(slots=True)
class Job:
    form: Form | None = None
    model: PublicModel | None = None
    targets: Sequence[Target] = ()  # fewer than the model has, where only some can answer
    restorer: Any = None  # of a guard: what it took out goes back into the answer
    routing_request: RoutingRequest | None = None  # to the router,
    decision: Decision | None = None  # and its answer
    cache: CacheUse | None = None
    # Of a large request, by family and whether a salt is added: path and fields, or why there are none.
    translated: dict[tuple[Family, bool], tuple[str, Fields] | GatewayError] = field(default_factory=dict)
    _sent: dict[Target, Sent] = field(default_factory=dict)  # several, where one failed or was overtaken

    def note(self, target: Target, sent: Sent) -> None:
        self._sent[target] = sent

    def sent_to(self, target: Target, family: Family) -> Sent:
        return self._sent.get(target) or Sent(family)
