"""The embedder: vectors from a server, kept for a while, never waited for too long."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from ridgeline.gateway.routing.embedder import EmbeddingFailed, decode
from tests.gateway.routing.stand import Topics, vector_of


async def test_vectors_come_in_the_order_of_the_texts_and_repeated_texts_are_asked_for_once() -> None:
    topics = Topics()
    embedder = topics.embedder()
    texts = ["a sum", "a river", "a sum"]
    assert np.allclose(await embedder.embed(texts), [vector_of(text) for text in texts], atol=1e-6)
    assert topics.bodies[0]["input"] == ["a sum", "a river"]
    await embedder.embed(["a river", "a tree"])
    assert topics.bodies[1]["input"] == ["a tree"]
    assert (embedder.hits, embedder.misses) == (1, 3)


async def test_a_cut_text_has_another_vector_than_the_whole() -> None:
    topics = Topics()
    embedder = topics.embedder()
    await embedder.embed(["a sum"])
    await embedder.embed(["a sum"], max_tokens=64)
    assert [body["truncate_prompt_tokens"] for body in topics.bodies] == [-1, 64]


async def test_requests_for_the_same_text_at_the_same_time_are_one() -> None:
    topics = Topics()
    embedder = topics.embedder()
    first, second = await asyncio.gather(embedder.embed(["a sum"]), embedder.embed(["a sum"]))
    assert len(topics.bodies) == 1
    assert np.array_equal(first, second)


async def test_the_memory_of_recent_texts_is_bounded() -> None:
    topics = Topics()
    embedder = topics.embedder(cache_entries=2)
    for text in ("one", "two", "one", "three", "one", "two"):
        await embedder.embed([text])
    assert [body["input"] for body in topics.bodies] == [["one"], ["two"], ["three"], ["two"]]


async def test_a_slow_server_is_not_waited_for_and_leaves_nothing_behind() -> None:
    topics = Topics()
    embedder = topics.embedder(timeout_ms=20.0)
    quick = topics.post

    async def slow(body: bytes) -> bytes:
        await asyncio.sleep(30)
        return b""

    embedder._post = slow
    with pytest.raises(EmbeddingFailed, match="within 20 ms"):
        await embedder.embed(["a sum"])
    embedder._post = quick
    embedder.config = replace(embedder.config, timeout_ms=60_000.0)
    assert len(await embedder.embed(["a sum"])) == 1
    assert embedder.failures == 1


async def test_one_who_waits_for_a_text_of_another_is_told_when_that_one_leaves() -> None:
    embedder = Topics().embedder()
    asked = asyncio.Event()

    async def hang(body: bytes) -> bytes:
        asked.set()
        await asyncio.sleep(30)
        return b""

    embedder._post = hang
    first = asyncio.create_task(embedder.embed(["a sum"]))
    await asked.wait()
    second = asyncio.create_task(embedder.embed(["a sum"]))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(EmbeddingFailed):
        await second


async def test_no_more_requests_are_sent_than_may_be_under_way() -> None:
    topics = Topics()
    embedder = topics.embedder(max_concurrent=2)
    found = await asyncio.gather(
        *(embedder.embed([text]) for text in ("one", "two", "three")), return_exceptions=True
    )
    assert [isinstance(answer, EmbeddingFailed) for answer in found] == [False, False, True]
    assert len(await embedder.embed(["three"])) == 1


async def test_a_failing_server_is_an_embedding_failed_without_its_words() -> None:
    topics = Topics()
    topics.failure = ConnectionError("http://10.0.0.1:8000 refused 'a sum'")
    with pytest.raises(EmbeddingFailed) as error:
        await topics.embedder().embed(["a sum"])
    assert str(error.value) == "the embedding server failed (ConnectionError)"


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"{}",
        b'{"data": []}',
        b'{"data": [{"embedding": "!!"}]}',
        b'{"data": [{"embedding": "AAA="}]}',
        b'{"data": [{"embedding": []}, {"embedding": [1.0]}]}',
        b'{"data": [{"embedding": [1.0]}, {"embedding": [1.0]}]}',
        b'{"data": [{"embedding": "AADAfw=="}]}',  # not a number
    ],
)
def test_an_answer_that_is_no_vector_is_refused(answer: bytes) -> None:
    with pytest.raises(EmbeddingFailed):
        decode(answer, 1)
