"""Answers taken apart: tokens on chunks, usage in all its forms, reasoning, the server's own timings."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.lab.bench.faulty_server import FINISH, HEAD, Call
from tests.lab.bench.test_bench_client import sent_to


async def test_events_that_arrive_together_are_one_chunk() -> None:
    async def bundle(call: Call) -> None:
        await call.raw(HEAD)
        await asyncio.sleep(0.02)
        event = {"choices": [{"index": 0, "text": " a"}]}
        await call.events(event, event, event)
        await asyncio.sleep(0.05)
        await call.text()
        await asyncio.sleep(0.05)
        await call.end(4)

    record = await sent_to(bundle)
    assert (record.chunk_tokens, record.n_first, record.split_by) == ([3, 1], 3, "one_each")


async def test_usage_that_runs_along_splits_tokens_over_chunks_exactly() -> None:
    async def counted(call: Call) -> None:
        await call.raw(HEAD)
        for total in (2, 3, 7):
            await asyncio.sleep(0.03)
            await call.text(usage={"prompt_tokens": 4, "completion_tokens": total})
        await asyncio.sleep(0.03)
        await call.end(7)

    record = await sent_to(counted)
    assert (record.chunk_tokens, record.n_first, record.n_out) == ([2, 1, 4], 2, 7)
    assert record.split_by == "usage"


async def test_usage_in_the_last_chunk_is_the_sum_and_not_that_chunks() -> None:
    async def summed(call: Call) -> None:
        await call.raw(HEAD)
        for _ in range(2):
            await asyncio.sleep(0.03)
            await call.text()
        await asyncio.sleep(0.03)
        choice = {"index": 0, "text": " b", "finish_reason": "stop"}
        await call.events({"choices": [choice], "usage": {"prompt_tokens": 4, "completion_tokens": 3}})
        await call.raw(b"0\r\n\r\n")

    record = await sent_to(summed)
    assert (record.status, record.chunk_tokens, record.split_by) == ("ok", [1, 1, 1], "one_each")


async def test_more_tokens_than_chunks_are_spread_after_the_first_and_flagged() -> None:
    async def bundled(call: Call) -> None:
        await call.raw(HEAD)
        for _ in range(3):
            await asyncio.sleep(0.03)
            await call.text(" several words")
        await asyncio.sleep(0.03)
        await call.end(8)

    record = await sent_to(bundled)
    assert (record.n_out, sum(record.chunk_tokens), record.n_first) == (8, 8, 1)
    assert record.split_by == "spread"


async def test_without_usage_chunks_are_counted_and_flagged() -> None:
    async def uncounted(call: Call) -> None:
        await call.raw(HEAD)
        await call.text()
        await asyncio.sleep(0.03)
        await call.text()
        await asyncio.sleep(0.03)
        await call.end()

    record = await sent_to(uncounted)
    assert (record.n_out, record.counted_by, record.n_in, record.n_cached) == (2, "chunks", None, None)


async def test_reasoning_counts_as_output_and_is_not_visible() -> None:
    async def think(call: Call) -> None:
        await call.raw(HEAD)
        for delta in ({"role": "assistant", "content": ""}, {"reasoning_content": "hm"}, {"content": "yes"}):
            await asyncio.sleep(0.03)
            await call.events({"choices": [{"index": 0, "delta": delta}]})
        await asyncio.sleep(0.03)
        await call.end(2)

    record = await sent_to(think)
    assert len(record.chunk_at) == 2  # a chunk with only the role has no token
    assert record.t_first == record.chunk_at[0]
    assert record.t_first_visible == record.chunk_at[1]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (
            {
                "usage": {
                    "prompt_tokens": 4,
                    "completion_tokens": 1,
                    "timing": [{"queue_ms": 1, "ttft_ms": 2, "drafted_tokens": 9, "accepted_tokens": 4}],
                }
            },
            (1.0, 2.0, None, 9, 4),
        ),
        ({"timings": {"prompt_ms": 5.0, "predicted_ms": 7.0, "cache_n": 3}}, (None, 5.0, 12.0, None, None)),
        ({"timings": {"draft_n": 8, "draft_n_accepted": 3}}, (None, None, None, 8, 3)),
    ],
)
async def test_a_servers_own_timings_are_kept(more: dict[str, Any], expected: tuple[Any, ...]) -> None:
    async def timed(call: Call) -> None:
        await call.raw(HEAD)
        await call.text()
        await call.events(FINISH | more)
        await call.raw(b"0\r\n\r\n")

    server = (await sent_to(timed)).server
    assert server is not None
    times = (server.queue_ms, server.ttft_ms, server.inference_ms)
    assert (*times, server.drafted_tokens, server.accepted_tokens) == expected


async def test_an_answer_in_single_bytes_with_carriage_returns_is_read_all_the_same() -> None:
    async def drip(call: Call) -> None:
        head = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n"
        events = (
            b': hi\r\n\r\ndata: {"choices":[{"text":"a","finish_reason":"stop"}]}\r\n\r\ndata: [DONE]\r\n\r\n'
        )
        for place in range(len(head + events)):
            await call.raw((head + events)[place : place + 1])
        call.close()

    record = await sent_to(drip)  # whole by its [DONE], though only the connection's end delimits it
    assert (record.status, record.n_out) == ("ok", 1)
