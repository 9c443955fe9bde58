"""Reasoning, thinking budgets and calls behind them, in streams that a second server continues."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from ridgeline.engine.client.client import AsyncClient
from tests.server.replica.resuming import comparable, continued, cuts, marked, server_over
from tests.server.stage import CHAT
from tests.server.test_thinking_model import CITY, TOOL
from tests.tiny_thinker import save_thinker

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASK: dict[str, Any] = {
    "messages": [{"role": "user", "content": "?"}],
    "max_tokens": 60,
    "temperature": 1.0,
    "stream": True,
    "stream_options": {"include_usage": True},
}
BUDGET = {"reasoning_budget": "default=20"}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "a thinking budget": (CHAT, {**ASK, "thinking_token_budget": 12}),
    "a budget and a schema": (CHAT, {**ASK, "thinking_token_budget": 8, "response_format": SCHEMA}),
    "a budget and a call": (
        CHAT,
        {**ASK, "thinking_token_budget": 8, "tools": [TOOL], "tool_choice": "required"},
    ),
    "several choices": (CHAT, {**ASK, "thinking_token_budget": 5, "n": 2}),
    "a message with thinking": (
        "/v1/messages",
        {
            "model": "m",
            "messages": ASK["messages"],
            "max_tokens": 60,
            "stream": True,
            "thinking": {"type": "adaptive"},
        },
    ),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncClient]:
    folder: Path = tmp_path_factory.mktemp("thinking")
    save_thinker(folder)
    async with await AsyncClient.start(str(folder), kv_tokens=8192, deterministic=True) as client:
        yield client


@pytest.mark.parametrize("case", CASES)
async def test_reasoning_is_continued_exactly(case: str, engine: AsyncClient) -> None:
    path, body = CASES[case]
    content = msgspec.json.encode(body)
    async with server_over(engine, **BUDGET) as first, server_over(engine, **BUDGET) as second:
        stream = await marked(first, path, body)
        places = cuts(stream)
        rest = await asyncio.gather(*(continued(second, path, content, stream.state(k)) for k in places))
    for place, tail in zip(places, rest, strict=True):
        begun = b"".join(group.events for group in stream.groups[:place])
        assert comparable(begun + tail.events) == comparable(stream.events), f"cut after {place} groups"
    assert b"reasoning_content" in stream.events or b"thinking_delta" in stream.events
