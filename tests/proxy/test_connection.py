"""What a connection makes of bytes: any split is the same answer, and no bytes do more than fail one."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import cast

from hypothesis import example, given, settings
from hypothesis import strategies as st

from ridgeline.proxy.answer import UpstreamAnswer
from ridgeline.proxy.connection import Connection
from ridgeline.proxy.errors import RequestBroken
from ridgeline.proxy.origin import read_url
from ridgeline.proxy.pool import ClientLimits, ConnectionPool

LIMITS = ClientLimits(head_bytes=2000, head_lines=20, body_bytes=1000)
ORIGIN = read_url("http://127.0.0.1:1")


class Wire(asyncio.Transport):
    """Where the bytes come from is the test."""

    closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def is_closing(self) -> bool:
        return self.closed

    def abort(self) -> None:
        self.closed = True

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class QuietPool(ConnectionPool[Connection]):
    def started(self, connection: Connection) -> None:
        """No deadlines: no loop runs here."""
        self.live.add(connection)


def outcome(pieces: Sequence[bytes]) -> tuple[object, ...]:
    """Of an answer that arrives in these pieces, and then the connection ends."""
    pool = QuietPool(LIMITS)
    connection = Connection(pool, ORIGIN)
    wire = Wire()
    connection.connection_made(wire)
    answer = UpstreamAnswer(1, 1, 1e12, False, False)
    connection.send(answer, b"", b"")
    for piece in pieces:
        if not wire.closed and piece:
            connection.data_received(piece)
    kept = pool.idle_connections(ORIGIN)
    assert not (kept and wire.closed)
    connection.connection_lost(None)
    assert not pool.live
    assert pool.idle_connections(ORIGIN) == 0
    error = cast("RequestBroken | None", answer._error)
    body = answer.take()
    if error is not None:
        return (answer.status, error.cause)
    assert answer._is_complete
    assert len(body) <= LIMITS.body_bytes
    return (answer.status, tuple(answer.headers), body, kept)


def split(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    places = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    return [data[start:end] for start, end in itertools.pairwise(places)]


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
ANSWERS = [
    b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nx-a: b\r\n\r\nhello",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 201 Created\r\ncontent-length: 2\r\n\r\nok",
    CHUNKED + b"5\r\nhello\r\n6;x=y\r\n world\r\n0\r\n\r\n",
    CHUNKED + b"3\r\nabc\r\n0\r\nx-trailer: t\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nto the end",
    b"HTTP/1.0 404 Not Found\r\ncontent-length: 2\r\n\r\nno",
    b"HTTP/1.1 204 No Content\r\n\r\n",
    b"HTTP/1.1 429 Slow\r\nretry-after: 3\r\ncontent-length: 0\r\n\r\n",
]


@given(st.sampled_from(ANSWERS), st.lists(st.integers(0, 150), max_size=12))
def test_any_split_of_an_answer_is_the_same_answer(raw: bytes, cuts: list[int]) -> None:
    assert outcome(split(raw, cuts)) == outcome([raw])
    assert outcome([raw[i : i + 1] for i in range(len(raw))]) == outcome([raw])


@settings(max_examples=300)
@given(
    st.sampled_from(ANSWERS),
    st.lists(st.tuples(st.integers(0, 120), st.binary(max_size=8)), min_size=1, max_size=4),
    st.lists(st.integers(0, 150), max_size=6),
)
@example(ANSWERS[0], [(60, b"HTTP/1.1 200 OK\r\n")], [])
def test_spoilt_answers_fail_alone(raw: bytes, changes: list[tuple[int, bytes]], cuts: list[int]) -> None:
    for place, put in changes:
        raw = raw[:place] + put + raw[place + len(put) :]
    outcome(split(raw, cuts))


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=6))
def test_noise_is_never_taken_for_an_answer(noise: bytes, cuts: list[int]) -> None:
    if not noise.startswith(b"HTTP/"):
        assert outcome(split(noise, cuts))[0] == 0


@given(st.integers(0, 1500), st.integers(0, 3000), st.integers(0, 40))
def test_what_is_too_large_is_refused_and_the_rest_is_not(body: int, header: int, lines: int) -> None:
    head = b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * lines + b"h: " + b"x" * header + b"\r\n"
    raw = head + b"content-length: %d\r\n\r\n" % body + b"y" * body
    got = outcome([raw])
    if lines + 2 > LIMITS.head_lines:
        assert got == (0, "head_too_large")
    elif body > LIMITS.body_bytes:
        assert got == (0, "body_too_large")
    elif body:
        assert got[0] == 200
        assert got[2] == b"y" * body
