"""GET /replica/feed of a real engine: names that are cached, evictions, reconnecting, load."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from ridgeline.engine.client.client import AsyncClient
from ridgeline.replica.messages import (
    FEED_PATH,
    FeedLine,
    Load,
    Removed,
    Snapshot,
    Started,
    Stored,
    decode_line,
)
from ridgeline.replica.prompt_blocks import FIELDS, prefix_root, prompt_blocks
from ridgeline.server.app import build_app
from ridgeline.server.config import ServerConfig
from ridgeline.server.process.main import http_server
from ridgeline.server.served_models import Model
from ridgeline.telemetry.metrics import ServerMetrics
from tests.conftest import await_ready, start_server
from tests.patience import PATIENCE_S
from tests.server.conftest import VectorServer
from tests.server.scripted_client import ScriptedSupervisor
from tests.server.stage import CHAT, Stage

LIMIT_S = PATIENCE_S


class Reader:
    """One connection to the feed, and what it has told."""

    def __init__(self) -> None:
        self.lines: list[FeedLine] = []
        self.held: set[int] = set()
        self.seq = -1

    def add(self, line: FeedLine) -> None:
        self.lines.append(line)
        match line:
            case Snapshot(seq, blocks):
                self.seq, self.held = seq, set(blocks)
            case Stored(seq, blocks):
                assert seq == self.seq + 1
                self.seq, self.held = seq, self.held | set(blocks)
            case Removed(seq, blocks):
                assert seq == self.seq + 1
                self.seq, self.held = seq, self.held - set(blocks)

    @property
    def load(self) -> Load | None:
        return next((line for line in reversed(self.lines) if isinstance(line, Load)), None)

    def first(self, kind: type[Any]) -> Any:
        return next(line for line in self.lines if isinstance(line, kind))


@contextlib.asynccontextmanager
async def reading(
    http: httpx.AsyncClient, query: str = "", reader: Reader | None = None
) -> AsyncIterator[Reader]:
    reader = reader or Reader()

    async def read() -> None:
        async with http.stream("GET", FEED_PATH + query) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                reader.add(decode_line(line.encode()))

    task = asyncio.create_task(read())
    try:
        yield reader
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
async def http(smollm2_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A server on a loopback port, over an engine whose cache holds few prompts."""
    config = ServerConfig(api_keys=("secret",))
    async with await AsyncClient.start("smollm2-135m", kv_tokens=1024, max_context=1024) as client:
        model = Model(("m",), ScriptedSupervisor(client), ServerMetrics("m"))  # type: ignore[arg-type]
        with contextlib.closing(socket.socket()) as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            server = http_server(build_app(config, [model]), config)
            task = asyncio.create_task(server.serve(sockets=[listener]))
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            headers = {"authorization": "Bearer secret"}
            try:
                async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S, headers=headers) as http:
                    yield http
            finally:
                server.should_exit = server.force_exit = True
                await task


def question(topic: str, sentences: int = 24) -> dict[str, Any]:
    text = " ".join(f"Sentence {number} of this text is about {topic}." for number in range(sentences))
    return {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 2, "temperature": 0}


def names_of(body: dict[str, Any]) -> list[int]:
    """As a router makes them from the bytes that it forwards."""
    fields = msgspec.json.decode(msgspec.json.encode(body), type=dict[str, msgspec.Raw])
    own = {name: bytes(raw) for name, raw in fields.items() if name in FIELDS}
    return prompt_blocks(own, prefix_root("m"))


async def ask(http: httpx.AsyncClient, body: dict[str, Any]) -> None:
    headers = {"content-type": "application/json"}
    answer = await http.post(CHAT, content=msgspec.json.encode(body), headers=headers)
    assert answer.status_code == 200, answer.text


async def test_the_feed_tells_what_the_cache_holds(http: httpx.AsyncClient) -> None:
    first, names = question("rivers"), names_of(question("rivers"))
    assert len(names) >= 4
    async with reading(http) as reader:
        await until(lambda: reader.load)
        assert isinstance(reader.lines[0], Started)
        assert reader.lines[1] == Snapshot(reader.seq, ())
        await ask(http, first)
        await until(lambda: reader.held.issuperset(names))
        assert reader.held == set(names)

        # A second reader gets the same from its snapshot.
        async with reading(http) as second:
            await until(lambda: second.load)
            assert second.held == reader.held

        # The load has settled, and its counters agree.
        await until(lambda: reader.load is not None and reader.load.ended == 1 and reader.load.prompt_tokens)
        load = reader.load
        assert load is not None
        assert (load.state, load.running, load.waiting, load.queued_tokens) == ("ready", 0, 0, 0)
        assert (load.accepted, load.output_tokens) == (1, 2)
        assert load.steps >= 2
        assert load.kv_blocks_cached > 0

        # Prompts on other subjects evict it, and the feed says so.
        for topic in ("mountains", "cities", "lakes", "forests"):
            await ask(http, question(topic))
        await until(lambda: reader.held.isdisjoint(names))
        assert reader.held.issuperset(names_of(question("forests")))

        # The same prompt with a salt shares no KV.
        await ask(http, {**question("forests"), "cache_salt": "tenant"})
        root = prefix_root("m", "", "tenant")
        body = msgspec.json.decode(msgspec.json.encode(question("forests")), type=dict[str, msgspec.Raw])
        salted = prompt_blocks({"messages": bytes(body["messages"])}, root)
        await until(lambda: reader.held.issuperset(salted))
    started = reader.first(Started)
    assert (started.model, started.names, started.block_size, started.kv_blocks) == ("m", ("m",), 16, 64)
    assert started.weight_bytes > 5e7
    assert {"import", "plan", "weights", "warm-up"} <= started.segments.keys()


async def test_a_reader_that_reconnects_gets_what_it_missed_or_a_snapshot(http: httpx.AsyncClient) -> None:
    async with reading(http) as reader:
        await until(lambda: reader.load)
        await ask(http, question("rivers"))
        await until(lambda: len(reader.held) == len(names_of(question("rivers"))))
    epoch, seq, held = reader.first(Started).epoch, reader.seq, set(reader.held)
    await ask(http, question("lakes"))  # while no reader is connected

    again = Reader()
    again.seq, again.held = seq, held
    async with reading(http, f"?epoch={epoch}&after={seq}", again):
        await until(lambda: again.held.issuperset(names_of(question("lakes"))) and again.load)
    assert not any(isinstance(line, Snapshot) for line in again.lines)

    for query in (f"?epoch=other&after={seq}", f"?epoch={epoch}&after=999999", ""):
        async with reading(http, query) as fresh:
            await until(lambda fresh=fresh: fresh.load)
        assert isinstance(fresh.lines[1], Snapshot)
        assert fresh.held == again.held


async def test_the_feed_needs_the_key_and_a_known_model() -> None:
    stage = Stage(config=ServerConfig(api_keys=("secret",)))
    async with stage.http(headers={"authorization": "Bearer secret"}) as http:
        assert (await http.get(FEED_PATH, headers={"authorization": "Bearer wrong"})).status_code == 401
        assert (await http.get(FEED_PATH + "?model=other")).status_code == 404
        assert (await http.get(FEED_PATH + "?after=x")).status_code == 400
        stage.supervisor.client = None
        assert (await http.get(FEED_PATH)).status_code == 503


def test_an_embedding_engine_has_a_feed_without_prefixes(vector_server: VectorServer) -> None:
    lines: list[FeedLine] = []
    url = f"{vector_server.base_url}{FEED_PATH}?model=all-minilm-l6-v2"
    with httpx.stream("GET", url, timeout=LIMIT_S) as answer:
        for line in answer.iter_lines():
            lines.append(decode_line(line.encode()))
            if isinstance(lines[-1], Load):
                break
    started, snapshot, load = lines
    assert isinstance(started, Started)
    assert (started.model, started.kv_blocks, started.block_size) == ("all-minilm-l6-v2", 0, 0)
    assert {"process", "import", "weights"} <= started.segments.keys()
    assert isinstance(snapshot, Snapshot)
    assert snapshot.blocks == ()
    assert isinstance(load, Load)
    assert load.state == "ready"
    assert load.accepted == load.ended


@pytest.mark.slow
def test_a_server_that_drains_says_so_first_and_finishes_its_streams(tmp_path: Path) -> None:
    server = start_server(tmp_path / "server.log")
    try:
        await_ready(server)
        states, streamed = list[str](), list[str]()
        feed = threading.Thread(target=_states, args=(server.base_url, states))
        stream = threading.Thread(target=_stream, args=(server.base_url, streamed))
        feed.start()
        stream.start()
        while len(streamed) < 3 or not states:
            assert server.process.poll() is None
            time.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        while httpx.get(f"{server.base_url}/ready").status_code == 200:
            time.sleep(0.01)
        stream.join(LIMIT_S)
        feed.join(LIMIT_S)
        assert server.process.wait(LIMIT_S) == 0
        assert streamed[-1] == "data: [DONE]"
        assert states[0] == "ready"
        assert states[-1] == "draining"
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


def _states(base_url: str, states: list[str]) -> None:
    with httpx.stream("GET", base_url + FEED_PATH, timeout=LIMIT_S) as answer:
        for line in answer.iter_lines():
            told = decode_line(line.encode())
            if isinstance(told, Load):
                states.append(told.state)


def _stream(base_url: str, streamed: list[str]) -> None:
    messages = [{"role": "user", "content": "Count to one hundred."}]
    body = {"messages": messages, "max_tokens": 120, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", base_url + CHAT, json=body, timeout=LIMIT_S) as answer:
        for line in answer.iter_lines():
            streamed += [line] if line else []


async def test_at_light_load_a_request_is_told_before_the_next_regular_line(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other routers would take this replica for an idle one until then."""
    monkeypatch.setattr("ridgeline.replica.load_pace.LOAD_EVERY_S", 3600.0)
    async with reading(http) as reader:
        await until(lambda: reader.load is not None)
        before = reader.load
        assert before is not None
        answer = await http.post("/v1/completions", json={"model": "m", "prompt": "Hello", "max_tokens": 4})
        assert answer.status_code == 200
        await until(lambda: reader.load is not None and reader.load.accepted == before.accepted + 1)
