"""The console on a server: who may read what, and that its figures are the server's."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import httpx
import msgspec

from ridgeline.console.assets import assets
from ridgeline.server.config import ServerConfig
from ridgeline.server.console.live import LiveFigures
from ridgeline.server.console.request_log import LoggedRequest, RequestLog
from ridgeline.telemetry.stats import EngineStats, StepRecord
from ridgeline.telemetry.timing import TimingRecord
from tests.patience import PATIENCE_S
from tests.server.scripted_client import say
from tests.server.stage import CHAT, HELLO, Stage

KEYED = ServerConfig(api_keys=("secret",))
AUTH = {"authorization": "Bearer secret"}


async def events_of(http: httpx.AsyncClient, enough: Any, **options: Any) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    async with asyncio.timeout(PATIENCE_S), http.stream("GET", "/console/events", **options) as answer:
        assert answer.status_code == 200
        event = ""
        async for line in answer.aiter_lines():
            if line.startswith("event: "):
                event = line.removeprefix("event: ")
            elif line.startswith("data: "):
                found.append((event, msgspec.json.decode(line.removeprefix("data: "))))
                if enough(found):
                    return found
    raise AssertionError("the stream ended")


async def test_the_page_and_its_files_need_no_key_and_the_data_does() -> None:
    stage = Stage(config=KEYED)
    async with stage.http() as http:
        page = await http.get("/console")
        assert page.status_code == 200
        assert page.headers["content-security-policy"] == assets().policy
        assert "0.1.0" not in page.text
        for asset in assets().by_name.values():
            answer = await http.get(asset.url)
            assert answer.content == asset.body
            assert answer.headers["cache-control"] == "public, max-age=31536000, immutable"
            assert answer.headers["content-encoding"] == "gzip"
        for path in ("/console/events", "/console/reports", "/console/lint"):
            assert (await http.get(path)).status_code == 401, path
        assert (await http.get("/console/assets/app.000000000000.js")).status_code == 404


async def test_the_console_can_be_turned_off() -> None:
    stage = Stage(config=ServerConfig(console=False))
    async with stage.http() as http:
        for path in ("/console", assets().style.url, "/console/events", "/console/reports"):
            answer = await http.get(path)
            assert answer.status_code == 404, path
        assert "--no-console" in answer.json()["error"]["message"]
        await http.post(CHAT, json=HELLO)


async def test_an_unknown_topic_is_refused_by_name() -> None:
    async with Stage().http() as http:
        answer = await http.get("/console/events", params={"topics": "metrics,weather"})
        assert answer.status_code == 400
        assert "weather" in answer.json()["error"]["message"]


async def test_the_stream_shows_requests_as_they_change_and_a_frame_of_at_most_2_kb() -> None:
    stage = Stage(script=say("hello there", pause_s=0.05), config=KEYED)
    async with stage.served() as http:
        asking = asyncio.create_task(http.post(CHAT, json=HELLO, headers=AUTH))

        def enough(found: list[tuple[str, Any]]) -> bool:
            ended = any(one["state"] == "done" for name, data in found if name == "requests" for one in data)
            return ended and any(name == "metrics.frame" for name, _ in found)

        found = await events_of(http, enough, headers=AUTH)
        answer = (await asking).json()
    assert found[0][0] == "metrics.snapshot"
    assert found[1][0] == "requests.snapshot"
    (ended,) = [one for name, data in found if name == "requests" for one in data if one["state"] == "done"]
    assert ended["prompt"] == answer["usage"]["prompt_tokens"]
    assert ended["out"] == answer["usage"]["completion_tokens"]
    frames = [data for name, data in found if name == "metrics.frame"]
    assert all(len(msgspec.json.encode(frame)) <= 2000 for frame in frames)
    assert frames[0]["models"][0]["name"] == "m"


async def test_a_frame_tells_that_the_engine_is_not_ready() -> None:
    stage = Stage()
    stage.supervisor.reason = "the engine is restarting"
    async with stage.served() as http:
        only = {"topics": "metrics"}
        found = await events_of(http, lambda found: found[-1][0] == "metrics.frame", params=only)
    (model,) = found[-1][1]["models"]
    assert (model["ready"], model["reason"]) == (False, "the engine is restarting")


async def test_an_idle_engine_is_not_asked_for_its_steps() -> None:
    stage = Stage()
    figures, asked, dump = LiveFigures(stage.served_models), [], stage.client.dump_steps

    async def counted(since: int = -1) -> list[StepRecord]:
        asked.append(since)
        return await dump(since)

    stage.client.dump_steps = counted  # type: ignore[method-assign]
    for _ in range(3):
        frame = await figures.frame()
    assert asked == [-1]
    assert frame["models"][0].recent.count == 0
    stage.client.stats = EngineStats(steps=1)
    await figures.frame()
    assert asked == [-1, 2]


def test_a_record_has_the_times_of_its_timing_record_and_no_text() -> None:
    log = RequestLog()
    request = log.begin(LoggedRequest("r1", "m", "/v1/chat/completions", 10.0, (5,)))
    assert [(one.id, one.state) for one in log.all()] == [("r1", "queued")]
    timing = TimingRecord(
        10.0,
        admitted=10.5,
        first_prefill=10.5,
        chunk_times=[10.5, 10.75],
        token_times=[11.0, 11.125, 11.5],
        end=11.5,
        sent=11.75,
        prompt_tokens=5,
        cached_tokens=3,
        preemptions=1,
        end_reason="stop",
    )
    log.end(request, 200, [timing])
    (view,) = log.all()
    assert (view.admitted, view.first, view.last, view.end, view.sent) == (500, 1000, 1500, 1500, 1750)
    assert view.chunks == (500, 750)
    assert (view.tpot, view.longest_gap) == (250, 375)
    assert (view.prompt, view.cached, view.out, view.preemptions, view.state) == (5, 3, 3, 1, "done")
    assert log.changes() == [view]
    assert log.changes() is None


def test_the_log_keeps_the_last_requests_only() -> None:
    log = RequestLog(kept=3)
    for number in range(10):
        request = log.begin(LoggedRequest(f"r{number}", "m", "/v1/completions", 1.0, (1,)))
        log.end(request, 499, [TimingRecord(1.0, end=2.0)])
    assert [one.id for one in log.all()] == ["r7", "r8", "r9"]
    assert len(log.changes() or []) == 3


def test_without_a_console_no_request_is_kept() -> None:
    log = RequestLog(is_kept=False)
    request = log.begin(LoggedRequest("r", "m", "/v1/completions", 1.0, (1,)))
    log.end(request, 200, [TimingRecord(1.0)])
    assert log.all() == []


async def test_lint_names_the_part_that_breaks_the_prefix() -> None:
    def body(day: str) -> dict[str, Any]:
        system = f"Today is {day}. " + "You are a helpful assistant that answers in one sentence. " * 8
        return {"messages": [{"role": "system", "content": system}, {"role": "user", "content": "hi"}]}

    requests = [body("2027-01-30"), body("2027-01-31")]
    answer = await Stage().post("/console/lint", {"requests": requests})
    assert answer.status_code == 200, answer.text
    report = answer.json()
    assert report["measured_in"] == "tokens"
    assert (report["breakers"][0]["kind"], report["breakers"][0]["where"]) == ("timestamp", "system")
    refused = await Stage().post("/console/lint", {"requests": [{"tools": []}]})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "requests"


async def test_reports_are_listed_with_a_key_and_shown_by_their_signed_address(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "plan.html").write_text("<title>A &amp; B</title><p>plan</p>")
    (tmp_path.parent / "outside.html").write_text("<title>secret</title>")
    (tmp_path / "link.html").symlink_to(tmp_path.parent / "outside.html")
    stage = Stage(config=dataclasses.replace(KEYED, console_reports=tmp_path))
    async with stage.http() as http:
        assert (await http.get("/console/reports")).status_code == 401
        (report,) = (await http.get("/console/reports", headers=AUTH)).json()["data"]
        assert (report["kind"], report["title"], report["path"]) == ("plan", "A & B", "run/plan.html")
        shown = await http.get(report["url"])
        assert shown.status_code == 200
        assert "<p>plan</p>" in shown.text
        assert "sandbox" in shown.headers["content-security-policy"]
        forged = report["url"][:-1] + ("0" if report["url"][-1] != "0" else "1")
        for path in ("/console/reports/run/plan.html", forged, "/console/reports/link.html"):
            assert (await http.get(path)).status_code == 404, path
