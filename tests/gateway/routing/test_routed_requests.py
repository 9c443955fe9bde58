"""Routes through a running gateway: which model was asked, what the client got, what the ledger says."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ridgeline.gateway.routing.learned.artifact import save
from tests.gateway.routing.stand import artifact, vector_of
from tests.gateway.stage import CHAT, staged


class Upstream(ThreadingHTTPServer):
    """Answers chats with the model's name, unsure where the text has `doubt`; and gives vectors."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.chats: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Upstream
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/v1/embeddings":
            rows = [base64.b64encode(vector_of(text).tobytes()).decode() for text in asked["input"]]
            answer: dict[str, Any] = {"data": [{"index": n, "embedding": row} for n, row in enumerate(rows)]}
        else:
            self.server.chats.append(asked)
            unsure = "doubt" in asked["messages"][-1]["content"]
            tokens = [{"token": "x", "logprob": -3.0 if unsure else -0.01, "top_logprobs": []}]
            choice = {
                "index": 0,
                "message": {"role": "assistant", "content": asked["model"]},
                "finish_reason": "stop",
            }
            choice["logprobs"] = {"content": tokens} if asked.get("logprobs") else None
            usage = {"prompt_tokens": 10, "completion_tokens": 1, "total_tokens": 11}
            answer = {"id": "a", "object": "chat.completion", "choices": [choice], "usage": usage}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    server = Upstream()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("artifact") / "route.npz"
    save(artifact(), path)
    return path


def sections(upstream: Upstream, path: Path, **route: Any) -> dict[str, Any]:
    return {
        "upstreams": [{"name": "up", "kind": "openai", "url": upstream.url, "probe_s": 0.0}],
        "models": [
            {"name": "small", "targets": ("up/small",), "price_in": 1.0, "price_out": 1.0},
            {"name": "large", "targets": ("up/large",), "price_in": 10.0, "price_out": 10.0},
        ],
        "embeddings": {"upstream": "up", "model": "topics", "timeout_ms": 60_000.0},
        "routes": [{"name": "auto", "models": ("small", "large"), "artifact": path, **route}],
        "rules": [{"name": "tools", "model": "large", "tools": True, "always": True}],
    }


def asking(*turns: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(turns)]
    return {"model": "auto", "messages": messages, **fields}


def said(answer: Any) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


async def test_a_route_goes_to_the_model_that_will_do_and_its_row_says_why(
    tmp_path: Path, upstream: Upstream, path: Path
) -> None:
    async with staged(tmp_path, sections(upstream, path)) as stage:
        assert said(await stage.http.post(CHAT, json=asking("which river is it"))) == "small"
        assert said(await stage.http.post(CHAT, json=asking("what is the sum of it"))) == "large"
        tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
        assert said(await stage.http.post(CHAT, json=asking("which river is it", tools=tools))) == "large"
        rows = await stage.rows(3)
        why = [json.loads(row["route"]) for row in rows]
        assert [row["model_asked"] for row in rows] == ["auto"] * 3
        assert [row["model"] for row in rows] == ["small", "large", "large"]
        assert [found["by"] for found in why] == ["predicted", "predicted", "rule"]
        assert rows[0]["cost_pusd"] * 10 == rows[1]["cost_pusd"]
        assert all("river" not in row["route"] for row in rows)
        assert "logprobs" not in upstream.chats[0]


async def test_an_unsure_answer_is_replaced_by_the_strong_models_and_both_are_booked(
    tmp_path: Path, upstream: Upstream, path: Path
) -> None:
    async with staged(tmp_path, sections(upstream, path, cascade=True)) as stage:
        sure = await stage.http.post(CHAT, json=asking("which river is it"))
        assert said(sure) == "small"
        assert sure.json()["choices"][0]["logprobs"] is None
        unsure = await stage.http.post(CHAT, json=asking("which river, I doubt"))
        assert said(unsure) == "large"
        assert unsure.json()["choices"][0]["logprobs"] is None
        assert [(chat["model"], chat.get("logprobs")) for chat in upstream.chats] == [
            ("small", True),
            ("small", True),
            ("large", None),
        ]
        rows = await stage.rows(3)
        escalated = json.loads(rows[-1]["route"])
        assert sorted(row["model"] for row in rows) == ["large", "small", "small"]
        assert (escalated["escalated_from"], escalated["confidence"]) == ("small", pytest.approx(0.0498))
        later = asking("which river, I doubt", "large", "and that river?")
        assert said(await stage.http.post(CHAT, json=later)) == "large"


async def test_logprobs_that_the_client_asked_for_stay(
    tmp_path: Path, upstream: Upstream, path: Path
) -> None:
    async with staged(tmp_path, sections(upstream, path, cascade=True)) as stage:
        answer = await stage.http.post(CHAT, json=asking("which river is it", logprobs=True))
        assert answer.json()["choices"][0]["logprobs"]["content"][0]["logprob"] == -0.01


async def test_a_shadow_route_uses_its_default_and_writes_down_the_other(
    tmp_path: Path, upstream: Upstream, path: Path
) -> None:
    async with staged(tmp_path, sections(upstream, path, shadow=True)) as stage:
        assert said(await stage.http.post(CHAT, json=asking("which river is it"))) == "large"
        (row,) = await stage.rows(1)
        assert (row["model"], json.loads(row["route"])["shadow"]) == ("large", "small")
