"""The client and the engine's socket together: a test plays the engine's loop, frame by frame."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import socket
import time
from contextlib import aclosing
from pathlib import Path

import msgspec
import pytest

from ridgeline.engine.client.client import AsyncClient
from ridgeline.engine.errors import EngineDied
from ridgeline.engine.link.messages import (
    FRAME_HEADER,
    Abort,
    Hello,
    Outputs,
    Ping,
    Pong,
    StepDump,
    Submit,
    frame,
)
from ridgeline.engine.link.transport import Closed, EngineSocket, Opened
from ridgeline.engine.schedule.request import FinishReason, Request, SamplingParams
from ridgeline.engine.schedule.step import SeqDelta
from ridgeline.models.text.tokenizer import Tokenizer
from ridgeline.telemetry.stats import EngineStats, StepRecord
from tests.patience import PATIENCE_S

HELLO = Hello(1, "played", "none", 128, 8, 4096, 49152, 16, {}, {}, {})
GREEDY = SamplingParams(temperature=0.0)
STEP = StepRecord(1, 0.5, 10, 1, 100, 0, 0, 0.25, 0.001)


class PlayedEngine:
    """The engine's side of the socket, with the test in place of the loop."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.socket = EngineSocket(path)

    async def received(self):
        return await asyncio.to_thread(self.socket.arrivals.get, timeout=PATIENCE_S)

    async def next(self, kind):
        number, message = await self.received()
        assert isinstance(message, kind), message
        return number, message

    async def accept(self) -> int:
        number, _ = await self.next(Opened)
        self.socket.send(number, HELLO)
        return number

    def say(self, number: int, *deltas: SeqDelta) -> None:
        self.socket.send(number, Outputs(list(deltas), EngineStats(last_step_end=1.0)))


@pytest.fixture
def engine(tmp_path) -> PlayedEngine:
    return PlayedEngine(tmp_path / "engine.sock")


@pytest.fixture(scope="module")
def tokenizer(smollm2_path) -> Tokenizer:
    return Tokenizer.load(smollm2_path)


async def connected(engine: PlayedEngine, tokenizer: Tokenizer) -> tuple[AsyncClient, int]:
    connecting = asyncio.create_task(AsyncClient.connect(engine.path, tokenizer))
    number = await engine.accept()
    return await connecting, number


def raw_connection(engine: PlayedEngine) -> socket.socket:
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    raw.connect(str(engine.path))
    return raw


@contextlib.contextmanager
def no_file_may_be_opened():
    """In this process, by the real limit: accept() fails with EMFILE."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    gc.collect()  # what earlier tests left would give back the numbers of its files meanwhile
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def texts(stream) -> list[str]:
    return [chunk.text async for chunk in stream]


async def test_an_id_used_again_after_an_abort_gets_nothing_of_the_aborted_request(engine, tokenizer):
    client, number = await connected(engine, tokenizer)
    async with aclosing(client.generate([1, 2], GREEDY, request_id="same")) as first:
        taking = asyncio.create_task(anext(first))
        _, submitted = await engine.next(Submit)
        engine.say(number, SeqDelta(submitted.request.request_id, 0, tokenizer.encode("old")))
        assert (await taking).text == "old"
    second = asyncio.create_task(texts(client.generate([1, 2], GREEDY, request_id="same")))
    await engine.next(Abort)
    _, resubmitted = await engine.next(Submit)
    old, new = submitted.request.request_id, resubmitted.request.request_id
    engine.say(number, SeqDelta(old, 0, tokenizer.encode(" stale")))  # was under way
    engine.say(number, SeqDelta(old, 0, finish_reason=FinishReason.ABORT))
    engine.say(number, SeqDelta(new, 0, tokenizer.encode("new"), finish_reason=FinishReason.LENGTH))
    assert await asyncio.wait_for(second, PATIENCE_S) == ["new"]
    assert client.open_requests == 0
    await client.close()


async def test_the_age_of_a_step_is_told_in_the_middle_of_it_and_is_no_sign_of_progress(engine, tokenizer):
    client, _ = await connected(engine, tokenizer)
    assert await client.step_age() == 0.0
    engine.socket.step_began = time.monotonic() - 30.0  # the loop is in a step and reads no message
    heard_at = client.heard_at
    async with asyncio.timeout(PATIENCE_S):
        assert await client.step_age() >= 30.0
    assert client.heard_at == heard_at
    assert engine.socket.arrivals.empty()
    await client.close()


async def test_closing_a_finished_stream_late_leaves_the_next_one_with_its_id_alone(engine, tokenizer):
    client, number = await connected(engine, tokenizer)
    finished = client.generate([1], GREEDY, request_id="same")
    taking = asyncio.create_task(anext(finished))
    _, submitted = await engine.next(Submit)
    engine.say(number, SeqDelta(submitted.request.request_id, 0, [5], finish_reason=FinishReason.LENGTH))
    assert (await taking).finish_reason is FinishReason.LENGTH
    second = asyncio.create_task(texts(client.generate([1], GREEDY, request_id="same")))
    _, resubmitted = await engine.next(Submit)
    await finished.aclose()
    ended = SeqDelta(resubmitted.request.request_id, 0, [5], finish_reason=FinishReason.LENGTH)
    engine.say(number, ended)
    assert len(await asyncio.wait_for(second, PATIENCE_S)) == 1
    await client.close()


async def test_what_is_no_message_ends_every_stream_with_an_error(engine, tokenizer):
    """A reader that continued after it would wait forever."""
    client, number = await connected(engine, tokenizer)
    stream = asyncio.create_task(texts(client.generate([1], GREEDY)))
    await engine.next(Submit)
    ping = asyncio.create_task(client.ping())
    await engine.next(Ping)
    engine.socket._connections[number].socket.send(FRAME_HEADER.pack(3) + b"\xc1\xc1\xc1")
    for waiting in (stream, ping):
        with pytest.raises(EngineDied, match="cannot read the engine's message"):
            await asyncio.wait_for(waiting, PATIENCE_S)
    assert client.closed.is_set()
    await engine.next(Closed)


async def test_streams_open_when_the_engine_is_stopped_are_told_so(engine, tokenizer):
    client, number = await connected(engine, tokenizer)
    stream = asyncio.create_task(texts(client.generate([1], GREEDY)))
    await engine.next(Submit)
    client.stop_engine()
    engine.socket._connections[number].socket.shutdown(socket.SHUT_RDWR)
    with pytest.raises(EngineDied, match="stopped before"):
        await asyncio.wait_for(stream, PATIENCE_S)
    with pytest.raises(EngineDied):
        await anext(client.generate([1], GREEDY))
    assert client.open_requests == 0


async def test_an_engine_that_leaves_before_its_hello_leaves_no_socket_open(engine, tokenizer):
    connecting = asyncio.create_task(AsyncClient.connect(engine.path, tokenizer))
    number, _ = await engine.next(Opened)
    engine.say(number)  # anything but a Hello
    with pytest.raises(EngineDied, match="before its Hello"):
        await connecting
    await engine.next(Closed)


# ---- the engine's socket against fronts that break off or talk nonsense ----


def frame_with_params_nobody_may_have() -> bytes:
    body = msgspec.msgpack.decode(frame(Submit(Request("r", [1], GREEDY)))[FRAME_HEADER.size :])
    body["request"]["params"]["temperature"] = -1.0
    encoded = msgspec.msgpack.encode(body)
    return FRAME_HEADER.pack(len(encoded)) + encoded


@pytest.mark.parametrize(
    "nonsense",
    [
        frame_with_params_nobody_may_have(),
        FRAME_HEADER.pack(4) + b"\xc1\xc1\xc1\xc1",
        FRAME_HEADER.pack(2**32 - 1) + b"huge",
        FRAME_HEADER.pack(1000) + b"broken off",
        b"\x01",
    ],
    ids=["impossible params", "no msgpack", "huge", "half a body", "half a header"],
)
async def test_a_front_that_talks_nonsense_or_breaks_off_is_dropped_and_harms_no_other(
    engine, tokenizer, nonsense
):
    client, number = await connected(engine, tokenizer)
    raw = raw_connection(engine)
    other, _ = await engine.next(Opened)
    raw.sendall(nonsense)
    with contextlib.suppress(OSError):
        raw.shutdown(socket.SHUT_WR)
    assert await engine.next(Closed) == (other, Closed())
    assert raw.recv(1) == b""
    raw.close()
    ping = asyncio.create_task(client.ping())
    _, question = await engine.next(Ping)
    engine.socket.send(number, Pong(question.id, EngineStats(steps=7)))
    assert (await asyncio.wait_for(ping, PATIENCE_S)).steps == 7
    await client.close()


async def test_a_frame_sent_byte_by_byte_is_one_message(engine):
    raw = raw_connection(engine)
    number, _ = await engine.next(Opened)
    for byte in frame(Abort("r", 3)) + frame(Ping(4))[:5]:
        raw.sendall(bytes([byte]))
    assert await engine.next(Abort) == (number, Abort("r", 3))
    raw.sendall(frame(Ping(4))[5:])
    assert await engine.next(Ping) == (number, Ping(4))
    raw.close()


async def test_a_large_answer_reaches_a_front_that_reads_late(engine, tokenizer):
    """Larger than every buffer between them; the engine's loop does not wait for it."""
    client, number = await connected(engine, tokenizer)
    stream = client.generate([1], GREEDY)
    taking = asyncio.create_task(anext(stream))
    _, submitted = await engine.next(Submit)
    tokens = tokenizer.encode("word " * 400_000)
    engine.say(number, SeqDelta(submitted.request.request_id, 0, tokens, finish_reason=FinishReason.LENGTH))
    chunk = await asyncio.wait_for(taking, PATIENCE_S)
    assert chunk.tokens == tokens
    await client.close()


async def test_frames_said_while_an_earlier_one_is_half_sent_keep_their_order(engine):
    """The loop writes to the socket itself until it is full; from then on everything goes by the thread."""
    raw = raw_connection(engine)
    number, _ = await engine.next(Opened)
    said = [Pong(0, EngineStats()), StepDump(1, [STEP] * 100_000)]  # several megabytes
    said += [Pong(id, EngineStats(steps=id)) for id in range(2, 50)]
    for message in said:
        engine.socket.send(number, message)
    expected = b"".join(frame(message) for message in said)
    received = bytearray()
    while len(received) < len(expected):
        part = await asyncio.to_thread(raw.recv, 1 << 16)
        assert part, "closed early"
        received += part
    assert bytes(received) == expected
    raw.close()


async def test_a_front_that_is_gone_is_told_of_once_and_written_to_no_more(engine):
    raw = raw_connection(engine)
    number, _ = await engine.next(Opened)
    raw.close()
    for id in range(20):
        engine.socket.send(number, Pong(id, EngineStats()))  # never raises
    assert await engine.next(Closed) == (number, Closed())
    engine.socket.send(number, Pong(0, EngineStats()))


async def test_all_that_a_step_adds_comes_in_one_message(smollm2_path):
    """Eight requests at once, in a real engine: no more messages than steps, and each of many deltas: one for
    each request, or more where guesses were right."""
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    async with await AsyncClient.start(str(smollm2_path), kv_tokens=4096) as client:
        sizes: list[int] = []
        dispatch = client._dispatch

        def counting(message):
            if isinstance(message, Outputs):
                sizes.append(len(message.deltas))
            dispatch(message)

        client._dispatch = counting
        streams = [client.generate([5 + i] * 9, params) for i in range(8)]
        answers = await asyncio.gather(*(texts(stream) for stream in streams))
        stats = await client.ping()
    assert [len(answer) for answer in answers] == [24] * 8
    assert sum(sizes) == 8 * 24
    assert len(sizes) <= stats.steps
    assert max(sizes) >= 8


async def test_the_engine_accepts_connections_again_after_too_many_open_files(engine, tokenizer, caplog):
    served, number = await connected(engine, tokenizer)
    late = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with no_file_may_be_opened():
        late.connect(str(engine.path))  # into the backlog: the engine cannot take it out
        async with asyncio.timeout(PATIENCE_S):
            while not any("Too many open files" in record.message for record in caplog.records):
                await asyncio.sleep(0.01)
            pinging = asyncio.create_task(served.ping())  # the connections it has are served meanwhile
            while engine.socket.arrivals.empty():
                await asyncio.sleep(0.01)
    _, ping = await engine.next(Ping)
    engine.socket.send(number, Pong(ping.id, EngineStats()))
    await asyncio.wait_for(pinging, PATIENCE_S)
    await engine.next(Opened)
    late.close()
    await served.close()
