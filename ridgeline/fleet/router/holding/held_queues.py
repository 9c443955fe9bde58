"""HeldQueues: the requests that wait at a router, one HeldRequests for each model and residency.

Requests that may use other regions than the rest have their own queue: while their regions are full or gone,
they do not stop those behind them. `wake` may be called for every line of a feed and every answer that ends:
it tries the waiting requests of a model once in a turn of the event loop, however often it was called.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator

from ridgeline.fleet.messages import ModelEntry
from ridgeline.fleet.placement.regions import Rules, with_rule
from ridgeline.fleet.router.holding.held_requests import HeldRequests, Place, Placed
from ridgeline.fleet.routing.book import LoadBook
from ridgeline.proxy.errors import NoReplica, ProxyError


class HeldQueues:
    """`queues[model]`: the one without residency."""

    def __init__(
        self,
        book: LoadBook,
        place: Place,
        give_back: Callable[[Placed], None],
        clock: Callable[[], float],
    ) -> None:
        self._book, self._place, self._give_back, self._clock = book, place, give_back, clock
        self._entries: dict[str, ModelEntry] = {}
        self._queues: dict[str, dict[Rules, HeldRequests]] = {}
        self._to_wake: set[str] = set()  # models, at the end of this turn of the loop

    def __iter__(self) -> Iterator[str]:
        """The models that have queues."""
        return iter(self._queues)

    @property
    def waiting(self) -> int:
        """All requests that wait, of all models."""
        return sum(map(self.count, self._queues))

    def __getitem__(self, model: str) -> HeldRequests:
        return self._queues[model][()]

    def of(self, model: str, rules: Rules) -> HeldRequests:
        queues = self._queues[model]
        held = queues.get(rules)
        if held is None:
            held = queues[rules] = self._made(self._entries[model])
            held.tick(self._is_cold(model, rules))
        return held

    def _made(self, entry: ModelEntry) -> HeldRequests:
        queues = self._queues[entry.name]  # they share max_held
        return HeldRequests(entry, self._place, self._give_back, self._clock, queues.values)

    def _is_cold(self, model: str, rules: Rules) -> bool:
        """A queue may be older than the model's residency, which then applies as well."""
        return self._book.candidates(model, with_rule(rules, self._entries[model].residency)) == 0

    def configure(self, entry: ModelEntry) -> None:
        """A new table."""
        self._entries[entry.name] = entry
        queues = self._queues.setdefault(entry.name, {})
        if () not in queues:
            queues[()] = self._made(entry)
        for held in queues.values():
            held.configure(entry)

    def keep(self, models: Collection[str], retry_after_s: float) -> list[str]:
        """Remove the queues of all other models, and refuse what they hold. Returns those models."""
        gone = [name for name in self._queues if name not in models]
        for name in gone:
            for held in self._queues.pop(name).values():
                held.close(NoReplica(f"{name} has been removed from the fleet", retry_after_s))
        return gone

    def count(self, model: str) -> int:
        return sum(map(len, self._queues[model].values()))

    def retry_after_s(self, model: str) -> float:
        return max(line.retry_after_s() for held in self._queues[model].values() for line in held.lines())

    def oldest_s(self, model: str) -> float:
        return max(held.oldest_s() for held in self._queues[model].values())

    def demand(self, model: str) -> tuple[int, float]:
        """How many requests wait that a further replica could answer, and how long the oldest has waited."""
        queues = self._queues[model].values()
        return sum(one.movable for one in queues), max(one.oldest_s(with_pinned=False) for one in queues)

    def wake(self, model: str) -> None:
        """A replica of the model may have room. Its waiting requests are tried soon, once for many calls."""
        if model in self._to_wake or model not in self._queues or not self.count(model):
            return
        if not self._to_wake:
            asyncio.get_running_loop().call_soon(self._wake_all)
        self._to_wake.add(model)

    def _wake_all(self) -> None:
        models, self._to_wake = self._to_wake, set()
        for model in models:
            for held in list(self._queues.get(model, {}).values()):
                held.wake()

    def tick(self) -> None:
        """Called several times a second: end waits whose budget is spent, and try the others."""
        for model, queues in self._queues.items():
            for rules, held in queues.items():
                held.tick(self._is_cold(model, rules))
                held.wake()

    def fail_all(self, error: ProxyError) -> None:
        for queues in self._queues.values():
            for held in queues.values():
                held.fail_all(error)
