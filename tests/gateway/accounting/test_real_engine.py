"""The ledger before a real server: tokens as its engine counted them, of every endpoint, also broken off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from tests.conftest import LiveServer
from tests.gateway.stage import Staged, staged

ASKED = {"model": "smollm2-135m", "temperature": 0}
STORY = "Tell me a long story about a river."
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": STORY}], "max_tokens": 12},
    "/v1/completions": {"prompt": STORY, "max_tokens": 12, "ignore_eos": True},
    "/v1/responses": {"input": STORY, "max_output_tokens": 12, "store": False},
    "/v1/messages": {"messages": [{"role": "user", "content": STORY}], "max_tokens": 12},
}


async def test_rows_have_the_engine_s_own_counts(tmp_path: Path, live_server: LiveServer) -> None:
    values = {
        "upstreams": [{"name": "own", "kind": "ridgeline", "url": live_server.base_url, "probe_s": 0.0}],
        "models": [
            {"name": "*", "targets": ("own/*",), "price_in": 1.0, "price_cached": 0.5, "price_out": 2.0}
        ],
    }
    async with staged(tmp_path, values) as gateway:
        for path, body in BODIES.items():
            for stream in (False, True):
                answer = await gateway.http.post(path, json=body | ASKED | {"stream": stream})
                assert answer.status_code == 200, answer.text
        for path, body in BODIES.items():
            await leave(gateway, path, body | ASKED)
        rows = await gateway.rows(12)
    outcomes = [row["outcome"] for row in rows]
    assert outcomes == ["ok"] * 8 + ["client_gone"] * 4
    async with httpx.AsyncClient(base_url=live_server.base_url) as http:
        for row in rows:
            told = (await http.get(f"/v1/usage/{row['request_id']}")).json()
            usage = told["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            counted = (usage["prompt_tokens"], cached, usage["completion_tokens"])
            assert (row["tokens_in"], row["tokens_cached"], row["tokens_out"]) == counted
            assert told["status"] == ("finished" if row["outcome"] == "ok" else "aborted")
            fresh = row["tokens_in"] - cached
            assert row["cost_pusd"] == fresh * 1_000_000 + cached * 500_000 + row["tokens_out"] * 2_000_000
    assert {row["tokens_out"] for row in rows[2:4]} == {12}
    assert all(0 < row["tokens_out"] < 1000 for row in rows[8:])


async def leave(gateway: Staged, path: str, body: dict[str, Any]) -> None:
    """As a client that closes its connection after the first piece of a long answer."""
    limits = {name: 1000 for name in ("max_tokens", "max_output_tokens") if name in body}
    asked = body | limits | {"stream": True}
    async with gateway.client(gateway.secret) as http, http.stream("POST", path, json=asked) as answer:
        pieces = answer.aiter_raw()
        for _ in range(4):
            await anext(pieces)
