"""DeadlineSweep: ends the running requests that are past their deadline. A timer for each would cost more."""

from __future__ import annotations

import asyncio
import time

from ridgeline.gateway.errors import GatewayError
from ridgeline.gateway.pipeline.request_state import RequestState

SWEEP_S = 0.1


class DeadlineSweep:
    def __init__(self) -> None:
        self.live: set[RequestState] = set()
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._handle = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()

    def end_all(self, error: GatewayError) -> None:
        for request in list(self.live):
            request.end_with(error)

    def _sweep(self) -> None:
        now = time.monotonic()
        for request in [one for one in self.live if now > one.deadline]:
            request.expire()
        self.start()
