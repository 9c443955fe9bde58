"""A gateway without keys answers only under its own names; its first page and its probes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gateway.stage import CHAT, asking, staged

KEYLESS = {"gateway": {"require_keys": False, "allowed_hosts": ("good.example",)}}


async def test_a_keyless_gateway_refuses_foreign_names_and_pages(tmp_path: Path) -> None:
    async with staged(tmp_path, KEYLESS) as stage:

        async def status(**headers: str) -> tuple[int, str | None]:
            answer = await stage.http.post(CHAT, json=asking("mock_out2"), headers=headers)
            return answer.status_code, answer.json().get("error", {}).get("code")

        assert await status() == (200, None)
        assert await status(host="good.example") == (200, None)
        assert await status(host="evil.example") == (403, "host_not_allowed")
        assert await status(origin="https://evil.example") == (403, "origin_not_allowed")
        assert await status(origin=str(stage.http.base_url).rstrip("/")) == (200, None)
        answer = await stage.http.post("/v1/messages", json={}, headers={"host": "evil.example"})
        assert answer.json()["type"] == "error"  # as Anthropic's clients read it
        for path in ("/health", "/healthz", "/ready"):
            answer = await stage.http.get(path, headers={"host": "gateway.cluster.local"})
            assert (answer.status_code, "status" in answer.json()) == (200, True)


async def test_with_keys_the_key_decides_and_not_the_name(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        headers = {"host": "any.example", "origin": "https://other.example"}
        answer = await stage.http.post(CHAT, json=asking("mock_out2"), headers=headers)
        assert answer.status_code == 200


@pytest.mark.parametrize("values", [{}, KEYLESS], ids=["with keys", "without"])
async def test_the_first_page_names_models_only_where_no_key_is_needed(
    tmp_path: Path, values: dict[str, dict[str, object]]
) -> None:
    models = [{"name": "fast", "targets": ("mock/mock_out2",)}]
    async with staged(tmp_path, {**values, "models": models}) as stage:
        answer = await stage.http.get("/", headers={"authorization": ""})
        assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert ("<code>fast</code>" in answer.text) is bool(values)
        assert "script" not in answer.text
