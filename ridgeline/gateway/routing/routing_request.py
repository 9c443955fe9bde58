"""RoutingRequest and Decision: the router's input and output."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ridgeline.gateway.body import Fields
from ridgeline.gateway.routing.cascade import Cascade


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """A request whose `model` is a route's name."""

    route: str
    kind: str  # chat, completions, responses, messages, …
    fields: Fields
    tenant: str = ""
    key_id: str = ""
    conversation: str = ""  # the client's header x-ridgeline-conversation, if sent


@dataclass(slots=True)
class Decision:
    """model: gets the request. why: the reason, as JSON for the ledger; holds no text of the request.

    shadow: the model that would have been chosen, if the route only observes.
    cascade: how to judge the model's answer; `escalate_to` gets the request if it is not good enough.
    """

    model: str
    why: dict[str, Any] = field(default_factory=dict)
    shadow: str | None = None
    cascade: Cascade | None = None
    escalate_to: str = ""
    conversation: bytes = b""  # the key of its sticky entry, for `ModelRouter.escalated`
