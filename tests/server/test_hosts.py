"""A server without keys answers only under its own names, and not to other sites' pages."""

from __future__ import annotations

from typing import Any

import pytest

from ridgeline.server.config import ServerConfig
from ridgeline.web.hosts import HostCheck
from tests.server.stage import CHAT, HELLO, Stage


async def status(stage: Stage, path: str = "/v1/models", **headers: str) -> tuple[int, str | None]:
    async with stage.http() as http:
        answer = await http.get(path, headers=headers)
    is_json = answer.headers["content-type"] == "application/json"
    return answer.status_code, answer.json().get("error", {}).get("code") if is_json else None


@pytest.mark.parametrize(
    ("host", "is_known"),
    [
        ("localhost", True),
        ("localhost:8000", True),
        ("LOCALHOST.:8000", True),
        ("app.localhost", True),
        ("127.0.0.1:8000", True),
        ("[::1]:8000", True),
        ("192.168.1.20:8000", True),  # an address cannot be rebound
        ("box.example", True),
        ("a.b.inner.example:1", True),
        ("inner.example", False),
        ("notinner.example", False),
        ("evil.example", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("127.0.0.1@evil.example", False),
        ("[::1].evil.example", True),  # no name: a browser never sends it
        ("1.2.3", False),
    ],
)
def test_a_host_is_known_by_its_name_alone(host: str, is_known: bool) -> None:
    check = HostCheck("127.0.0.1", ("Box.example", "*.inner.example"))
    assert check.knows(host) is is_known
    assert HostCheck("127.0.0.1", ("*",)).knows(host)


async def test_a_rebound_name_is_403_and_the_message_says_what_to_set() -> None:
    stage = Stage()
    async with stage.http() as http:
        answer = await http.post(CHAT, json=HELLO, headers={"host": "evil.example:8000"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (403, "host_not_allowed")
    assert "--allowed-hosts evil.example," in error["message"]
    assert stage.client.asked == []
    assert await status(
        Stage(config=ServerConfig(allowed_hosts=("good.example",))), host="good.example:1"
    ) == (
        200,
        None,
    )


@pytest.mark.parametrize("path", ["/health", "/healthz", "/ready", "/metrics"])
async def test_probes_come_under_any_name(path: str) -> None:
    assert (await status(Stage(), path, host="server.cluster.local"))[0] == 200


@pytest.mark.parametrize("path", ["/", "/v1/models", "/docs", "/v1/files", "/nothing"])
async def test_everything_else_does_not(path: str) -> None:
    assert await status(Stage(), path, host="server.cluster.local") == (403, "host_not_allowed")


@pytest.mark.parametrize(
    ("origin", "config", "expected"),
    [
        ("http://localhost", {}, 200),
        ("https://evil.example", {}, 403),
        ("null", {}, 403),
        ("https://good.example", {"cors_origins": ("https://good.example",)}, 200),
        ("https://evil.example", {"cors_origins": ("https://good.example",)}, 403),
        ("https://evil.example", {"cors_origins": ("*",)}, 200),
    ],
)
async def test_a_page_of_another_origin_may_not_call(
    origin: str, config: dict[str, Any], expected: int
) -> None:
    stage = Stage(config=ServerConfig(**config))
    async with stage.http() as http:
        answer = await http.post(CHAT, json=HELLO, headers={"origin": origin})
    assert answer.status_code == expected
    if expected == 403:
        assert answer.json()["error"]["code"] == "origin_not_allowed"


async def test_with_keys_the_key_decides_and_not_the_name() -> None:
    stage = Stage(config=ServerConfig(api_keys=("secret",)))
    headers = {"host": "any.example", "origin": "https://other.example"}
    assert await status(stage, authorization="Bearer secret", **headers) == (200, None)
    assert await status(stage, **headers) == (401, "invalid_api_key")


async def test_the_first_page_names_models_only_where_no_key_is_needed() -> None:
    async with Stage().http() as http:
        answer = await http.get("/")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "<code>alias</code>" in answer.text
    assert 'href="/docs"' in answer.text
    assert "script" not in answer.text
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    async with Stage(config=ServerConfig(api_keys=("secret",))).http() as http:
        answer = await http.get("/")
    assert (answer.status_code, "alias" in answer.text) == (200, False)
    assert "Bearer KEY" in answer.text
