"""What operators ask: /health, /ready, /metrics, /version, /v1/models, /debug/…, and CORS."""

from __future__ import annotations

import asyncio
import json
import re

import msgspec
import pytest

import ridgeline
from ridgeline.server import health
from ridgeline.server.config import ServerConfig
from ridgeline.server.served_models import Model
from ridgeline.telemetry.metrics import ServerMetrics
from tests.patience import PATIENCE_S
from tests.server.scripted_client import MAX_CONTEXT, ScriptedClient, ScriptedSupervisor, say
from tests.server.stage import CHAT, Stage


async def test_health_is_green_while_ready_is_red_with_the_reason(stage: Stage) -> None:
    async with stage.http() as http:
        assert (await http.get("/ready")).status_code == 200
        stage.supervisor.reason = "the engine is being started"
        stage.supervisor.client = None
        ready = await http.get("/ready")
        assert (ready.status_code, ready.json()["reason"]) == (503, "the engine is being started")
        assert (await http.get("/health")).status_code == 200
        assert "engine_up" in (await http.get("/metrics")).text
        assert (await http.get("/debug/steps")).status_code == 503
        assert (await http.get("/v1/models")).json()["data"][0]["max_model_len"] is None


async def test_metrics_say_whether_the_engine_is_up(stage: Stage) -> None:
    async with stage.http() as http:
        response = await http.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain")
        assert 'ridgeline:engine_up{model_name="m"} 1.0' in response.text
        stage.client.closed.set()
        assert 'ridgeline:engine_up{model_name="m"} 0.0' in (await http.get("/metrics")).text


async def test_models_are_listed_and_shown(stage: Stage) -> None:
    async with stage.http() as http:
        listed = (await http.get("/v1/models")).json()
        shown = await http.get("/v1/models/alias")
        missing = await http.get("/v1/models/org/other")
    assert (listed["object"], [card["id"] for card in listed["data"]]) == ("list", ["m", "alias"])
    assert shown.json() == listed["data"][1]
    assert (shown.json()["object"], shown.json()["max_model_len"]) == ("model", MAX_CONTEXT)
    assert (missing.status_code, missing.json()["error"]["param"]) == (404, "model")


async def test_models_tell_the_limits_of_their_machine_where_these_were_measured(stage: Stage) -> None:
    async with stage.http() as http:
        assert "limits" not in (await http.get("/v1/models")).json()["data"][0]
        measured = {"decode_tokens_per_s": 410.0}
        stage.client.hello = msgspec.structs.replace(stage.client.hello, limits=measured)
        assert (await http.get("/v1/models/alias")).json()["limits"] == measured


async def test_steps_are_one_json_object_per_line(stage: Stage) -> None:
    async with stage.http() as http:
        lines = (await http.get("/debug/steps")).text.splitlines()
        newer = (await http.get("/debug/steps?since=1&model=alias")).text.splitlines()
        wrong = await http.get("/debug/steps?since=yesterday")
    assert [json.loads(line)["prefill_tokens"] for line in lines] == [10, 20]
    assert newer == lines[1:]
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "since")


async def test_the_load_of_experts_is_counted_by_layer(stage: Stage) -> None:
    stage.client.hello = msgspec.structs.replace(stage.client.hello, counts_experts=True)
    async with stage.http() as http:
        metrics = (await http.get("/metrics")).text
        told = (await http.get("/debug/experts?model=alias")).json()
    assert 'ridgeline:expert_imbalance{layer="1",model_name="m"} 3.0' in metrics
    assert 'ridgeline:expert_imbalance{layer="3",model_name="m"} 1.0' in metrics
    assert 'expert_imbalance{layer="5"' not in metrics
    assert told["data"][0] == {"layer": 1, "imbalance": 3.0, "tokens": [6, 2, 0, 0]}
    assert told["data"][2] == {"layer": 5, "imbalance": None, "tokens": [0, 0, 0, 0]}


async def never() -> dict[int, list[int]]:
    await asyncio.Event().wait()
    raise AssertionError


async def test_an_engine_that_does_not_answer_leaves_the_metrics_served(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.client.hello = msgspec.structs.replace(stage.client.hello, counts_experts=True)
    monkeypatch.setattr(health, "EXPERTS_TIMEOUT_S", PATIENCE_S)
    async with stage.http() as http:
        assert "expert_imbalance" in (await http.get("/metrics")).text
        monkeypatch.setattr(health, "EXPERTS_TIMEOUT_S", 0.01)
        monkeypatch.setattr(stage.client, "count_experts", never)
        metrics = (await http.get("/metrics")).text
    assert 'ridgeline:engine_up{model_name="m"} 1.0' in metrics
    assert "expert_imbalance" not in metrics


async def test_engines_are_asked_at_the_same_time_and_a_silent_one_holds_no_other_up(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    last_is_asked = asyncio.Event()

    async def wait_for_the_last() -> dict[int, list[int]]:
        await last_is_asked.wait()
        return {1: [1, 1]}

    async def last() -> dict[int, list[int]]:
        last_is_asked.set()
        return {1: [2, 0]}

    models = []
    for name, count in (("first", wait_for_the_last), ("silent", never), ("last", last)):
        client = ScriptedClient(say("hé!"), "")
        client.hello = msgspec.structs.replace(client.hello, counts_experts=True)
        monkeypatch.setattr(client, "count_experts", count)
        models.append(Model((name,), ScriptedSupervisor(client), ServerMetrics(name)))
    stage.served_models.models = tuple(models)
    monkeypatch.setattr(health, "EXPERTS_TIMEOUT_S", 0.5)
    async with stage.http() as http:
        metrics = (await http.get("/metrics")).text
    found = re.findall(r'^ridgeline:expert_imbalance{layer="1",model_name="(\w+)"} (\S+)', metrics, re.M)
    assert found == [("first", "1.0"), ("last", "2.0")]


async def test_version(stage: Stage) -> None:
    async with stage.http() as http:
        assert (await http.get("/version")).json() == {"version": ridgeline.__version__}


async def test_only_named_origins_may_call_from_a_browser() -> None:
    preflight = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    stage = Stage(config=ServerConfig(cors_origins=("https://app.example",), api_keys=("k",)))
    async with stage.http() as http:
        allowed = await http.options(CHAT, headers={**preflight, "origin": "https://app.example"})
        other = await http.options(CHAT, headers={**preflight, "origin": "https://evil.example"})
        refused = await http.post(CHAT, json={}, headers={"origin": "https://app.example"})
    assert allowed.headers["access-control-allow-origin"] == "https://app.example"
    assert "access-control-allow-origin" not in other.headers
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://app.example"
