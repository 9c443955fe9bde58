"""EventLog: stores, logs and publishes every decision and observation of the controller, with its reason."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ridgeline.fleet.controller.board import Board
from ridgeline.fleet.controller.life.replica import Replica
from ridgeline.fleet.controller.store import FleetStore

log = logging.getLogger("ridgeline.fleet")


class EventLog:
    def __init__(self, store: FleetStore, board: Board, kept: int) -> None:
        self._store, self._board, self._kept = store, board, kept

    async def say(
        self,
        kind: str,
        text: str,
        replica: Replica | None = None,
        model: str = "",
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        log.info(text, extra={"event": kind})
        if replica is not None:
            model = replica.model
        id = "" if replica is None else replica.id
        self._board.add(await self._store.add_event(kind, text, self._kept, model, id, facts or {}))
