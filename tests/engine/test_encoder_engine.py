"""Encoders in the engine: the core by itself, and a real engine process asked through AsyncClient."""

from __future__ import annotations

import asyncio
from array import array
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ridgeline.engine.client.client import AsyncClient
from ridgeline.engine.config import EngineConfig
from ridgeline.engine.encoder.build import build_encoder
from ridgeline.engine.encoder.core import EncoderCore, EncoderLimits
from ridgeline.engine.errors import InvalidConfig, InvalidRequest, QueueFull, RequestFailed
from ridgeline.engine.link.messages import Embed
from ridgeline.models.files.pull import ensure

POISON = 13


class Runner:
    """A vector is the sum of a text's ids, twice; a text with POISON fails."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def encode(self, token_ids: Any, text_starts: Any, type_ids: Any, want: str) -> Any:
        self.calls.append(len(token_ids))
        if POISON in token_ids:
            raise RuntimeError("poisoned")
        if want == "tokens":
            return np.stack([token_ids, token_ids], 1).astype(np.float32)
        sums = np.add.reduceat(token_ids, text_starts[:-1])
        return np.stack([sums, sums], 1).astype(np.float32)


def core_of(runner: Any, max_waiting: int = 8) -> EncoderCore:
    return EncoderCore(runner, EncoderLimits(20, 10, 100, 2, max_waiting, ("vector", "tokens")))


def embed(texts: list[list[int]], want: Any = "vector", **fields: Any) -> Embed:
    return Embed(
        "r", array("i", chain.from_iterable(texts)).tobytes(), [len(t) for t in texts], want=want, **fields
    )


def drained(core: EncoderCore) -> dict[str, list[Any]]:
    rows: dict[str, list[Any]] = {}
    while core.has_work:
        for answer in core.step():
            values = np.frombuffer(answer.values, np.float32).reshape(-1, 2)[:, 0].tolist()
            rows.setdefault(answer.name, []).append((answer.row, values, answer.is_last, answer.error))
    return rows


def test_a_large_request_is_answered_over_several_steps_and_ends_once() -> None:
    core = core_of(Runner())
    core.add("a", embed([[1, 2, 3, 4, 5]] * 6))
    core.add("b", embed([[7]]))
    rows = drained(core)
    assert rows["a"] == [(0, [15.0] * 3, False, None), (3, [15.0] * 3, True, None)]
    assert rows["b"] == [(0, [7.0], True, None)]
    stats = core.stats()
    assert (stats.steps, stats.prompt_tokens, stats.waiting) == (2, 31, 0)
    assert stats.prefill_tokens == 31
    assert stats.busy_s >= sum(record.busy_s for record in core.steps.dump()) > 0
    assert [record.prefill_tokens for record in core.steps.dump()] == [16, 15]


def test_token_vectors_come_with_the_row_they_begin_at() -> None:
    core = core_of(Runner())
    core.add("a", embed([[1] * 9, [2] * 9, [3] * 9], want="tokens"))
    core.add("b", embed([[5]]))
    rows = drained(core)
    assert rows["a"][-1] == (18, [3.0] * 9, True, None)
    assert rows["b"] == [(0, [5.0], True, None)]


def test_a_request_whose_computation_fails_ends_alone() -> None:
    core = core_of(Runner())
    core.add("good", embed([[1], [2]]))
    core.add("bad", embed([[POISON]]))
    rows = drained(core)
    assert rows["good"] == [(0, [1.0, 2.0], True, None)]
    assert "poisoned" in rows["bad"][0][3]
    core.add("bad", embed([[1]]))  # nothing of it is left
    assert drained(core)["bad"] == [(0, [1.0], True, None)]


@pytest.mark.parametrize(
    ("texts", "fields", "field"),
    [
        ([[1], []], {}, "input"),
        ([[1], [1] * 11], {}, "input[1]"),
        ([[100]], {}, "input"),
        ([[-1]], {}, "input"),
        ([[1]], {"types": b"\x02"}, "input"),
        ([[1]], {"want": "score"}, "model"),
    ],
)
def test_what_can_never_be_computed_is_refused(texts: Any, fields: Any, field: str) -> None:
    core = core_of(Runner())
    with pytest.raises(InvalidRequest) as refused:
        core.add("a", embed(texts, **fields))
    assert refused.value.field == field
    assert not core.has_work


@pytest.fixture(scope="module")
def minilm() -> Path:
    return ensure("all-minilm-l6-v2").path


def test_settings_an_encoder_cannot_follow_are_refused_and_useless_ones_named(minilm: Path) -> None:
    with pytest.raises(InvalidConfig, match="--weights int8"):
        build_encoder(EngineConfig(weights="int8"), minilm)
    with pytest.raises(InvalidConfig, match="512 positions"):
        build_encoder(EngineConfig(max_context=513), minilm)
    built = build_encoder(EngineConfig(kv_tokens=64, max_context=300, threads=1), minilm)
    assert any("--kv-tokens" in note for note in built.notes)
    assert built.core.limits.max_text_tokens == 300
    assert built.limits["embed_tokens_per_s"] > 0


async def test_a_real_engine_embeds_aborts_refuses_and_goes_on() -> None:
    async with await AsyncClient.start("all-minilm-l6-v2", max_waiting=2) as client:
        assert client.hello.task == "embed"
        assert client.hello.vector_size == 384
        texts = client.tokenizer.encode_all(
            ["a cat", "a much longer text about nothing in particular", "cats"]
        )
        vectors = await client.embed(texts)
        assert np.allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)
        assert vectors[0] @ vectors[2] > vectors[0] @ vectors[1]
        alone = [await client.embed([text]) for text in texts]
        assert np.array_equal(np.concatenate(alone), vectors)
        tokens = await client.embed(texts, want="tokens")
        assert tokens.shape == (sum(map(len, texts)), 384)
        assert (await client.embed([])).shape == (0, 384)
        large = asyncio.create_task(client.embed([texts[1]] * 2048))
        also = asyncio.create_task(client.embed([texts[1]] * 2048))
        await asyncio.sleep(0.1)
        with pytest.raises(QueueFull):
            await client.embed(texts)
        large.cancel()
        await asyncio.wait([large])
        assert np.array_equal(await client.embed([texts[0]]), vectors[:1])  # long before the large one ends
        assert not also.done()
        also.cancel()
        with pytest.raises(InvalidRequest, match="300 tokens"):
            await client.embed([[101] * 300])
        with pytest.raises((InvalidRequest, RequestFailed)):
            await client.embed(texts, want="score")
        while (await client.ping()).waiting:
            await asyncio.sleep(0.01)
        assert client.open_requests == 0
        assert client.stats.prompt_tokens < 2 * 2048 * len(texts[1])  # the aborted were not computed
        assert len(await client.dump_steps()) == client.stats.steps
