"""A request reserves, before it is sent, the most that its body lets it use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from ridgeline.gateway.body import read_fields
from ridgeline.gateway.pipeline.most_used import MostUsed, most_used
from ridgeline.gateway.tenants.keys import Limits
from tests.gateway.stage import CHAT, asking, staged

COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"max_completion_tokens": 1, "max_tokens": 2000}),
        (CHAT, {"max_tokens": 1, "max_output_tokens": 2000}),
        (CHAT, {"max_tokens": 300, "n": 4}),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 300, "n": 1, "best_of": 4}),
        (COMPLETIONS, {"prompt": ["a", "b, c", "d", "e"], "max_tokens": 300}),
        (COMPLETIONS, {"prompt": [[1, 2], [3], [4], [5]], "max_tokens": 300}),
        (COMPLETIONS, {"prompt": ["a", "b"], "max_tokens": 300, "n": 2}),
        (COMPLETIONS, {"prompt": ["a", "b", "c"]}),  # 512 each, where no limit is named
        (EMBEDDINGS, {"input": list(range(10)) * 110}),
        (EMBEDDINGS, {"input": ["word " * 1000, "word " * 1000]}),
    ],
)
async def test_a_request_that_may_use_more_than_the_limit_is_refused(
    tmp_path: Path, path: str, fields: dict[str, Any]
) -> None:
    async with staged(tmp_path, key={"limits": Limits(tokens_per_minute=1000)}) as stage:
        body = asking(**fields) if path == CHAT else {"model": "mock", **fields}
        refused = await stage.http.post(path, json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "request_over_limit")
        assert not stage.mock.books


@pytest.mark.parametrize(
    ("kind", "body", "most"),
    [
        ("chat", {"max_tokens": None}, MostUsed(4, 512)),
        ("chat", {"max_tokens": 7, "max_completion_tokens": None}, MostUsed(11, 7)),
        ("completions", {"prompt": [5, 6, 7], "max_tokens": 7}, MostUsed(8, 7)),
        ("completions", {"prompt": [], "max_tokens": 7}, MostUsed(7, 7)),
        ("responses", {"max_output_tokens": 7, "tools": [{"type": "file_search"}]}, MostUsed(4096 + 14, 7)),
        ("embeddings", {"input": [[1, 2, 3], [4, 5]]}, MostUsed(6, 0)),
        ("embeddings", {"input": list(range(10)) * 10}, MostUsed(100, 0)),
    ],
)
def test_the_estimate_counts_prompts_answers_and_written_out_tokens(
    kind: str, body: dict[str, Any], most: MostUsed
) -> None:
    text = msgspec.json.encode(body)
    assert most_used(kind, read_fields(text), len(text), 512) == most


async def test_listing_models_counts_against_the_request_rate(tmp_path: Path) -> None:
    async with staged(tmp_path, key={"limits": Limits(requests_per_minute=2)}) as stage:
        first = await stage.http.get("/v1/models")
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert (await stage.http.get("/v1/models/mock")).status_code == 200
        refused = await stage.http.get("/v1/models")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert (await stage.http.post(CHAT, json=asking())).status_code == 429
