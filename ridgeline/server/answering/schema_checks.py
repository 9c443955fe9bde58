"""SchemaChecks: validates schemas and finished answers in threads, fairly among clients.

A check may take 0.25 s of CPU time, and there are few processes for them. One client uses at most all of them
but one, and waiting clients are served round-robin, so slow checks of one client do not delay another's.
Called by `running_request`.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from ridgeline.engine.grammar.conformance import PROCESSES
from ridgeline.server.errors import ApiError
from ridgeline.server.served_models import ServedModels

T = TypeVar("T")

MOST_UNDER_WAY = 128  # requests of one client with answers to check; each runs one check at a time


class Client(NamedTuple):
    """A key or an address. Behind a gateway all tenants share one of these, and each has its own salt."""

    name: str
    cache_salt: str


class SchemaChecks:
    """Made by `ServedModels.part`."""

    def __init__(self, served_models: ServedModels | None = None) -> None:
        self._threads = ThreadPoolExecutor(PROCESSES, "ridgeline-schema-checks")
        self._under_way: Counter[Client] = Counter()
        self._busy: Counter[str] = Counter()  # processes by the client's name
        self._waiting: OrderedDict[Client, deque[asyncio.Future[None]]] = OrderedDict()

    def enter(self, client: Client) -> None:
        """Register a request whose answer will be checked. Raises 429 if its client has too many."""
        if self._under_way[client] >= MOST_UNDER_WAY:
            message = (
                f"{MOST_UNDER_WAY} requests of this client are waiting for a schema check of their answer, "
                "this server's limit; wait for one to end"
            )
            headers = {"retry-after": "1"}
            raise ApiError(429, message, type="rate_limit_error", code="too_many_requests", headers=headers)
        self._under_way[client] += 1

    def leave(self, client: Client) -> None:
        _decrement(self._under_way, client)

    async def run(self, client: Client, check: Callable[[], None]) -> None:
        """The check's result or error. A cancelled caller leaves a check that has begun running."""
        await self._turn(client)
        running = asyncio.get_running_loop().run_in_executor(self._threads, check)
        running.add_done_callback(lambda _: self._give_back(client))
        await asyncio.shield(running)

    async def _turn(self, client: Client) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        self._give_turns()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give_back(client)
            raise

    def _give_turns(self) -> None:
        for client in list(self._waiting):
            if self._busy.total() >= PROCESSES:
                return
            turns = self._waiting[client]
            while turns and turns[0].cancelled():
                turns.popleft()
            if turns and self._busy[client.name] < max(PROCESSES - 1, 1):
                self._busy[client.name] += 1
                turns.popleft().set_result(None)
                self._waiting.move_to_end(client)
            if not turns:
                del self._waiting[client]

    def _give_back(self, client: Client) -> None:
        _decrement(self._busy, client.name)
        self._give_turns()


def _decrement(counts: Counter[T], name: T) -> None:
    counts[name] -= 1
    if not counts[name]:
        del counts[name]
