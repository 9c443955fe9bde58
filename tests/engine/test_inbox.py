"""The inbox: one wake-up for whatever came, nothing lost, and an end that says whether it was one."""

from __future__ import annotations

import asyncio

import pytest

from ridgeline.engine.client.inbox import Inbox
from ridgeline.engine.client.output import OutputChunk
from ridgeline.engine.errors import RequestFailed
from tests.patience import PATIENCE_S


def opened(requests: int = 1, **options: bool) -> Inbox:
    inbox = Inbox(**options)
    inbox.open_requests = requests
    return inbox


def texts(arrivals: list[tuple[int, OutputChunk]] | None) -> list[str]:
    assert arrivals is not None
    return [chunk.text for _, chunk in arrivals]


async def test_what_came_together_is_taken_together_in_order() -> None:
    inbox = opened(requests=2)
    taking = asyncio.create_task(inbox.take())
    await asyncio.sleep(0)
    for number, text in ((0, "a"), (1, "b"), (0, "c")):
        inbox.put(number, OutputChunk(0, text))
    assert [(number, chunk.text) for number, chunk in await taking or []] == [(0, "a"), (1, "b"), (0, "c")]
    inbox.put(0, OutputChunk(0, "d"))
    assert texts(await inbox.take()) == ["d"]


async def test_the_end_comes_after_the_last_request_and_what_it_said() -> None:
    inbox = opened(requests=2)
    inbox.put(1, OutputChunk(0, "last"))
    inbox.end_request()
    assert texts(await inbox.take()) == ["last"]
    taking = asyncio.create_task(inbox.take())
    await asyncio.sleep(0)
    assert not taking.done()
    inbox.end_request()
    assert await taking is None
    assert await inbox.take() is None


async def test_an_error_comes_after_what_came_before_it() -> None:
    inbox = opened()
    inbox.put(0, OutputChunk(0, "so far"))
    inbox.fail(RequestFailed("broke"))
    inbox.fail(RequestFailed("a later one, of another request"))
    inbox.end_request()
    assert texts(await inbox.take()) == ["so far"]
    with pytest.raises(RequestFailed, match="broke"):
        await inbox.take()


async def test_a_cancelled_take_loses_nothing() -> None:
    inbox = opened()
    taking = asyncio.create_task(inbox.take())
    await asyncio.sleep(0)
    inbox.put(0, OutputChunk(0, "x"))  # wakes the taker, which is cancelled before it runs
    taking.cancel()
    await asyncio.wait([taking])
    assert taking.cancelled()
    assert texts(await inbox.take()) == ["x"]


async def test_patience_ends_an_empty_wait_and_only_that() -> None:
    inbox = opened()
    assert await inbox.take(0.01) == []
    # An alarm set for a long wait must not hide a short one.
    for patience_s in (PATIENCE_S, 0.01, PATIENCE_S, 0.01):
        taking = asyncio.create_task(inbox.take(patience_s))
        await asyncio.sleep(0)
        if patience_s > 1:
            inbox.put(0, OutputChunk(0, "in time"))
            assert texts(await taking) == ["in time"]
        else:
            assert await taking == []
    assert inbox.close() == []


async def test_an_old_alarm_does_not_cut_a_later_wait_short() -> None:
    inbox = opened()
    inbox.put(0, OutputChunk(0, "first"))
    await inbox.take(0.05)
    taking = asyncio.create_task(inbox.take(0.05))
    await asyncio.sleep(0)  # it waits, and no alarm goes off before the next turn of the loop
    inbox.put(0, OutputChunk(0, "second"))
    assert texts(await taking) == ["second"]
    second_wait = asyncio.create_task(inbox.take(PATIENCE_S))
    await asyncio.sleep(0.1)  # the first alarm went off meanwhile
    assert not second_wait.done()
    inbox.put(0, OutputChunk(0, "third"))
    assert texts(await second_wait) == ["third"]
    inbox.close()


async def test_whoever_wants_the_whole_is_woken_once() -> None:
    inbox = opened(whole=True)
    taking = asyncio.create_task(inbox.take())
    for text in "abc":
        inbox.put(0, OutputChunk(0, text))
        await asyncio.sleep(0)
    assert not taking.done()
    inbox.end_request()
    assert texts(await taking) == ["a", "b", "c"]
    assert await inbox.take() is None


async def test_what_comes_while_nobody_waits_is_told() -> None:
    inbox = opened()
    told: list[int] = []
    inbox.on_put = lambda: told.append(len(inbox))
    inbox.put(0, OutputChunk(0, "a"))
    inbox.put(0, OutputChunk(0, "b"))
    assert told == [1, 2]
    await inbox.take()
    taking = asyncio.create_task(inbox.take())
    await asyncio.sleep(0)
    inbox.put(0, OutputChunk(0, "c"))
    assert told == [1, 2]
    await taking
