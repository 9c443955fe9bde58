"""A store of either kind; the tests here say the same of both."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ridgeline.gateway.tenants.audit import Actor
from ridgeline.gateway.tenants.config import StoreConfig
from ridgeline.gateway.tenants.store import Store

BY = Actor("tester", "127.0.0.1")


@pytest.fixture(params=["sqlite", "postgres"])
def store_config(request: pytest.FixtureRequest) -> StoreConfig:
    if request.param == "sqlite":
        return StoreConfig(timeout_s=60.0)
    return StoreConfig(url=request.getfixturevalue("postgres_url"), timeout_s=60.0)


@pytest.fixture
async def store(store_config: StoreConfig, tmp_path: Path) -> AsyncIterator[Store]:
    store = Store(store_config, tmp_path)
    await store.prepare()
    yield store
    await store.close()
