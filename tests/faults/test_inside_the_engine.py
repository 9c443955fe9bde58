"""Faults and aborts inside a real engine process: what one request does or suffers touches no other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from ridgeline import AsyncClient, SamplingParams
from ridgeline.engine.client.output import OutputChunk
from ridgeline.engine.errors import RequestFailed
from tests.patience import PATIENCE_S

LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)


@pytest.fixture
async def client(smollm2_path) -> AsyncIterator[AsyncClient]:
    async with await AsyncClient.start(
        str(smollm2_path),
        kv_tokens=8192,
        prefill_chunk=64,
        max_running=2,
        prefix_cache=False,
        deterministic=True,  # alone and beside others, the same tokens
    ) as client:
        yield client


async def text_of(stream: AsyncIterator[OutputChunk]) -> str:
    return "".join([chunk.text async for chunk in stream])


async def test_an_exception_in_one_requests_sampling_ends_that_request_only(client):
    """The front would refuse this bias; here it reaches the sampler, as a bug of ours might."""
    healthy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    broken = SamplingParams(temperature=0.0, max_tokens=12, logit_bias={10**6: 1.0})
    alone = await text_of(client.generate("The capital of France is", healthy))
    together = await asyncio.gather(
        text_of(client.generate("The capital of France is", healthy)),
        text_of(client.generate("One two three", broken)),
        return_exceptions=True,
    )
    assert together[0] == alone
    assert isinstance(together[1], RequestFailed)
    assert "sampling failed" in str(together[1])
    assert (await client.ping()).kv_blocks_held == 0


@pytest.mark.parametrize("moment", ["queued", "in prefill", "mid-stream"])
async def test_a_request_left_alone_frees_its_blocks_within_one_step(client, moment):
    """The engine takes messages in order, between steps, and answers a ping at once: no step lies between
    the abort and the answer, so whatever the answer shows held was not freed by the abort."""
    others: list[asyncio.Task[str]] = []
    if moment == "queued":
        others = [asyncio.create_task(text_of(client.generate("Once upon", LONG))) for _ in range(2)]
        await until_stats(client, lambda stats: stats.running == 2)
    prompt = "lighthouse keeper " * 1500 if moment == "in prefill" else "Once upon a time"
    leaving = asyncio.create_task(text_of(client.generate(prompt, LONG)))
    if moment == "queued":
        await until_stats(client, lambda stats: stats.waiting == 1)
    elif moment == "in prefill":
        await until_stats(client, lambda stats: stats.running == 1 and stats.steps > 1)
        assert client.stats.output_tokens == 0
    else:
        await until_stats(client, lambda stats: stats.output_tokens > 2)
    leaving.cancel()
    await asyncio.wait([leaving])
    after = await client.ping()
    assert after.waiting == 0
    assert after.running == len(others)
    if not others:
        assert after.kv_blocks_held == 0
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    assert (await client.ping()).kv_blocks_held == 0


async def until_stats(client: AsyncClient, condition) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition(await client.ping()):
            pass
