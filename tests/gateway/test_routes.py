"""Routes through the whole gateway: rules, cascades and sticky conversations, each explained in the row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.gateway.stage import CHAT, asking, staged

MODELS = [
    {"name": "weak", "targets": ("mock/mock_out3_sure50",), "price_in": 1.0, "price_out": 1.0},
    {"name": "sure", "targets": ("mock/mock_out3_sure95",), "price_in": 1.0, "price_out": 1.0},
    {"name": "broken", "targets": ("mock/mock_fail500",)},
    {"name": "strong", "targets": ("mock/mock_out5",), "price_in": 10.0, "price_out": 10.0},
]


def route(*models: str, **more: Any) -> dict[str, Any]:
    routes = [{"name": "auto", "models": models, "sticky_s": 0.0, **more}]
    return {"models": MODELS, "routes": routes, "retries": {"retries": 0}}


async def test_a_rule_decides_and_the_row_says_which(tmp_path: Path) -> None:
    values = route("weak", "strong") | {
        "rules": [{"name": "short", "route": "auto", "model": "weak", "tokens_max": 50}]
    }
    async with staged(tmp_path, values) as stage:
        answer = await stage.http.post(CHAT, json=asking("auto"))
        assert answer.headers["x-ridgeline-model"] == "weak"
        body = asking("auto")
        body["messages"][0]["content"] = "word " * 500
        assert (await stage.http.post(CHAT, json=body)).headers["x-ridgeline-model"] == "strong"
        short, long = sorted(await stage.rows(2), key=lambda row: row["model"] == "strong")
        assert (short["model_asked"], short["model"]) == ("auto", "weak")
        assert json.loads(short["route"])["rule"] == "short"
        assert json.loads(long["route"])["by"] == "default"


async def test_an_unsure_answer_is_not_sent_and_both_calls_are_booked(tmp_path: Path) -> None:
    values = route("weak", "strong", default="weak", cascade=True, cascade_threshold=0.8)
    async with staged(tmp_path, values) as stage:
        answer = await stage.http.post(CHAT, json=asking("auto"))
        assert answer.json()["usage"]["completion_tokens"] == 5
        first, second = sorted(await stage.rows(2), key=lambda row: len(row["request_id"]))
        assert second["request_id"] == first["request_id"] + ".strong" == answer.headers["x-request-id"]
        assert (first["model"], first["tokens_out"], first["error_code"]) == ("weak", 3, "escalated")
        assert (second["model"], second["tokens_out"], second["outcome"]) == ("strong", 5, "ok")
        assert json.loads(second["route"])["escalated_from"] == "weak"
        assert json.loads(second["route"])["confidence"] == 0.5
        assert {one: book.tokens_out for one, book in stage.mock.books.items()} == {
            first["request_id"]: 3,
            second["request_id"]: 5,
        }


async def test_a_sure_answer_is_sent_without_what_the_client_never_asked_for(tmp_path: Path) -> None:
    values = route("sure", "strong", default="sure", cascade=True, cascade_threshold=0.8)
    async with staged(tmp_path, values) as stage:
        answer = (await stage.http.post(CHAT, json=asking("auto"))).json()
        assert answer["choices"][0]["logprobs"] is None
        asked = (await stage.http.post(CHAT, json=asking("auto", logprobs=True))).json()
        assert len(asked["choices"][0]["logprobs"]["content"]) == 3
        assert [row["model"] for row in await stage.rows(2)] == ["sure", "sure"]


async def test_a_cheap_model_that_fails_is_answered_by_the_strong_one(tmp_path: Path) -> None:
    values = route("broken", "strong", default="broken", cascade=True)
    async with staged(tmp_path, values) as stage:
        answer = await stage.http.post(CHAT, json=asking("auto"))
        assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 5)
        outcomes = sorted(row["outcome"] for row in await stage.rows(2))
        assert outcomes == ["ok", "upstream_failed"]


async def test_a_streamed_request_is_decided_before_it_begins(tmp_path: Path) -> None:
    values = route("weak", "strong", default="weak", cascade=True, cascade_threshold=0.99)
    async with staged(tmp_path, values) as stage:
        text = (await stage.http.post(CHAT, json=asking("auto", stream=True))).text
        assert text.count('" river"') == 3
        (row,) = await stage.rows(1)
        assert row["model"] == "weak"


async def test_a_conversation_stays_on_its_model(tmp_path: Path) -> None:
    values = route("weak", "strong", default="strong", sticky_s=60.0) | {
        "rules": [{"name": "word", "route": "auto", "model": "weak", "keywords": ("easy",)}]
    }
    async with staged(tmp_path, values) as stage:
        named = {"x-ridgeline-conversation": "talk-1"}
        body = asking("auto")
        body["messages"][0]["content"] = "an easy one"
        assert (await stage.http.post(CHAT, json=body, headers=named)).headers["x-ridgeline-model"] == "weak"
        later = await stage.http.post(CHAT, json=asking("auto"), headers=named)
        assert later.headers["x-ridgeline-model"] == "weak"
        other = await stage.http.post(CHAT, json=asking("auto"))
        assert other.headers["x-ridgeline-model"] == "strong"


async def test_a_guard_takes_values_out_upstream_and_puts_them_back_whole_and_streamed(
    tmp_path: Path,
) -> None:
    values = {"guards": [{"name": "default", "redact": ("email",), "block": ("card",)}]}
    async with staged(tmp_path, values) as stage:
        body = asking("mock_out3")
        body["messages"][0]["content"] = "Write to jane.doe@example.org please"
        assert (await stage.http.post(CHAT, json=body)).status_code == 200
        assert b"jane.doe" not in stage.mock.last_body
        assert b"EMAIL_1" in stage.mock.last_body
        body["messages"][0]["content"] = "My card is 4111 1111 1111 1111"
        refused = await stage.http.post(CHAT, json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "content_blocked")
        rows = await stage.rows(2)
        assert {row["outcome"] for row in rows} == {"ok", "blocked"}
        found = json.loads(next(row["guard"] for row in rows if row["outcome"] == "ok"))
        assert found["found"] == {"email": 1}
        assert "jane" not in str(rows)
