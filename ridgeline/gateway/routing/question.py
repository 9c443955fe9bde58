"""Question and Decision: what the pipeline asks of the router, and what it is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ridgeline.gateway.body import Fields
from ridgeline.gateway.routing.cascade import Cascade


def every_model(model: str) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Question:
    """A request whose `model` is a route's name."""

    route: str
    kind: str  # chat, completions, responses, messages, …
    fields: Fields
    tenant: str = ""
    key_id: str = ""
    conversation: str = ""  # the client's header x-ridgeline-conversation, where it sent one
    may_use: Callable[[str], bool] = every_model  # which models the key's scope has


@dataclass(slots=True)
class Decision:
    """model: where the request goes. why: for the ledger, as JSON; holds no text of the request.

    shadow: the model that would have been taken, where the route only watches.
    cascade: how to judge the model's answer; `escalate_to` is asked when it is not good enough.
    """

    model: str
    why: dict[str, Any] = field(default_factory=dict)
    shadow: str | None = None
    cascade: Cascade | None = None
    escalate_to: str = ""
    conversation: bytes = b""  # the key of its sticky entry, for `ModelRouter.escalated`
