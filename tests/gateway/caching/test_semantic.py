"""The semantic cache: what is compared, what never is, and how much it holds. Vectors of the real encoder."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.gateway.body import read_fields
from ridgeline.gateway.caching.answer import StoredAnswer
from ridgeline.gateway.caching.config import CacheConfig
from ridgeline.gateway.caching.semantic import SemanticCache, Vectors
from ridgeline.gateway.caching.wording import Wording
from ridgeline.gateway.errors import BadRequest

ASKED = "What does HTTP status code 404 mean?"
SAME = "What is the meaning of HTTP status code 404?"
ANOTHER = "What does HTTP status code 403 mean?"
NEGATED = "What does HTTP status code 404 not mean?"
FAR = "Name a river in France."


class Alike:
    """To which every text is the same: the worst embedder there could be."""

    async def embed(self, texts: Sequence[str]) -> Vectors:
        return np.tile(np.asarray([1.0, 0.0], np.float32), (len(texts), 1))


class Known:
    def __init__(self, vectors: dict[str, Vectors]) -> None:
        self._vectors = vectors

    async def embed(self, texts: Sequence[str]) -> Vectors:
        return np.stack([self._vectors[text] for text in texts])


@pytest.fixture(scope="module")
def real() -> Known:
    from ridgeline.engine.client.client import AsyncClient
    from ridgeline.models.files.pull import ensure

    ensure("all-minilm-l6-v2")
    texts = [ASKED, SAME, ANOTHER, NEGATED, FAR]

    async def embedded() -> Vectors:
        async with await AsyncClient.start("all-minilm-l6-v2") as client:
            return np.asarray(await client.embed(client.tokenizer.encode_all(texts)), np.float32)

    rows = asyncio.run(embedded())
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return Known(dict(zip(texts, rows, strict=True)))


def body(text: Any = ASKED, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **more}


def stored(at: float = 1000.0, size: int = 10) -> StoredAnswer:
    return StoredAnswer(200, "application/json", b"x" * size, "small", "local", "m", at)


async def put(cache: SemanticCache, asked: dict[str, Any], answer: StoredAnswer, tenant: str = "t") -> None:
    query = cache.query(tenant, "small", "chat", read_fields(json.dumps(asked).encode()))
    assert query is not None
    await cache.get(query)
    cache.put(query, answer, "ok")


async def get(cache: SemanticCache, asked: dict[str, Any], tenant: str = "t", kind: str = "chat") -> Any:
    query = cache.query(tenant, "small", kind, read_fields(json.dumps(asked).encode()))
    return None if query is None else await cache.get(query)


def clock_at(now: float) -> Callable[[], float]:
    return lambda: now


async def test_a_paraphrase_is_answered_with_its_similarity_shown(real: Known) -> None:
    cache = SemanticCache(CacheConfig(), real, clock_at(1003.0))
    await put(cache, body(), stored())
    hit = await get(cache, body(SAME))
    assert hit.answer == stored()
    assert 0.97 < hit.similarity < 1
    shown = dict(hit.headers)
    assert shown[b"x-ridgeline-cache"] == b"hit-semantic; similarity=%.4f" % hit.similarity
    assert shown[b"age"] == b"3"
    assert await get(cache, body(FAR)) is None
    reading = cache.reading()
    assert (reading.hits, reading.misses, reading.entries) == (1, 2, 1)


async def test_a_changed_number_or_a_negation_is_no_hit_however_similar(real: Known) -> None:
    strict = SemanticCache(CacheConfig(semantic_threshold=0.5), real, clock_at(1000.0))
    loose = SemanticCache(CacheConfig(semantic_threshold=0.5, semantic_strict=False), real, clock_at(1000.0))
    for cache in (strict, loose):
        await put(cache, body(), stored())
    for text in (ANOTHER, NEGATED):
        assert await get(strict, body(text)) is None
        assert (await get(loose, body(text))).similarity > 0.75  # what the words are looked at for


async def test_a_models_own_threshold_goes_first(real: Known) -> None:
    cache = SemanticCache(CacheConfig(), real, clock_at(1000.0))
    await put(cache, body(), stored())
    query = cache.query("t", "small", "chat", read_fields(json.dumps(body(SAME)).encode()))
    assert query is not None
    assert await cache.get(query, threshold=0.999) is None
    assert await cache.get(query, threshold=0.9) is not None


around = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0, 0.5]),
        "tools": st.sampled_from([[], [{"type": "function"}]]),
        "system": st.sampled_from(["be brief", "be long"]),
        "stream": st.booleans(),
    },
)
earlier = st.lists(
    st.sampled_from([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]), max_size=2
)
places = st.tuples(st.sampled_from(["a", "b"]), around, earlier)


@settings(max_examples=60)
@given(places, places)
def test_everything_but_the_last_message_is_a_hard_border(first: Any, second: Any) -> None:
    """Though every text is the same to the embedder."""

    def request(place: Any, text: str) -> dict[str, Any]:
        _, parameters, before = place
        return {**parameters, "messages": [*before, {"role": "user", "content": text}]}

    async def scenario() -> Any:
        cache = SemanticCache(CacheConfig(semantic_strict=False), Alike(), clock_at(1000.0))
        await put(cache, request(first, "one"), stored(), tenant=first[0])
        return await get(cache, request(second, "two"), tenant=second[0])

    assert (asyncio.run(scenario()) is not None) == (first == second)


@pytest.mark.parametrize(
    ("kind", "asked"),
    [
        ("chat", body([{"type": "image_url", "image_url": {"url": "x"}}])),
        ("chat", body([{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}])),
        ("chat", {"messages": [{"role": "tool", "content": "x"}]}),
        ("chat", {"messages": []}),
        ("chat", {"messages": "x"}),
        ("chat", {"messages": [1]}),
        ("chat", body("x" * 513)),
        ("chat", body("é" * 257)),
        ("chat", body("  ")),
        ("completions", {"prompt": "x"}),
        ("embeddings", {"input": "x"}),
        ("responses", {"input": ["x"]}),
    ],
)
async def test_what_cannot_be_compared_is_left_alone(kind: str, asked: dict[str, Any]) -> None:
    cache = SemanticCache(CacheConfig(), Alike())
    assert cache.query("t", "small", kind, read_fields(json.dumps(asked).encode())) is None


@pytest.mark.parametrize(
    "raw",
    [
        b'{"messages":[{"role":"user","content":"\xff"}]}',
        b'{"messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"messages":[{"role":"user","content":%s}]}' % (b"[" * 5000 + b"]" * 5000),
        b'{"messages":[{"role":1}]}',
    ],
)
def test_no_body_however_broken_upsets_it(raw: bytes) -> None:
    cache = SemanticCache(CacheConfig(), Alike())
    try:
        fields = read_fields(raw)
    except BadRequest:
        return
    assert cache.query("t", "small", "chat", fields) is None


async def test_texts_in_parts_and_plain_input_are_compared_in_their_own_shapes() -> None:
    cache = SemanticCache(CacheConfig(semantic_strict=False), Alike(), clock_at(1000.0))
    parts = body([{"type": "text", "text": "one"}])
    await put(cache, parts, stored())
    assert await get(cache, body([{"type": "text", "text": "two"}])) is not None
    assert await get(cache, body("two")) is None
    query = cache.query("t", "small", "responses", read_fields(b'{"input":"hello"}'))
    assert query is not None
    assert query.text == "hello"


async def test_it_holds_at_most_its_entries_and_bytes_and_lets_old_answers_go() -> None:
    config = CacheConfig(semantic_entries=3, semantic_max_bytes=40_000, semantic_strict=False, ttl_s=50)
    now = [1000.0]
    cache = SemanticCache(config, Alike(), lambda: now[0])
    for number in range(10):
        await put(cache, body(f"question {number}"), stored(1000.0 + number))
    assert cache.reading().entries == 3
    assert cache.reading().evictions == 7
    for number in range(30):
        await put(cache, body(temperature=number), stored(1009.0, size=2000))
        assert cache.reading().bytes <= 40_000
    assert await get(cache, body("question 1")) is None  # its whole bucket was evicted first
    now[0] = 1100.0
    assert await get(cache, body(temperature=29)) is None
    for bucket in cache._buckets.values():
        bucket.expire(1e9)
    assert cache.reading().entries == 0


async def test_errors_are_not_kept_and_an_embedder_that_fails_is_a_miss() -> None:
    class Failing:
        async def embed(self, texts: Sequence[str]) -> Vectors:
            raise TimeoutError

    cache = SemanticCache(CacheConfig(), Failing())
    await put(cache, body(), stored())
    assert cache.reading().entries == 0
    assert cache.failures == 1
    good = SemanticCache(CacheConfig(), Alike(), clock_at(1000.0))
    query = good.query("t", "small", "chat", read_fields(json.dumps(body()).encode()))
    assert query is not None
    await good.get(query)
    good.put(query, stored(), "client_gone")
    assert good.reading().entries == 0


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("Explain how it works.", "Please explain the way it works.", True),
        ("How far is it from London to Paris?", "How far is it from Paris to London?", False),
        ("Is it safe to mix them?", "Is it dangerous to mix them?", False),
        ("born before 1770", "born before 1771", False),
        ("Is it open?", "Is it not open?", False),
        ("capital of Australia", "capital of Austria", False),
        ("translate 'yes' to French", "translate 'no' to French", False),
        ("the function f is injective", "the function g is injective", False),
        ("what is 3 + 4", "what is 3 - 4", False),
        ("在北京，人口是多少", "在上海，数量是多少", False),
        ("Ist das erlaubt?", "Ist das nicht erlaubt?", False),
        ("does the plan include support", "is support included in the plan", True),
    ],
)
def test_words_that_change_an_answer_speak_against_a_hit(one: str, other: str, same: bool) -> None:
    assert Wording.of(one).agrees(Wording.of(other)) is same
    assert Wording.of(other).agrees(Wording.of(one)) is same
