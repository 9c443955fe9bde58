"""The caches where clients meet them: a whole gateway before a mock that counts what it is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gateway.stage import CHAT, Staged, asking, staged

EXACT = {"cache": "exact"}


def calls(stage: Staged) -> int:
    return sum(book.calls for book in stage.mock.books.values())


@pytest.mark.parametrize("stream", [False, True])
async def test_the_second_answer_is_the_first_byte_for_byte_and_costs_nothing(
    tmp_path: Path, stream: bool
) -> None:
    async with staged(tmp_path, key=EXACT) as stage:
        body = asking(temperature=0, stream=stream)
        first = await stage.http.post(CHAT, json=body)
        second = await stage.http.post(CHAT, json=dict(reversed(body.items())))
        assert first.headers["x-ridgeline-cache"] == "miss"
        assert second.headers["x-ridgeline-cache"] == "hit"
        assert int(second.headers["age"]) >= 0
        assert second.content == first.content
        assert second.headers["content-type"] == first.headers["content-type"]
        assert calls(stage) == 1
        one, two = await stage.rows(2)
        assert (one["outcome"], two["outcome"], two["cache"]) == ("ok", "cached", "exact")
        assert (two["tokens_out"], two["cost_pusd"]) == (0, 0)


async def test_another_tenant_parameter_or_endpoint_is_asked_anew(tmp_path: Path) -> None:
    async with staged(tmp_path, key=EXACT) as stage:
        body = asking(temperature=0)
        _, secret = await stage.new_key(name="other", **EXACT)
        async with stage.client(secret) as other:
            for client, asked in (
                (stage.http, body),
                (other, body),
                (stage.http, {**body, "seed": 1}),
                (stage.http, {**body, "stream": True}),
                (stage.http, {**body, "user": "somebody"}),
            ):
                answer = await client.post(CHAT, json=asked)
                assert answer.headers["x-ridgeline-cache"] == "miss"
        assert calls(stage) == 5


@pytest.mark.parametrize(
    ("key", "headers", "more", "shown"),
    [
        ({}, {}, {"temperature": 0}, None),
        ({}, {"x-ridgeline-cache": "exact"}, {}, "hit"),
        (EXACT, {"x-ridgeline-cache": "off"}, {"temperature": 0}, None),
        (EXACT, {}, {}, None),  # sampled, without the header
    ],
)
async def test_only_who_wants_the_cache_gets_it(
    tmp_path: Path, key: Any, headers: dict[str, str], more: Any, shown: str | None
) -> None:
    async with staged(tmp_path, key=key) as stage:
        for _ in range(2):
            answer = await stage.http.post(CHAT, json=asking(**more), headers=headers)
        assert answer.headers.get("x-ridgeline-cache") == shown


@pytest.mark.parametrize("model", ["mock_fail500", "mock_fail400", "mock_cut3"])
async def test_no_error_and_no_broken_answer_is_ever_kept(tmp_path: Path, model: str) -> None:
    async with staged(tmp_path, key=EXACT) as stage:
        for _ in range(2):
            answer = await stage.http.post(CHAT, json=asking(model, temperature=0, stream=True))
            assert answer.headers.get("x-ridgeline-cache") != "hit"
        assert stage.parts.exact.reading().entries == 0


async def test_a_bad_header_is_refused_with_its_name(tmp_path: Path) -> None:
    async with staged(tmp_path, key=EXACT) as stage:
        answer = await stage.http.post(CHAT, json=asking(), headers={"x-ridgeline-cache": "please"})
        assert answer.status_code == 400
        assert "x-ridgeline-cache" in answer.json()["error"]["message"]
        assert calls(stage) == 0


async def test_a_paraphrase_is_answered_by_meaning_through_the_gateways_embedder(tmp_path: Path) -> None:
    """The mock's vectors are all alike: what keeps questions apart here is the words."""
    values = {
        "embeddings": {"upstream": "mock", "model": "mock", "timeout_ms": 60_000.0},
        "cache": {"semantic_threshold": 0.5},
    }
    async with staged(tmp_path, values, {"cache": "semantic"}) as stage:

        async def ask(text: str) -> Any:
            body = {"model": "mock", "temperature": 0, "messages": [{"role": "user", "content": text}]}
            return await stage.http.post(CHAT, json=body)

        first = await ask("Explain how photosynthesis works.")
        same = await ask("Please explain the way photosynthesis works.")
        other = await ask("Explain how respiration works.")
        assert same.headers["x-ridgeline-cache"].startswith("hit-semantic; similarity=")
        assert same.content == first.content
        assert other.headers["x-ridgeline-cache"] == "miss"
        row = (await stage.rows(3))[1]
        assert (row["outcome"], row["cache"]) == ("cached", "semantic")
        assert row["similarity"] > 0.5
