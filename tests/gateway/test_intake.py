"""What a request must pass before its body is read, and how much of bodies a worker holds at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ridgeline.gateway.objects import uploads
from ridgeline.gateway.objects.spool import remove_stale_uploads, uploads_path
from ridgeline.gateway.offload.offload import LARGE
from ridgeline.gateway.process.assembly import Assembly
from ridgeline.gateway.tenants.keys import Limits
from tests.gateway.stage import CHAT, Staged, asking, staged
from tests.gateway.test_trust import always, scripted
from tests.gateway.waiting import until
from tests.patience import PATIENCE_S

MEGABYTE = 1 << 20


@contextlib.asynccontextmanager
async def upload(
    stage: Staged, length: int | None, path: str = CHAT, secret: str = ""
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A request whose head is sent and whose body is not. length None: a body in chunks."""
    base = stage.http.base_url
    reader, writer = await asyncio.open_connection(base.host, base.port)
    framing = f"content-length: {length}" if length is not None else "transfer-encoding: chunked"
    writer.write(
        f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {secret or stage.secret}\r\n"
        f"content-type: application/json\r\n{framing}\r\n\r\n".encode()
    )
    try:
        yield reader, writer
    finally:
        writer.close()


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], str]:
    """Status, headers and error code, without a byte of the body having been sent."""
    async with asyncio.timeout(PATIENCE_S):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        lines = head.splitlines()
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
        body = await reader.readexactly(int(headers["content-length"]))
    return int(lines[0].split()[1]), headers, json.loads(body)["error"]["code"]


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        (Limits(requests_per_minute=1), "rate_limit_exceeded"),
        (Limits(tokens_per_minute=20), "rate_limit_exceeded"),
        (Limits(daily_usd=0.00005), "budget_exceeded"),
    ],
)
async def test_a_key_that_has_nothing_left_is_refused_before_its_body_is_read(
    tmp_path: Path, limits: Limits, code: str
) -> None:
    async with staged(tmp_path) as stage:
        _, secret = await stage.new_key(limits=limits)
        async with stage.client(secret) as http:
            first = {"model": "mock_out40", "prompt": "", "max_tokens": 0}
            assert (await http.post("/v1/completions", json=first)).status_code == 200
        await stage.rows(1)
        async with upload(stage, 4 * MEGABYTE, secret=secret) as (reader, _):
            status, headers, told = await answer(reader)
        assert (status, told) == (429, code)
        assert int(headers["retry-after"]) > 0


async def test_a_request_that_waits_for_its_body_counts_as_one_under_way(tmp_path: Path) -> None:
    async with staged(tmp_path, key={"limits": Limits(concurrent=1)}) as stage:
        async with upload(stage, 100):
            while not stage.parts.deadlines.live:
                await asyncio.sleep(0.005)
            refused = await stage.http.post(CHAT, json=asking())
            assert refused.json()["error"]["code"] == "concurrency_limit_exceeded"
        while stage.parts.deadlines.live:
            await asyncio.sleep(0.005)
        assert (await stage.http.post(CHAT, json=asking())).status_code == 200


async def test_bodies_under_way_take_no_more_memory_than_a_key_may_have(tmp_path: Path) -> None:
    settings = {"gateway": {"max_held_bytes": 10 * MEGABYTE, "max_held_bytes_per_key": 3 * MEGABYTE}}
    async with staged(tmp_path, settings) as stage:
        held = stage.parts.body_bytes
        async with upload(stage, 2 * MEGABYTE) as (_, writer):
            writer.write(b" " * (2 * MEGABYTE - 1))
            while held.total < 2 * MEGABYTE - 1:
                await asyncio.sleep(0.005)
            async with upload(stage, 2 * MEGABYTE) as (reader, _):  # announced: refused at once
                status, headers, code = await answer(reader)
                assert (status, code, headers["retry-after"]) == (429, "too_many_bytes", "1")
            async with upload(stage, None) as (reader, second):  # not announced: refused when it is too much
                for _ in range(32):
                    second.write(b"10000\r\n" + b" " * 65536 + b"\r\n")
                assert (await answer(reader))[::2] == (429, "too_many_bytes")
            assert (await stage.http.post(CHAT, json=asking())).status_code == 200
            await until(lambda: held.total == 2 * MEGABYTE - 1)
        await until(lambda: held.total == 0)


async def test_bodies_of_all_keys_together_are_bounded_too(tmp_path: Path) -> None:
    async with staged(tmp_path, {"gateway": {"max_held_bytes": 100_000}}) as stage:
        async with upload(stage, 200_000) as (reader, _):
            status, headers, code = await answer(reader)
        assert (status, code, headers["retry-after"]) == (503, "too_many_bytes", "1")
        assert (await stage.http.post(CHAT, json=asking())).status_code == 200


def form(purpose: str, content: bytes) -> tuple[str, bytes]:
    head = b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\n%b\r\n--x\r\n' % purpose.encode()
    file = b'content-disposition: form-data; name="file"; filename="f"\r\n\r\n%b\r\n--x--\r\n' % content
    return "multipart/form-data; boundary=x", head + file


async def test_an_upload_lies_on_disk_until_it_is_with_the_upstream(tmp_path: Path) -> None:
    content = bytes(range(256)) * 12_000
    kind, body = form("user_data", content)
    async with scripted(tmp_path, always(200, {"id": "file-1"})) as (stage, upstream):
        spools, memory = stage.parts.spools, stage.parts.body_bytes
        seen: list[int] = []

        async def pieces() -> AsyncIterator[bytes]:
            yield body[:2_000_000]
            while spools.held.total < 2_000_000:
                await asyncio.sleep(0.005)
            seen.append(memory.total)
            yield body[2_000_000:]

        made = await stage.http.post("/v1/files", content=pieces(), headers={"content-type": kind})
        assert made.status_code == 200, made.text
        assert seen == [0]
        assert content in upstream.asked[0].body
        await until(lambda: spools.held.total == 0)
        uploads = tmp_path / "state" / "uploads"  # a thread removes the file after its bytes are released
        await until(lambda: not any(path.is_file() for path in uploads.rglob("*")))


async def test_a_worker_that_starts_keeps_the_uploads_of_the_worker_that_it_replaces(tmp_path: Path) -> None:
    said = {"model": "mock", "messages": [{"role": "user", "content": "x" * 2 * LARGE}]}
    asked = {"custom_id": "c", "method": "POST", "url": CHAT, "body": said}
    kind, body = form("batch", json.dumps(asked).encode())
    async with scripted(tmp_path, always(200, {"id": "file-1"})) as (stage, _):

        async def pieces() -> AsyncIterator[bytes]:
            yield body[:LARGE]
            while not stage.parts.spools.held.total:
                await asyncio.sleep(0.005)
            successor = await Assembly.make(stage.parts.settings, 0)  # of the same number, as in a reload
            await successor.close()
            yield body[LARGE:]

        made = await stage.http.post("/v1/files", content=pieces(), headers={"content-type": kind})
        assert made.status_code == 200, made.text


def test_folders_of_workers_that_have_ended_are_removed_and_those_of_running_ones_are_kept(
    tmp_path: Path,
) -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    running = uploads_path(tmp_path, f"0-{os.getpid()}")
    for folder in (running, uploads_path(tmp_path, f"1-{ended.pid}"), uploads_path(tmp_path, "0")):
        folder.mkdir(parents=True)
        (folder / "upload").touch()
    remove_stale_uploads(tmp_path)
    assert list((tmp_path / "uploads").iterdir()) == [running]


async def test_uploads_take_no_more_disk_than_a_key_may_have(tmp_path: Path) -> None:
    async with staged(tmp_path, {"gateway": {"max_spooled_bytes_per_key": 100_000}}) as stage:
        kind, body = form("user_data", b"x" * 200_000)
        refused = await stage.http.post("/v1/files", content=body, headers={"content-type": kind})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_bytes")
        assert "max_spooled_bytes_per_key" in refused.json()["error"]["message"]


async def test_a_large_batch_file_is_checked_in_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def line(number: int, model: str = "mock") -> bytes:
        said = {"model": model, "messages": [{"role": "user", "content": f"{number}@example.com " * 3}]}
        asked = {"custom_id": f"c{number}", "method": "POST", "url": CHAT, "body": said}
        return json.dumps(asked).encode()

    async def never(*arguments: object) -> None:
        raise AssertionError("read on the event loop")

    monkeypatch.setattr(uploads, "read_batch_file", never)
    lines = [line(number) for number in range(1000)]
    async with scripted(tmp_path, always(200, {"id": "file-1"}), guards=[{}]) as (stage, upstream):
        kind, body = form("batch", b"\n".join(lines))
        made = await stage.http.post("/v1/files", content=body, headers={"content-type": kind})
        assert made.status_code == 200, made.text
        sent = upstream.asked[0].body
        kept = [json.loads(text) for text in sent.splitlines() if text.startswith(b"{")]
        assert [one["custom_id"] for one in kept] == [f"c{number}" for number in range(1000)]
        assert kept[7]["body"]["messages"][0]["content"] == "<EMAIL_1> <EMAIL_1> <EMAIL_1> "
        kind, body = form("batch", b"\n".join([*lines, line(1000, "other")]))
        refused = await stage.http.post("/v1/files", content=body, headers={"content-type": kind})
        assert refused.status_code == 400
        assert "line 1001: model 'other'" in refused.json()["error"]["message"]
