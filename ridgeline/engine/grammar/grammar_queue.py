"""Anteroom: where requests wait, outside the scheduler, until their grammar is compiled.

The engine's core puts them in, takes out those that are ready between two steps, and those that are aborted.
It compiles nothing and waits for nothing.
"""

from __future__ import annotations

from ridgeline.engine.grammar.compiler import Compilation
from ridgeline.engine.plan.request import Request


class Anteroom:
    def __init__(self) -> None:
        self._waiting: dict[str, tuple[Request, Compilation]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def enter(self, request: Request, compilation: Compilation) -> None:
        self._waiting[request.request_id] = request, compilation

    def leave(self, request_id: str) -> tuple[Request, Compilation] | None:
        """Nobody waits for it any more. None: it is not here."""
        return self._waiting.pop(request_id, None)

    def ready(self) -> list[tuple[Request, Compilation]]:
        """Those whose compilation is done, in the order in which they came; they are here no longer."""
        if not self._waiting:
            return []
        done = [pair for pair in self._waiting.values() if pair[1].done.is_set()]
        for request, _ in done:
            del self._waiting[request.request_id]
        return done
