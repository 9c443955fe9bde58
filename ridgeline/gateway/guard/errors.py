"""What a guard answers instead of forwarding. Messages name kinds and counts, never the text."""

from __future__ import annotations

from collections.abc import Mapping

from ridgeline.gateway.errors import INVALID, GatewayError


class Blocked(GatewayError):
    """The policy refuses what was found."""

    status, type, code = 400, INVALID, "content_blocked"

    def __init__(self, what: str, found: Mapping[str, int], param: str | None = None) -> None:
        kinds = ", ".join(f"{kind} ({count})" for kind, count in sorted(found.items()))
        super().__init__(f"{what} holds what this key's policy does not let through: {kinds}", param=param)
        self.found = dict(found)


class Unreadable(GatewayError):
    """A guard is on and the body is nothing it can read: uploads, token ids."""

    status, type, code = 400, INVALID, "content_unreadable"


class GuardFailed(GatewayError):
    """The guard could not do its work, so nothing was let through."""

    status, type, code = 500, "server_error", "guard_failed"
