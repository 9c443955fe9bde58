"""An answer on its way to a client: as it comes, in order, and no faster than the client reads."""

from __future__ import annotations

import asyncio

import pytest

from ridgeline.proxy.answer import UpstreamAnswer
from ridgeline.proxy.errors import RequestBroken
from ridgeline.proxy.relay import relay


class Source:
    """The connection that the answer would arrive on."""

    is_read = True

    def pause(self) -> None:
        self.is_read = False

    def resume(self) -> None:
        self.is_read = True

    def drop(self) -> None:
        self.is_read = False


class Client:
    def __init__(self) -> None:
        self.is_full = False
        self.got: list[bytes] = []
        self.room = asyncio.Event()

    def write(self, data: bytes) -> None:
        assert not self.is_full
        self.got.append(data)

    async def send(self, data: bytes) -> None:
        await self.room.wait()
        self.got.append(data)


class Passing:
    """A relay under way."""

    def __init__(self, first: bytes = b"") -> None:
        self.source, self.client = Source(), Client()
        self.answer = UpstreamAnswer(1, 1, 1e12, False, True)
        self.answer.attach(self.source, 0.0)
        self.task = asyncio.ensure_future(
            relay(
                self.answer,
                first,
                lambda data: data.replace(b"-", b""),
                is_full=lambda: self.client.is_full,
                write=self.client.write,
                send=self.client.send,
            )
        )

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)


async def test_pieces_are_written_as_they_come_and_empty_ones_are_not() -> None:
    passing = Passing(first=b"a-")
    await passing.settle()
    passing.answer.feed(b"b")
    passing.answer.feed(b"-")
    assert passing.client.got == [b"a", b"b"]  # in the same turn of the loop
    passing.answer.complete()
    await passing.task


async def test_while_the_client_is_full_the_upstream_is_not_read() -> None:
    passing = Passing()
    await passing.settle()
    passing.client.is_full = True
    passing.answer.feed(b"a")
    passing.answer.feed(b"b")
    await passing.settle()
    assert not passing.source.is_read
    assert passing.client.got == []
    passing.client.is_full = False
    passing.answer.feed(b"c")  # was in the kernel's buffer: not before what is held
    passing.client.room.set()
    await passing.settle()
    assert passing.source.is_read
    passing.answer.feed(b"d")
    assert b"".join(passing.client.got) == b"abcd"
    passing.answer.complete()
    await passing.task


async def test_a_client_gets_what_came_before_the_answer_broke_off() -> None:
    passing = Passing()
    await passing.settle()
    passing.client.is_full = True
    passing.answer.feed(b"a")
    await passing.settle()
    passing.answer.fail("truncated")
    await passing.settle()
    passing.client.room.set()
    with pytest.raises(RequestBroken, match="middle of its answer"):
        await passing.task
    assert passing.client.got == [b"a"]
