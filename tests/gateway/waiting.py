"""Waiting for a condition instead of for a time: as long as it takes, and never for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tests.patience import PATIENCE_S


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)
