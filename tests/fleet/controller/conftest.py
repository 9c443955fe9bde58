from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ridgeline.fleet.controller.life import keeper as keeper_module
from ridgeline.fleet.controller.store import FleetStore
from tests.fleet.controller.keeping import Keeping
from tests.fleet.controller.ruled import Ruled


@pytest.fixture
async def keeping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Keeping]:
    monkeypatch.setattr(keeper_module, "STOP_RETRY_S", (0.01,))
    store = FleetStore(tmp_path)
    await store.open()
    assert await store.lease.try_take() is None
    made = Keeping(tmp_path, store)
    yield made
    made.keeper.leave()
    await store.close()


@pytest.fixture
async def ruled(tmp_path: Path) -> AsyncIterator[Ruled]:
    store = FleetStore(tmp_path)
    await store.open()
    assert await store.lease.try_take() is None
    made = Ruled(tmp_path, store)
    yield made
    await asyncio.sleep(0)  # tasks that were just made begin
    for one in made.made:
        one.leave()
    await store.close()
