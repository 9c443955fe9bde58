"""Cached prefixes at an upstream are one tenant's own: before our real server, and by what is sent."""

from __future__ import annotations

import json
import re
import uuid
from pathlib import Path
from typing import Any

import httpx
import pytest

from ridgeline.gateway.upstreams.config import UpstreamConfig
from ridgeline.options import OptionError
from tests.conftest import LiveServer
from tests.gateway.scripted_upstream import ScriptedUpstream, always
from tests.gateway.stage import CHAT, asking, staged
from tests.gateway.test_objects import batch_line, upload

MODEL = "smollm2-135m"
PATHS = (CHAT, "/v1/completions", "/v1/responses", "/v1/messages")
USED = ("prompt_tokens_details", "input_tokens_details")  # of chat, of responses


def bodies(words: str) -> dict[str, dict[str, Any]]:
    said = [{"role": "user", "content": words}]
    return {
        CHAT: {"messages": said, "max_tokens": 1},
        "/v1/completions": {"prompt": words, "max_tokens": 1},
        "/v1/responses": {"input": words, "max_output_tokens": 1, "store": False},
        "/v1/messages": {"messages": said, "max_tokens": 1},
    }


async def cached(http: httpx.AsyncClient, path: str, body: dict[str, Any], model: str) -> int:
    answer = await http.post(path, json={"model": model, "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    if path == "/v1/messages":
        return int(usage["cache_read_input_tokens"])
    return int(next(usage[name] for name in USED if name in usage)["cached_tokens"])


async def test_two_tenants_share_no_prefix_at_our_server_and_one_does(
    tmp_path: Path, live_server: LiveServer
) -> None:
    own = {"name": "own", "kind": "ridgeline", "url": live_server.base_url, "probe_s": 0.0}
    models = [
        {"name": "apart", "targets": (f"own/{MODEL}",)},
        {"name": "shared", "targets": (f"own/{MODEL}",), "shared_prefixes": True},
    ]
    async with staged(tmp_path, {"upstreams": [own], "models": models}) as gateway:
        _, secret = await gateway.new_key(name="other")
        async with gateway.client(secret) as other:
            for path in PATHS:
                body = bodies(f"The secret of {uuid.uuid4()} is {uuid.uuid4()}")[path]
                first = await cached(gateway.http, path, body, "apart")  # no more than the template's words
                assert await cached(other, path, body, "apart") == first, path
                assert await cached(gateway.http, path, body, "apart") >= first + 16, path
            salted = {**bodies("Hello")[CHAT], "cache_salt": "mine"}
            assert await cached(gateway.http, CHAT, salted, "apart") == 0
            body = bodies(f"The manual of {uuid.uuid4()} is {uuid.uuid4()}")[CHAT]
            first = await cached(gateway.http, CHAT, body, "shared")
            assert await cached(other, CHAT, body, "shared") >= first + 16
            await cached(gateway.http, CHAT, salted, "shared")
            assert await cached(other, CHAT, salted, "shared") == 0


@pytest.mark.parametrize(
    ("upstream", "given", "sent"),
    [
        ({"kind": "ridgeline"}, {}, "salt"),
        ({"kind": "ridgeline"}, {"cache_salt": "x"}, "salt"),
        ({"kind": "ridgeline"}, {"cache_salt": None}, "salt"),
        ({"kind": "ridgeline", "cache_salt": False}, {"cache_salt": "x"}, "x"),
        ({"kind": "openai"}, {}, None),
        ({"kind": "openai"}, {"cache_salt": "x"}, "x"),
        ({"kind": "openai", "cache_salt": True}, {"cache_salt": "x"}, "salt"),
    ],
)
async def test_an_upstream_is_sent_a_salt_if_it_knows_the_field(
    tmp_path: Path, upstream: dict[str, Any], given: dict[str, Any], sent: str | None
) -> None:
    async with ScriptedUpstream(always(200, {"id": "c", "choices": [], "usage": {}})) as server:
        values = {
            "upstreams": [{"name": "a", "url": server.url, "probe_s": 0.0, **upstream}],
            "models": [{"name": "m", "targets": ("a/there",)}],
        }
        async with staged(tmp_path, values) as gateway:
            assert (await gateway.http.post(CHAT, json=asking("m", **given))).status_code == 200
            salt = server.asked[-1].json().get("cache_salt")
            assert (re.fullmatch("[0-9a-f]{64}", salt or "") is not None) == (sent == "salt")
            if sent != "salt":
                assert salt == sent
            else:  # of the tenant and of what the client gave, always the same
                await gateway.http.post(CHAT, json=asking("m", **given))
                await gateway.http.post(CHAT, json=asking("m", cache_salt="another"))
                assert [one.json()["cache_salt"] == salt for one in server.asked] == [True, True, False]


@pytest.mark.parametrize("salt", ["", 5, ["x"]])
async def test_a_salt_that_is_none_is_refused_by_its_name(tmp_path: Path, salt: Any) -> None:
    async with staged(tmp_path) as gateway:
        refused = await gateway.http.post(CHAT, json=asking("mock_out1", cache_salt=salt))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "cache_salt")
        assert not gateway.mock.books


async def test_the_lines_of_a_batch_have_the_tenants_salt(tmp_path: Path) -> None:
    async with ScriptedUpstream(always(200, {"id": "file-1", "object": "file"})) as server:
        values = {
            "upstreams": [{"name": "a", "kind": "ridgeline", "url": server.url, "probe_s": 0.0}],
            "models": [{"name": "public", "targets": ("a/m",)}],
        }
        async with staged(tmp_path, values) as gateway:
            content = batch_line(1) + "\n" + batch_line(2, body={"cache_salt": "x"})
            await upload(gateway.http, content)
            _, secret = await gateway.new_key(name="other")
            async with gateway.client(secret) as other:
                await upload(other, content)
            await gateway.http.post(CHAT, json=asking("public"))
    first, second, asked = server.asked
    salts = [
        json.loads(line)["body"]["cache_salt"]
        for upload in (first, second)
        for line in upload.body.splitlines()
        if line.startswith(b"{")
    ]
    assert len(set(salts)) == 4
    assert asked.json()["cache_salt"] == salts[0]


def test_anthropic_is_never_sent_a_salt() -> None:
    with pytest.raises(OptionError, match="cache_salt"):
        UpstreamConfig(name="a", kind="anthropic", url="https://h", cache_salt=True)
