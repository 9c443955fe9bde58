"""The router before real servers: one is killed or stopped under streams, and no stream notices."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from ridgeline.fleet.messages import ModelEntry, ReplicaEntry
from ridgeline.fleet.router.config import FleetTuning
from ridgeline.fleet.router.fleet_router import FleetRouter
from ridgeline.fleet.router.process import control_origin
from ridgeline.fleet.router.prompt_view import prompt_view
from tests.conftest import LiveServer, await_ready, start_server
from tests.fleet.router.conftest import ask, request, until
from tests.fleet.router.controller_socket import ControllerSocket
from tests.fleet.router.test_survival import is_idle
from tests.patience import PATIENCE_S

MODEL = "smollm2-135m"
STREAMS = 8
PROMPTS = [f"Write a long story about the number {n} and a lighthouse." for n in range(STREAMS)]


def chat(prompt: str, tokens: int = 32):
    fields = {
        "model": MODEL,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": tokens,
        "ignore_eos": True,
    }
    return request(stream=True, fields=fields)


def text_of(body: bytes) -> str:
    assert body.endswith(b"data: [DONE]\n\n"), body[-300:]
    events = [msgspec.json.decode(line[6:]) for line in body.split(b"\n") if line.startswith(b"data: {")]
    ids = {event["id"] for event in events}
    assert len(ids) == 1, ids
    deltas = (choice["delta"] for event in events for choice in event["choices"])
    return "".join(delta.get("content") or "" for delta in deltas)


class Pair:
    """A router before two servers."""

    def __init__(self, router: FleetRouter, servers: list[LiveServer]) -> None:
        self.router, self.servers = router, servers

    async def texts(self) -> list[str]:
        return [text_of(body) for body in await asyncio.gather(*(ask(self.router, chat(p)) for p in PROMPTS))]

    def running(self, number: int) -> int:
        return len(self.router.replicas[f"r{number}"].running)

    async def under_way(self) -> None:
        """Until each server answers streams that have some tokens."""
        book, before = self.router.books[MODEL], self.router.books[MODEL].output_tokens
        await until(lambda: book.output_tokens - before >= 3 * STREAMS, "tokens of the streams")


@pytest.fixture
async def pair(smollm2_path: Path, tmp_path: Path) -> AsyncIterator[Pair]:
    async with serving(tmp_path, "--kv-tokens", "8192", "--deterministic", "--max-running", "8") as made:
        yield made


@asynccontextmanager
async def serving(tmp_path: Path, *flags: str, progress_s: float = 4.0) -> AsyncIterator[Pair]:
    servers = [start_server(tmp_path / f"server-{n}.log", *flags) for n in range(2)]
    controller = await ControllerSocket(tmp_path / "controller.sock", ModelEntry(MODEL)).start()
    router = FleetRouter(
        control_origin(controller.path),
        tuning=FleetTuning(progress_s=progress_s, longest_step_s=10 * PATIENCE_S),
    )
    try:
        for server in servers:
            await asyncio.to_thread(await_ready, server)
        entries = [
            ReplicaEntry(f"r{n}", MODEL, server.base_url, "ready", "", "v1")
            for n, server in enumerate(servers)
        ]
        controller.set(*entries)
        router.start()
        await until(lambda: len(router.replicas) == 2, "the table")
        await until(lambda: all(one.load for one in router.replicas.values()), "the feeds")
        yield Pair(router, servers)
    finally:
        await router.stop()
        await controller.stop()
        for server in servers:
            if server.process.poll() is None:
                os.kill(server.pid, signal.SIGCONT)
                server.process.kill()
            server.process.wait()


@pytest.mark.slow
async def test_kill_9_of_a_replica_under_streams_loses_none_and_changes_no_text(pair: Pair) -> None:
    calm = await pair.texts()
    disturbed = asyncio.create_task(pair.texts())
    await pair.under_way()
    moved = pair.running(0)
    pair.servers[0].process.kill()
    assert await disturbed == calm
    book = pair.router.books[MODEL]
    assert book.outcomes == {"ok": 2 * STREAMS}
    assert sum(book.moves.values()) >= min(moved, 1)
    assert is_idle(pair.router)


@pytest.mark.slow
async def test_sigstop_of_a_replica_ejects_it_and_its_late_tokens_are_fenced(pair: Pair) -> None:
    calm = await pair.texts()
    disturbed = asyncio.create_task(pair.texts())
    await pair.under_way()
    os.kill(pair.servers[0].pid, signal.SIGSTOP)
    stopped = pair.running(0)
    texts = await disturbed
    os.kill(pair.servers[0].pid, signal.SIGCONT)
    assert texts == calm
    if stopped:
        assert pair.router.books[MODEL].moves["no_progress"] == stopped
    await until(lambda: not pair.router.replicas["r0"].is_lost, "its return")
    assert await pair.texts() == calm
    assert is_idle(pair.router)


@pytest.mark.slow
async def test_a_restarted_router_rebuilds_its_index_from_snapshots(pair: Pair, tmp_path: Path) -> None:
    asked = chat("An essay about rivers. " * 60, 4)
    await ask(pair.router, asked)
    blocks = prompt_view(asked.fields, MODEL, ModelEntry(MODEL), "", 1).blocks
    assert len(blocks) > 3
    other = FleetRouter(control_origin(tmp_path / "controller.sock"))
    other.start()
    try:
        # Only a replica's own word counts here: this router has routed nothing.
        await until(lambda: max(other.prefixes.matches(blocks, 0.0).values(), default=0) > 2, "the index")
    finally:
        await other.stop()


def engine_of(server: LiveServer) -> int:
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == server.pid and b"engine_loop" in (folder / "cmdline").read_bytes():
                return int(folder.name)
    raise AssertionError("the server has no engine")


@pytest.mark.slow
async def test_one_long_step_is_no_standstill_and_a_stopped_engine_is(
    smollm2_path: Path, tmp_path: Path
) -> None:
    flags = ("--kv-tokens", "16384", "--step-tokens", "8192", "--prefill-chunk", "8192", "--deterministic")
    async with serving(tmp_path, *flags, progress_s=1.0) as pair:
        replicas = pair.router.replicas
        longest = 0.0
        long = [chat(f"{number} " + "river " * 1500, 4) for number in range(2)]
        asked = asyncio.gather(*(ask(pair.router, one) for one in long))
        while not asked.done():
            longest = max(longest, *(one.load.step_s for one in replicas.values() if one.load))
            await asyncio.sleep(0.02)
        assert all(text_of(body) for body in await asked)
        assert [one.ejections for one in replicas.values()] == [0, 0]
        # Under the same load, an engine that is stopped in the middle of its step.
        engine = engine_of(pair.servers[0])
        disturbed = asyncio.gather(*(ask(pair.router, chat(f"{n} " + "sea " * 1500, 4)) for n in range(2)))
        await until(lambda: pair.running(0), "a request at the first replica")
        os.kill(engine, signal.SIGSTOP)
        try:
            await until(lambda: replicas["r0"].ejections or not pair.running(0), "its ejection")
            assert all(text_of(body) for body in await disturbed)
        finally:
            os.kill(engine, signal.SIGCONT)
        assert is_idle(pair.router)
    if longest <= 1.0:
        pytest.skip(f"this machine computes 1500 tokens in {longest:.1f} s: no step was long")
