"""GrammarQueue: requests that wait for their grammar to be compiled, outside the scheduler.

The engine's core adds requests, takes the compiled ones between two steps, and removes aborted ones. The
queue compiles nothing and never blocks.
"""

from __future__ import annotations

from ridgeline.engine.grammar.compiler import Compilation
from ridgeline.engine.schedule.request import Request


class GrammarQueue:
    def __init__(self) -> None:
        self._waiting: dict[str, tuple[Request, Compilation]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def add(self, request: Request, compilation: Compilation) -> None:
        self._waiting[request.request_id] = request, compilation

    def remove(self, request_id: str) -> tuple[Request, Compilation] | None:
        """Remove an aborted request. None if it is not in the queue."""
        return self._waiting.pop(request_id, None)

    def pop_ready(self) -> list[tuple[Request, Compilation]]:
        """Remove and return the requests with a finished compilation, in arrival order."""
        if not self._waiting:
            return []
        done = [pair for pair in self._waiting.values() if pair[1].done.is_set()]
        for request, _ in done:
            del self._waiting[request.request_id]
        return done
