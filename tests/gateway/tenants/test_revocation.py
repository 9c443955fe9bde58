"""Two whole gateways of two workers each on one PostgreSQL: what is done at one holds at both."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import asyncpg
import httpx

from tests.gateway.mock_upstream import MockUpstream
from tests.patience import PATIENCE_S

WORKERS = 2

CONFIG = """\
[gateway]
log_format = "text"
port = 0
workers = {workers}
state_dir = "{state}"
[admin]
port = 0
[store]
url = "{store}"
[redis]
url = "{redis}"
prefix = "{prefix}"
[[upstreams]]
name = "mock"
kind = "openai"
url = "{upstream}"
[[models]]
name = "m"
targets = ["mock/mock_out2"]
"""


async def gateway(folder: Path, **values: Any) -> tuple[asyncio.subprocess.Process, str, str]:
    """A running gateway: its process, its URL and that of its admin API."""
    folder.mkdir()
    (folder / "gateway.toml").write_text(CONFIG.format(state=folder / "state", workers=WORKERS, **values))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ridgeline.cli.main", "gateway", "--config", str(folder / "gateway.toml")),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdout is not None
    printed = ""
    async with asyncio.timeout(PATIENCE_S):
        while "serving on" not in printed:
            line = await process.stdout.readline()
            assert line, "the gateway ended before it was ready"
            printed += line.decode()
    url, admin = (printed.split(f"{words} ")[1].split()[0] for words in ("serving on", "admin"))
    return process, url, admin


async def until(what: Callable[[], Awaitable[bool]]) -> float:
    begun = time.monotonic()
    async with asyncio.timeout(PATIENCE_S):
        while not await what():
            await asyncio.sleep(0.02)
    return time.monotonic() - begun


async def test_a_key_made_at_one_gateway_works_at_both_until_it_is_revoked_at_the_other(
    postgres_url: str, redis_url: str, tmp_path: Path
) -> None:
    upstream = await MockUpstream().start()
    shared = {
        "store": postgres_url,
        "redis": redis_url,
        "upstream": upstream.url,
        "prefix": f"{tmp_path.name}:",
    }
    gateways = await asyncio.gather(
        *(gateway(tmp_path / name, **shared) for name in ("one", "two")), return_exceptions=True
    )
    try:
        (_, _, one_admin), (_, _, two_admin) = (one for one in gateways if not isinstance(one, BaseException))
        urls = [one[1] for one in gateways if not isinstance(one, BaseException)]
        async with httpx.AsyncClient(timeout=PATIENCE_S) as admin:

            async def ask_admin(name: str, method: str, path: str) -> dict[str, Any]:
                key = (tmp_path / name / "state" / "admin-key").read_text().strip()
                url = {"one": one_admin, "two": two_admin}[name]
                body = {"name": "app"} if path == "/admin/keys" else {}
                headers = {"authorization": f"Bearer {key}"}
                answer = await admin.request(method, url + path, json=body, headers=headers)
                assert answer.status_code in (200, 201), answer.text
                found: dict[str, Any] = answer.json()
                return found

            async def all_know() -> bool:
                """Each of the four workers has the store's newest version."""
                version = await _policy_version(postgres_url)
                states = [
                    (await ask_admin(name, "GET", "/admin/upstreams"))["data"] for name in ("one", "two")
                ]
                workers = [worker for state in states for worker in state["workers"].values()]
                known = [worker["policy"]["policy_version"] for worker in workers]
                return known == [version] * 2 * WORKERS

            async def statuses() -> set[int]:
                """Over many separate connections, so that each worker answers some."""
                asked = [_ask(url, made["secret"]) for url in urls for _ in range(6 * WORKERS)]
                return set(await asyncio.gather(*asked))

            made = await ask_admin("one", "POST", "/admin/keys")
            await until(all_know)
            assert await statuses() == {200}
            reached = len(upstream.books)
            await ask_admin("two", "POST", f"/admin/keys/{made['id']}/revoke")
            print("seconds until every worker knew:", await until(all_know))
            assert await statuses() == {401}
            assert len(upstream.books) == reached
    finally:
        for one in gateways:
            if not isinstance(one, BaseException):
                one[0].terminate()
                await one[0].wait()
        await upstream.stop()


async def _policy_version(url: str) -> int:
    connection = await asyncpg.connect(url)
    try:
        return int(await connection.fetchval("SELECT version FROM ridgeline_policy"))
    finally:
        await connection.close()


async def _ask(url: str, secret: str) -> int:
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]})
    head = [
        "POST /v1/chat/completions HTTP/1.1",
        f"host: {host}",
        f"authorization: Bearer {secret}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
    ]
    async with asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write("\r\n".join([*head, "", body]).encode())
        answer = await reader.read()
        writer.close()
    status = int(answer.split(b" ", 2)[1])
    assert status == 200 or b"revoked_api_key" in answer, answer
    return status
