"""Batches are held to the budgets of their key: reserved when made, stopped when spent, booked once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from openai import AsyncOpenAI

from ridgeline.gateway.accounting.ledger import Ledger
from ridgeline.gateway.accounting.prices import TokenPrices
from ridgeline.gateway.objects.batch_use import Batch, used_in_all
from ridgeline.gateway.tenants.audit import Actor
from ridgeline.gateway.tenants.keys import Limits, Team
from ridgeline.gateway.tenants.owned import Owned
from ridgeline.gateway.tenants.registry import Registry
from ridgeline.gateway.tenants.store import Store
from tests.gateway.object_stage import batch_line, ended, our_server, submit, upload
from tests.gateway.scripted_upstream import Asked, ScriptedUpstream, whole
from tests.gateway.stage import CHAT, Staged, asking, staged
from tests.patience import PATIENCE_S
from tests.server.batch_stage import taking_turns
from tests.server.scripted_client import Script, hang, say

DOLLAR = 10**12
SPOKEN = 10  # tokens of an answer, a byte each
SAYS = say("ten tokens")


@pytest.fixture(params=["memory", "redis"])
def limits_in(request: pytest.FixtureRequest, redis_url: str) -> dict[str, Any]:
    if request.param == "memory":
        return {}
    return {"redis": {"url": redis_url, "prefix": f"test:{request.node.name}", "timeout_ms": 5000}}


@asynccontextmanager
async def a_dollar_a_token(
    tmp_path: Path, more: Mapping[str, Any], script: Script = SAYS, **limits: Any
) -> AsyncIterator[tuple[Staged, dict[str, Any]]]:
    """A written token costs 1 USD, a read one nothing; 1 token is reserved where no limit is named."""
    async with our_server(tmp_path, script) as values:
        values["models"][0] |= {"price_in": 0.0, "price_out": 1_000_000.0}
        values |= {"gateway": {"output_estimate": 1, "batch_poll_s": 3600.0}, **more}
        async with staged(tmp_path, values, {"limits": Limits(**limits)}) as stage:
            yield stage, values


def lines(count: int, **body: Any) -> str:
    return "\n".join(batch_line(number, body=body) for number in range(count))


async def chat(stage: Staged, max_tokens: int = 1) -> int:
    answer = await stage.http.post(CHAT, json=asking("public", max_tokens=max_tokens))
    return answer.status_code


async def booked(stage: Staged, batch_id: str) -> dict[str, Any]:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            await stage.batches.look_after_all()
            rows = [row for row in stage.written_rows() if row["request_id"] == batch_id]
            if rows:
                (row,) = rows
                return row
            await asyncio.sleep(0.02)


async def completed(stage: Staged, batch_id: str, count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            batch = (await stage.http.get(f"/v1/batches/{batch_id}")).json()
            if batch["request_counts"]["completed"] >= count:
                return
            await asyncio.sleep(0.01)


async def test_a_batch_beyond_the_budget_is_refused_before_anything_is_made(
    tmp_path: Path, limits_in: dict[str, Any]
) -> None:
    async with a_dollar_a_token(tmp_path, limits_in, daily_usd=100.0) as (stage, _):
        refused = await submit(stage.http, lines(11, max_tokens=10))
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "request_over_budget")
        assert await chat(stage, max_tokens=20) == 200
        refused = await submit(stage.http, lines(10, max_tokens=10))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "budget_exceeded")
        assert (await stage.http.get("/v1/batches")).json()["data"] == []


async def test_a_running_batch_holds_its_estimate_and_gives_back_what_it_did_not_use(
    tmp_path: Path, limits_in: dict[str, Any]
) -> None:
    script = taking_turns(SAYS, hang())
    async with a_dollar_a_token(tmp_path, limits_in, script, daily_usd=100.0) as (stage, _):
        batch = (await submit(stage.http, lines(2, max_tokens=45))).json()
        assert await chat(stage, max_tokens=11) == 429
        await completed(stage, batch["id"], 1)
        await stage.batches.look_after_all()  # one line is settled: 10 of its 45 dollars
        assert await chat(stage, max_tokens=46) == 429
        await stage.http.post(f"/v1/batches/{batch['id']}/cancel")
        await ended(stage.http, batch["id"])
        row = await booked(stage, batch["id"])
        assert (row["tokens_out"], row["cost_pusd"]) == (SPOKEN, SPOKEN * DOLLAR)
        refused = await stage.http.post(CHAT, json=asking("public", max_tokens=100 - SPOKEN + 1))
        assert refused.json()["error"]["code"] == "budget_exceeded"


async def test_a_batch_that_uses_more_than_its_estimate_is_stopped_at_the_budget(
    tmp_path: Path, limits_in: dict[str, Any]
) -> None:
    script = taking_turns(SAYS, SAYS, hang())
    async with a_dollar_a_token(tmp_path, limits_in, script, daily_usd=25.0) as (stage, _):
        batch = (await submit(stage.http, lines(8))).json()  # 8 tokens by the estimate, 10 each in truth
        await completed(stage, batch["id"], 2)
        await stage.batches.look_after_all()
        seen = await ended(stage.http, batch["id"])
        assert seen["status"] == "cancelled"
        (error,) = seen["errors"]["data"]
        assert (error["code"], "20 USD" in error["message"]) == ("budget_exceeded", True)
        (listed,) = (await stage.http.get("/v1/batches")).json()["data"]
        assert listed["errors"] == seen["errors"]
        row = await booked(stage, batch["id"])
        assert (row["outcome"], row["error_code"]) == ("limited", "budget_exceeded")
        assert row["cost_pusd"] == 2 * SPOKEN * DOLLAR
        assert await chat(stage, max_tokens=6) == 429
        async with AsyncOpenAI(base_url=f"{stage.url}/v1", api_key=stage.secret) as sdk:
            shown = await sdk.batches.retrieve(batch["id"])
            assert shown.errors is not None
            assert shown.errors.data is not None
            assert shown.errors.data[0].code == "budget_exceeded"


async def test_a_batch_goes_on_while_its_budget_has_room(tmp_path: Path, limits_in: dict[str, Any]) -> None:
    script = taking_turns(SAYS, SAYS, hang())
    async with a_dollar_a_token(tmp_path, limits_in, script, daily_usd=60.0) as (stage, _):
        batch = (await submit(stage.http, lines(4))).json()
        await completed(stage, batch["id"], 2)
        await stage.batches.look_after_all()
        await stage.batches.look_after_all()
        assert (await stage.http.get(f"/v1/batches/{batch['id']}")).json()["status"] == "in_progress"


async def test_a_batch_that_may_cost_more_than_is_left_is_looked_at_more_often(tmp_path: Path) -> None:
    script = taking_turns(SAYS, SAYS, hang())
    async with a_dollar_a_token(tmp_path, {}, script, daily_usd=50.0) as (stage, _):
        batch = (await submit(stage.http, lines(6))).json()
        await completed(stage, batch["id"], 2)  # 20 dollars, and at this pace 40 more
        await stage.batches.look_after_all()
        assert stage.batches._tight == {batch["id"]}
        assert (await stage.http.get(f"/v1/batches/{batch['id']}")).json()["status"] == "in_progress"
        await stage.http.post(f"/v1/batches/{batch['id']}/cancel")
        await ended(stage.http, batch["id"])
        await booked(stage, batch["id"])
        assert not stage.batches._tight


async def test_a_restart_neither_frees_nor_doubles_what_a_batch_costs(
    tmp_path: Path, limits_in: dict[str, Any]
) -> None:
    script = taking_turns(SAYS, hang())
    async with a_dollar_a_token(tmp_path, limits_in, script, daily_usd=100.0) as (stage, values):
        batch = (await submit(stage.http, lines(2, max_tokens=45))).json()
        await completed(stage, batch["id"], 1)
        await stage.batches.look_after_all()
        secret = stage.secret
        async with staged(tmp_path, values) as again, again.client(secret) as http:  # a second process
            body = asking("public", max_tokens=46)
            assert (await http.post(CHAT, json=body)).status_code == 429
            await http.post(f"/v1/batches/{batch['id']}/cancel")
            await ended(http, batch["id"])
            row = await booked(again, batch["id"])
            assert row["cost_pusd"] == SPOKEN * DOLLAR
            body = asking("public", max_tokens=100 - SPOKEN + 1)
            assert (await http.post(CHAT, json=body)).status_code == 429


def renamed(name: str, new_name: str) -> Any:
    """A store without its table does not answer."""
    yield f"ALTER TABLE {name} RENAME TO {new_name}", ()


async def test_a_store_that_is_away_delays_no_start_and_batches_are_held_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ridgeline.gateway.process.assembly.RESTORE_S", 0.05, raising=False)
    async with a_dollar_a_token(tmp_path, {}, hang(), daily_usd=100.0) as (stage, values):
        await submit(stage.http, lines(2, max_tokens=45))
        store, secret = stage.parts.owned._store, stage.secret
        await store.write(renamed("ridgeline_owned", "away"))
        async with staged(tmp_path, values) as again, again.client(secret) as http:
            assert (await http.get("/v1/models")).status_code == 200
            await store.write(renamed("away", "ridgeline_owned"))
            await asyncio.wait_for(again.batches.restored.wait(), PATIENCE_S)
            assert (await http.post(CHAT, json=asking("public", max_tokens=11))).status_code == 429


async def test_a_ledger_that_does_not_answer_delays_no_start(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ridgeline.gateway.process.assembly.RESTORE_S", 0.05, raising=False)
    answers = asyncio.Event()

    async def spent(ledger: Ledger, kind: str, id: str, since_ms: int) -> int:
        await answers.wait()
        return 0

    async with a_dollar_a_token(tmp_path, {}, hang(), daily_usd=100.0) as (stage, values):
        await submit(stage.http, lines(2, max_tokens=45))
        secret = stage.secret
        monkeypatch.setattr(Ledger, "spent", spent)
        values["redis"] = {"url": redis_url, "prefix": f"test:{secret}", "timeout_ms": 5000}
        async with (
            asyncio.timeout(PATIENCE_S),
            staged(tmp_path, values) as again,
            again.client(secret) as http,
        ):
            assert not again.batches.restored.is_set()
            answers.set()
            assert (await http.post(CHAT, json=asking("public", max_tokens=11))).status_code == 429


def unsettled(batch_id: str) -> Any:
    """As after a gateway that died when the row was written, and the store did not know it yet."""
    yield "UPDATE ridgeline_owned SET pending = 1 WHERE object_id = ?", (batch_id,)


async def test_the_row_of_a_gateway_that_died_before_it_said_so_counts_once(
    tmp_path: Path, limits_in: dict[str, Any]
) -> None:
    async with a_dollar_a_token(tmp_path, limits_in, daily_usd=100.0) as (stage, values):
        batch = (await submit(stage.http, lines(2, max_tokens=20))).json()
        await ended(stage.http, batch["id"])
        await booked(stage, batch["id"])
        await stage.parts.owned._store.write(unsettled(batch["id"]))
        secret = stage.secret
        async with staged(tmp_path, values) as again, again.client(secret) as http:
            await again.batches.look_after_all()
            assert await again.parts.owned.pending("batch") == []
            left = 100 - 2 * SPOKEN
            assert (await http.post(CHAT, json=asking("public", max_tokens=left + 1))).status_code == 429
            assert (await http.post(CHAT, json=asking("public", max_tokens=left))).status_code == 200


async def test_an_output_file_is_booked_before_it_is_deleted(tmp_path: Path) -> None:
    async with a_dollar_a_token(tmp_path, {}, daily_usd=100.0) as (stage, _):
        batch = (await submit(stage.http, lines(2, max_tokens=20))).json()
        done = await ended(stage.http, batch["id"])
        deleted = await stage.http.delete(f"/v1/files/{done['output_file_id']}")
        assert deleted.status_code == 200
        row = await booked(stage, batch["id"])
        assert row["cost_pusd"] == 2 * SPOKEN * DOLLAR
        assert await chat(stage, max_tokens=100 - 2 * SPOKEN + 1) == 429


async def test_the_tokens_of_a_whole_batch_are_reserved(tmp_path: Path, limits_in: dict[str, Any]) -> None:
    async with a_dollar_a_token(tmp_path, limits_in, tokens_per_minute=1000) as (stage, _):
        assert (await submit(stage.http, lines(2, max_tokens=400))).status_code == 200
        refused = await stage.http.post(CHAT, json=asking("public", max_tokens=150))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        refused = await submit(stage.http, lines(2, max_tokens=600))
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "request_over_limit")


# ---- an upstream that counts lines, and tells the usage at the end ----


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
    (key,) = stage.parts.policy.policy.keys()
    change = Limits(daily_usd=usd)
    await Registry(store).update_key(
        key.id, lambda one: msgspec.structs.replace(one, limits=change), Actor("test", "127.0.0.1")
    )
    await store.close()
    await stage.parts.policy.refresh()


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
        await stage.parts.policy.refresh()
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


async def test_a_line_that_asks_for_too_much_is_named_when_the_file_is_uploaded(tmp_path: Path) -> None:
    async with a_dollar_a_token(tmp_path, {}) as (stage, _):
        refused = await upload(stage.http, batch_line(1) + "\n" + batch_line(2, body={"max_tokens": -1}))
        assert refused.status_code == 400
        assert "line 2: max_tokens" in refused.json()["error"]["message"]


async def test_money_that_other_requests_spend_is_not_there_for_the_batch(tmp_path: Path) -> None:
    script = taking_turns(*[SAYS] * 5, hang())
    async with a_dollar_a_token(tmp_path, {}, script, daily_usd=60.0) as (stage, _):
        assert [await chat(stage, max_tokens=10) for _ in range(3)] == [200] * 3  # 30 dollars
        batch = (await submit(stage.http, lines(8))).json()
        await completed(stage, batch["id"], 2)  # 20 more, and 10 are left: less than the next two lines cost
        await stage.batches.look_after_all()
        assert (await ended(stage.http, batch["id"]))["status"] == "cancelled"


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
