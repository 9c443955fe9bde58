"""Grammars in an engine process: requests wait for them outside the steps, and end like all others."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing

import pytest

from ridgeline import AsyncClient, SamplingParams
from ridgeline.engine.errors import InvalidRequest
from ridgeline.engine.grammar import Grammar
from ridgeline.engine.schedule.request import FinishReason

ENDLESS = {"type": "string", "allOf": [{"pattern": f"a.*{i}.*b"} for i in range(30)]}
DIGITS = Grammar("regex", "[0-9]{4}")


def bound(grammar: Grammar, **options) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=40, grammar=grammar, **options)


async def whole(client: AsyncClient, params: SamplingParams) -> tuple[list[str], set[FinishReason | None]]:
    texts, ends = [""] * params.n, set()
    async for chunk in client.generate("The number is", params):
        texts[chunk.index] += chunk.text
        ends.add(chunk.finish_reason)
    return texts, ends - {None}


def in_an_engine(smollm2_path, work) -> None:
    async def run() -> None:
        async with await AsyncClient.start(str(smollm2_path), kv_tokens=4096) as client:
            await work(client)

    asyncio.run(run())


def test_a_grammar_is_compiled_followed_refused_or_left_behind_while_others_go_on(smollm2_path):
    """One engine for all of it: starting one is what takes the time."""

    async def work(client: AsyncClient) -> None:
        await _followed(client)
        await _refused_while_another_goes_on(client)
        await _aborted_while_it_compiles(client)
        assert (await client.ping()).waiting == 0
        assert client.open_requests == 0

    in_an_engine(smollm2_path, work)


async def _followed(client: AsyncClient) -> None:
    texts, ends = await whole(client, bound(DIGITS, n=2))
    assert [text for text in texts if len(text) == 4 and text.isdigit()] == texts
    assert ends == {FinishReason.STOP}


async def _refused_while_another_goes_on(client: AsyncClient) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=1000, ignore_eos=True)
    async with aclosing(client.generate("Once upon a time", params)) as other:
        await anext(other)
        refusal = asyncio.ensure_future(whole(client, bound(Grammar("json_schema", json.dumps(ENDLESS)))))
        tokens_meanwhile = 0
        async for chunk in other:
            tokens_meanwhile += len(chunk.tokens)
            if refusal.done():
                break
        assert tokens_meanwhile > 5
        with pytest.raises(InvalidRequest, match="takes more than") as caught:
            await refusal
        assert caught.value.field == "grammar"


async def _aborted_while_it_compiles(client: AsyncClient) -> None:
    endless = {**ENDLESS, "minLength": 3}  # another one, which is not known to be refused yet
    stream = asyncio.ensure_future(whole(client, bound(Grammar("json_schema", json.dumps(endless)), n=3)))
    for _ in range(200):
        await asyncio.sleep(0.01)
        if (await client.ping()).waiting:
            break
    assert not stream.done()
    stream.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stream
    assert (await client.ping()).waiting == 0
    texts, _ = await whole(
        client, bound(Grammar("choice", '["one", "two"]'))
    )  # the next in the worker's queue
    assert texts[0] in ("one", "two")
