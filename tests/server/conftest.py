"""The scripted stage as a fixture."""

from __future__ import annotations

import pytest

from tests.server.stage import Stage


@pytest.fixture
async def stage() -> Stage:
    return Stage()
