"""Batches at a hosted upstream, which counts answered lines and reports usage at the end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ridgeline.gateway.accounting.prices import TokenPrices
from ridgeline.gateway.objects.batch_use import Batch, used_in_all
from ridgeline.gateway.tenants.audit import Actor
from ridgeline.gateway.tenants.keys import Limits, Team
from ridgeline.gateway.tenants.owned import Owned
from ridgeline.gateway.tenants.registry import Registry
from ridgeline.gateway.tenants.store import Store
from tests.gateway.batch_budget_stage import DOLLAR, booked, chat, lines
from tests.gateway.object_stage import submit
from tests.gateway.scripted_upstream import Asked, ScriptedUpstream, whole
from tests.gateway.stage import CHAT, Staged, asking, staged


class Hosted:
    """Answers as a hosted provider does: one file, one batch, its output."""

    def __init__(self) -> None:
        self.batch: dict[str, Any] = {
            "id": "batch_1",
            "object": "batch",
            "endpoint": CHAT,
            "input_file_id": "file-1",
            "status": "in_progress",
            "request_counts": {"total": 4, "completed": 0, "failed": 0},
            "output_file_id": None,
        }
        self.output = b""
        self.loses_answer = False
        self.refuses = 0  # the status for a new batch

    async def answer(self, asked: Asked, writer: asyncio.StreamWriter) -> None:
        if asked.path.endswith("/content"):
            writer.write(whole(200 if self.output else 404, self.output or b"{}"))
        elif asked.path.startswith("/v1/files"):
            writer.write(whole(200, {"id": "file-1", "object": "file"}))
        elif asked.path.startswith("/v1/batches?"):
            writer.write(whole(200, {"data": [self.batch], "has_more": False}))
        elif asked.method == "POST" and asked.path == "/v1/batches" and self.refuses:
            writer.write(whole(self.refuses, {}))
        elif asked.method == "POST" and asked.path == "/v1/batches" and self.loses_answer:
            writer.close()
        else:
            if asked.path.endswith("/cancel"):
                self.batch["status"] = "cancelling"
            writer.write(whole(200, self.batch))

    def done(self, lines: int, status: str = "in_progress") -> None:
        self.batch["request_counts"]["completed"] = lines
        self.batch["status"] = status
        if status in ("completed", "cancelled"):
            self.batch["output_file_id"] = "file-2"
            body = {"usage": {"prompt_tokens": 5, "completion_tokens": 7}}
            line = json.dumps({"custom_id": "c", "response": {"status_code": 200, "body": body}})
            self.output = "\n".join([line] * lines).encode()


@asynccontextmanager
async def before_hosted(
    tmp_path: Path,
    model: Mapping[str, Any] | None = None,
    gateway: Mapping[str, Any] | None = None,
    **limits: Any,
) -> AsyncIterator[tuple[Staged, Hosted]]:
    hosted = Hosted()
    async with ScriptedUpstream(hosted.answer) as upstream:
        public = {"name": "public", "targets": ("up/m",), "price_in": 0.0, "price_out": 1_000_000.0}
        values = {
            "upstreams": [{"name": "up", "kind": "openai", "url": upstream.url, "probe_s": 0.0}],
            "models": [public | dict(model or {})],
            "gateway": {"output_estimate": 1, "batch_poll_s": 3600.0} | dict(gateway or {}),
        }
        async with staged(tmp_path, values, {"limits": Limits(**limits)}) as stage:
            yield stage, hosted


async def test_lines_of_a_hosted_batch_are_settled_by_their_estimate_and_booked_by_the_output(
    tmp_path: Path,
) -> None:
    async with before_hosted(tmp_path, daily_usd=100.0) as (stage, hosted):
        batch = (await submit(stage.http, lines(4, max_tokens=20))).json()
        hosted.done(2)
        await stage.batches.look_after_all()
        (owned,) = await stage.parts.owned.pending("batch")
        assert (owned.meta["spent_pusd"], owned.meta["held_pusd"]) == (40 * DOLLAR, 80 * DOLLAR)
        hosted.done(4, "completed")
        row = await booked(stage, batch["id"])
        assert (row["tokens_in"], row["tokens_out"]) == (20, 28)
        assert (row["cost_pusd"], row["usage_source"]) == (28 * DOLLAR, "reported")


async def test_a_hosted_batch_whose_output_is_gone_is_booked_by_its_answered_lines(tmp_path: Path) -> None:
    async with before_hosted(tmp_path, daily_usd=100.0) as (stage, hosted):
        batch = (await submit(stage.http, lines(4, max_tokens=20))).json()
        hosted.done(3, "completed")  # between two looks
        hosted.output = b""
        row = await booked(stage, batch["id"])
        assert (row["cost_pusd"], row["usage_source"]) == (60 * DOLLAR, "estimated")


async def test_a_hosted_batch_without_output_and_counts_is_booked_as_it_was_last_seen(tmp_path: Path) -> None:
    async with before_hosted(tmp_path, daily_usd=100.0) as (stage, hosted):
        batch = (await submit(stage.http, lines(4, max_tokens=20))).json()
        hosted.done(3)
        await stage.batches.look_after_all()
        hosted.done(0, "completed")
        hosted.output = b""
        row = await booked(stage, batch["id"])
        assert (row["cost_pusd"], row["usage_source"]) == (60 * DOLLAR, "estimated")


async def test_answered_lines_without_usage_are_estimated_and_marked(tmp_path: Path) -> None:
    async with before_hosted(tmp_path, daily_usd=100.0) as (stage, hosted):
        batch = (await submit(stage.http, lines(4, max_tokens=20))).json()
        hosted.done(2, "completed")
        for status in (200, 400):
            line = {"custom_id": "c", "response": {"status_code": status, "body": {}}}
            hosted.output += b"\n" + json.dumps(line).encode()
        row = await booked(stage, batch["id"])
        assert (row["cost_pusd"], row["usage_source"]) == ((2 * 7 + 20) * DOLLAR, "estimated")


@pytest.mark.parametrize(("status", "is_held"), [(429, False), (500, True)])
async def test_a_batch_that_its_upstream_refused_holds_no_money(
    tmp_path: Path, status: int, is_held: bool
) -> None:
    async with before_hosted(tmp_path, daily_usd=100.0) as (stage, hosted):
        hosted.refuses = status
        assert (await submit(stage.http, lines(4, max_tokens=20))).status_code >= 400
        assert bool(await stage.parts.owned.pending("batch_order")) == is_held
        assert (await chat(stage, max_tokens=21) == 429) == is_held


async def test_a_smaller_budget_stops_a_batch_that_runs(tmp_path: Path) -> None:
    async with before_hosted(tmp_path, daily_usd=100.0) as (stage, hosted):
        batch = (await submit(stage.http, lines(4, max_tokens=20))).json()
        hosted.done(2)
        await lower_budget(stage, 50.0)
        await stage.batches.look_after_all()
        assert hosted.batch["status"] == "cancelling"
        hosted.done(3, "cancelled")
        row = await booked(stage, batch["id"])
        assert (row["outcome"], row["cost_pusd"]) == ("limited", 21 * DOLLAR)


async def lower_budget(stage: Staged, usd: float) -> None:
    settings = stage.parts.settings
    store = Store(settings.store, settings.state_dir)
    (key,) = stage.parts.keys.table.keys()
    change = Limits(daily_usd=usd)
    await Registry(store).update_key(
        key.id, lambda one: msgspec.structs.replace(one, limits=change), Actor("test", "127.0.0.1")
    )
    await store.close()
    await stage.parts.keys.refresh()


async def test_a_batch_whose_answer_was_lost_is_found_and_held_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with before_hosted(tmp_path, daily_usd=100.0) as (stage, hosted):
        hosted.loses_answer = True
        lost = await submit(stage.http, lines(4, max_tokens=20))
        assert lost.status_code >= 500
        assert await chat(stage, max_tokens=21) == 429
        monkeypatch.setattr("ridgeline.gateway.objects.batch_booking.ORDER_S", -1e6)
        hosted.done(4, "completed")
        row = await booked(stage, "batch_1")
        assert row["cost_pusd"] == 28 * DOLLAR
        assert (await stage.http.get("/v1/batches/batch_1")).status_code == 200


async def test_an_order_whose_batch_was_never_made_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with before_hosted(tmp_path, daily_usd=100.0) as (stage, hosted):
        hosted.loses_answer = True
        hosted.batch["input_file_id"] = "file-of-somebody-else"
        await submit(stage.http, lines(4, max_tokens=20))
        monkeypatch.setattr("ridgeline.gateway.objects.batch_booking.ORDER_S", -1e6)
        await stage.batches.look_after_all()
        assert await stage.parts.owned.pending("batch_order") == []
        refused = await stage.http.post(CHAT, json=asking("public", max_tokens=100))
        assert refused.status_code != 429


async def test_an_order_at_an_upstream_that_was_removed_keeps_no_other_batch_from_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ridgeline.gateway.objects.batch_booking.ORDER_S", -1e6)
    async with before_hosted(tmp_path, daily_usd=100.0) as (stage, hosted):
        owned = stage.parts.owned
        await owned.remember("order_1", "t", "removed", "batch_order", {"input_file_id": "file-0"})
        batch = (await submit(stage.http, lines(4, max_tokens=20))).json()
        hosted.done(4, "completed")
        await stage.batches.look_after_all()
        assert await owned.pending("batch") == []
        assert (await booked(stage, batch["id"]))["cost_pusd"] == 28 * DOLLAR
        monkeypatch.setattr("ridgeline.gateway.objects.batch_booking.UNKNOWN_S", -1.0)
        await stage.batches.look_after_all()
        assert await owned.pending("batch_order") == []


async def test_a_batch_whose_key_was_deleted_gives_its_team_back_what_it_did_not_use(tmp_path: Path) -> None:
    by = Actor("test", "127.0.0.1")
    async with before_hosted(tmp_path) as (stage, hosted):
        settings = stage.parts.settings
        registry = Registry(store := Store(settings.store, settings.state_dir))
        team = await registry.create_team(lambda id: Team(id, "team", Limits(daily_usd=100.0)), by)
        key, secret = await stage.new_key(name="first", team=team.team.id)
        _, other = await stage.new_key(name="second", team=team.team.id)
        async with stage.client(secret) as http:
            batch = (await submit(http, lines(4, max_tokens=20))).json()
        await registry.revoke_key(key.id, by)
        await registry.delete_key(key.id, by)
        await store.close()
        await stage.parts.keys.refresh()
        hosted.done(4, "completed")
        await booked(stage, batch["id"])
        async with stage.client(other) as http:
            answer = await http.post(CHAT, json=asking("public", max_tokens=100 - 28 + 1))
            assert answer.status_code == 429
            answer = await http.post(CHAT, json=asking("public", max_tokens=100 - 28))
            assert answer.status_code == 200


async def test_a_batch_without_a_key_is_settled_at_its_model(tmp_path: Path) -> None:
    async with before_hosted(
        tmp_path, model={"tokens_per_minute": 1000}, gateway={"require_keys": False}
    ) as (stage, hosted):
        async with stage.client("") as http:
            batch = (await submit(http, lines(4, max_tokens=20))).json()
        counts = stage.parts.limiter._local.counts["model", "public"]
        assert len(counts.background) == 1
        hosted.done(4, "completed")
        await booked(stage, batch["id"])
        assert (counts.background, counts.reserved_pusd) == ({}, 0)


async def test_reported_usage_counts_without_an_output_file_where_long_prompts_cost_more(
    tmp_path: Path,
) -> None:
    usage = {"prompt_tokens": 20, "completion_tokens": 10}
    shown = {"status": "completed", "usage": usage, "request_counts": {"total": 2, "completed": 2}}
    prices = TokenPrices(out=3, above=((1000, TokenPrices(out=9)),))
    async with before_hosted(tmp_path) as (stage, _):
        used = await used_in_all(
            stage.parts.upstreams, Owned("b", "t", "up", "batch"), msgspec.convert(shown, Batch), prices
        )
    assert (used.cost_pusd, used.usage.source) == (prices.cost(used.usage), "reported")
    assert used.cost_pusd > 0
