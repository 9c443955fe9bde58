"""DecisionLog: keeps the explanation of every decision of the autoscaler.

Equal decisions in a row are one entry, with their number and the time of the first and the last. The entries
have a table of their own, so that they never displace events.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from ridgeline.fleet.controller.store import FleetStore, StoredDecisions
from ridgeline.fleet.scaling.explain import Decision

WRITE_EVERY_S = 30.0  # seconds between two writes of an entry that still grows


class DecisionLog:
    def __init__(self, store: FleetStore, kept: int, clock: Callable[[], float]) -> None:
        """kept: entries of all models. clock: monotonic."""
        self._store, self._kept, self._clock = store, kept, clock
        self._open: dict[str, StoredDecisions] = {}  # the newest entry of each model
        self._written: dict[str, float] = {}

    async def add(self, model: str, decision: Decision) -> None:
        at, explain = time.time(), decision.explain
        entry = self._open.get(model)
        if entry is not None and entry.key == explain.key:
            grown = msgspec.structs.replace(
                entry, last_at=at, count=entry.count + 1, text=explain.sentence, facts=_facts(decision)
            )
            self._open[model] = grown
            if self._clock() - self._written[model] >= WRITE_EVERY_S:
                await self._write(grown)
            return
        if entry is not None:
            await self._write(entry)
        new = StoredDecisions(0, model, at, at, 1, explain.key, explain.sentence, _facts(decision))
        self._open[model] = await self._store.add_decisions(new, self._kept)
        self._written[model] = self._clock()

    async def entries(self, last: int, model: str = "") -> list[StoredDecisions]:
        """The newest entries, oldest first, with every decision until now."""
        for entry in list(self._open.values()):
            await self._write(entry)
        return await self._store.decisions(last, model)

    async def remove(self, model: str) -> None:
        """The model has left the fleet; its entries stay."""
        entry = self._open.pop(model, None)
        if entry is not None:
            await self._store.update_decisions(entry)

    async def _write(self, entry: StoredDecisions) -> None:
        await self._store.update_decisions(entry)
        self._written[entry.model] = self._clock()


def _facts(decision: Decision) -> dict[str, Any]:
    facts: dict[str, Any] = msgspec.to_builtins(decision.explain)
    return facts
