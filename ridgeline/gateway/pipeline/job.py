"""Job: results that one step of a request passes to the next, apart from its row."""

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
    """How a request was sent to one target."""

    family: Family
    is_translated: bool = False
    hide: Hide = ""  # usage that only the gateway asked for


@dataclass(slots=True)
class Job:
    form: Form | None = None
    model: PublicModel | None = None
    targets: Sequence[Target] = ()  # fewer than the model has, if only some can answer
    restorer: Any = None  # of a guard: restores redacted values in the answer
    routing_request: RoutingRequest | None = None  # input of the router,
    decision: Decision | None = None  # and its output
    cache: CacheUse | None = None
    # Of a large request, by family and whether a salt is added: path and fields, or why there are none.
    translated: dict[tuple[Family, bool], tuple[str, Fields] | GatewayError] = field(default_factory=dict)
    _sent: dict[Target, Sent] = field(default_factory=dict)  # several, after a failure or a hedge

    def note(self, target: Target, sent: Sent) -> None:
        self._sent[target] = sent

    def sent_to(self, target: Target, family: Family) -> Sent:
        return self._sent.get(target) or Sent(family)
