"""A controller's socket for routers under test: it serves a Table and collects Demand."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from ridgeline.fleet.messages import Demand, ModelEntry, ReplicaEntry, Table
from tests.fleet.router.small_http import Asked, SmallHttp


class ControllerSocket:
    def __init__(self, path: Path, model: ModelEntry) -> None:
        self.path, self.model = path, model
        self.table = Table(0, (model,), ())
        self.latency_ms: dict[str, dict[str, float]] = {}
        self.demands: list[Demand] = []
        self.refusal = 0  # status of the answers to reports that are not counted
        self.is_mute = False  # reports are counted, and not answered
        self._changed = asyncio.Event()
        self._http = SmallHttp(self._answer)

    async def start(self) -> ControllerSocket:
        self._http = SmallHttp(self._answer)
        await self._http.start(self.path)
        return self

    async def stop(self) -> None:
        await self._http.stop()
        self.path.unlink(missing_ok=True)

    def set(
        self,
        *replicas: ReplicaEntry,
        model: ModelEntry | None = None,
        key: str = "",
        is_removed: bool = False,
    ) -> None:
        """is_removed: the table no longer has the model."""
        self.model = model or self.model
        self.table = Table(
            self.table.generation + 1,
            () if is_removed else (self.model,),
            replicas,
            key or self.table.key,
            latency_ms=self.latency_ms,
        )
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _answer(self, asked: Asked) -> None:
        if asked.path == "/fleet/demand" and self.refusal:
            asked.whole(self.refusal, b"{}")
            return
        if asked.path == "/fleet/demand":
            self.demands.append(msgspec.json.decode(asked.body, type=Demand))
            if self.is_mute:
                await asyncio.Event().wait()
            asked.whole(200, b"{}")
            return
        asked.head(200)
        while True:
            changed = self._changed
            await asked.piece(msgspec.json.encode(self.table) + b"\n")
            await changed.wait()
