"""The response to an unknown path: 404 with the likely intended path.

Clients omit `/v1`, write it twice, or put another server's prefix before it.
"""

from __future__ import annotations

from collections.abc import Iterable

from starlette.types import Receive, Scope, Send

from ridgeline.server.errors import ApiError

ROOTS = ("", "/v1", "/api")
MAX_SEGMENTS = 8


class UnknownPath:
    """The router's default app; raises to the gate."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._paths = frozenset(path for path in paths if "{" not in path)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        meant = self.meant(path)
        hint = f"did you mean {meant}?" if meant else "GET /docs lists all paths"
        raise ApiError(404, f"no such path: {path[:200]}; {hint}", code="not_found")

    def meant(self, path: str) -> str | None:
        segments = [segment for segment in path.split("/") if segment][:MAX_SEGMENTS]
        for start in range(len(segments)):
            rest = "/" + "/".join(segments[start:])
            for root in ROOTS:
                if root + rest in self._paths:
                    return root + rest
        return None
