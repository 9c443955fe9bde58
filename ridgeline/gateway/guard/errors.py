"""Errors of a guard, sent in place of an answer. Messages name kinds and counts, never the text."""

from __future__ import annotations

from collections.abc import Mapping

from ridgeline.gateway.errors import INVALID, GatewayError


class Blocked(GatewayError):
    """The policy blocks a kind that was found."""

    status, type, code = 400, INVALID, "content_blocked"

    def __init__(self, what: str, found: Mapping[str, int], param: str | None = None) -> None:
        kinds = ", ".join(f"{kind} ({count})" for kind, count in sorted(found.items()))
        super().__init__(f"{what} contains kinds that this key's policy blocks: {kinds}", param=param)
        self.found = dict(found)


class Unreadable(GatewayError):
    """The key has a guard, and the guard cannot read the body: uploads, token ids."""

    status, type, code = 400, INVALID, "content_unreadable"


class GuardFailed(GatewayError):
    """The guard's check failed, so nothing was forwarded."""

    status, type, code = 500, "server_error", "guard_failed"
