"""Batches are held to the budgets of their key: reserved when made, stopped when spent, booked once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from ridgeline.gateway.accounting.ledger import Ledger
from ridgeline.gateway.tenants.keys import Limits
from tests.gateway.batch_budget_stage import DOLLAR, booked, chat, completed, lines
from tests.gateway.limits.shared_redis import PATIENT
from tests.gateway.object_stage import batch_line, ended, our_server, submit, upload
from tests.gateway.stage import CHAT, Staged, asking, staged
from tests.patience import PATIENCE_S
from tests.server.batch_stage import taking_turns
from tests.server.scripted_client import Script, hang, say

SPOKEN = 10  # tokens of an answer, a byte each
SAYS = say("ten tokens")


@pytest.fixture(params=["memory", "redis"])
def limits_in(request: pytest.FixtureRequest, redis_url: str) -> dict[str, Any]:
    if request.param == "memory":
        return {}
    return {"redis": {"url": redis_url, "prefix": f"test:{request.node.name}", **PATIENT}}


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
        values["redis"] = {"url": redis_url, "prefix": f"test:{secret}", **PATIENT}
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
