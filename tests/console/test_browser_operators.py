"""The console of a gateway's administrators and of a fleet's operators, in a real browser."""

from __future__ import annotations

import base64
import contextlib
import gzip
import json
import time
from collections.abc import AsyncIterator, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ridgeline.fleet.controller.api.control_app import control_app
from ridgeline.fleet.controller.api.status import FleetStatus, ModelStatus, ReplicaStatus
from ridgeline.fleet.controller.board import Board
from ridgeline.fleet.controller.store import Event
from ridgeline.gateway.accounting.admin_endpoints import usage_routes
from ridgeline.gateway.accounting.store.places import sqlite_ledger
from ridgeline.gateway.accounting.store.reader import LedgerReader
from ridgeline.gateway.accounting.store.reports import Reports, usd
from ridgeline.gateway.admin.app import admin_app
from ridgeline.gateway.admin.chat import ChatForwarding, own_origin
from ridgeline.gateway.admin.config import AdminConfig
from ridgeline.gateway.admin.console import console_routes
from ridgeline.gateway.admin.credentials import AdminKeys, key_file, read_admin_keys
from ridgeline.gateway.tenants.config import StoreConfig
from ridgeline.gateway.tenants.store import Store
from tests.console.browser import launched, tab_of, until
from tests.console.test_browser import AXE
from tests.console.threaded_stage import listening, threaded
from tests.gateway.accounting.books import row

ZONES = ("America/Los_Angeles", "Asia/Kolkata", "Pacific/Auckland")
HOURS = 24 * 9
# A row every 90 minutes up to now, so that the zones' days hold different ones.
ROWS = [
    row(n, at_ms=int((time.time() - n * 5400) * 1000), cost_pusd=10**9 * 7 ** (n % 5) + n, model=f"m{n % 3}")
    for n in range(HOURS * 2 // 3)
]
TOKEN = "a-control-token"
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
DAYS = """Object.fromEntries(
  [...document.querySelectorAll("tr[data-day]")].map(({ dataset }) => [dataset.day, dataset.cost]))"""
TOTALS = """[...document.querySelectorAll("[data-total]")].map(({ dataset }) => dataset.total)"""
GOOD = """document.querySelectorAll(".badge[data-tone=good]").length"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as one:
        yield one


class Public:
    """In place of the gateway's public port: two models, and an answer whose row is the second of ROWS."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.keys: set[str] = set()
        routes = [
            Route("/v1/models", self.models),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes)

    async def models(self, request: Request) -> Response:
        self.keys.add(request.headers["authorization"])
        return JSONResponse({"data": [{"id": "m0"}, {"id": "m1"}]})

    async def chat(self, request: Request) -> Response:
        self.keys.add(request.headers["authorization"])
        self.asked.append(await request.json())
        chunks: list[dict[str, Any]] = [
            {"choices": [{"delta": {"content": "It is a "}}]},
            {"choices": [{"delta": {"content": "ridge."}, "finish_reason": "stop"}]},
            {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4}},
        ]
        body = "".join(f"data: {json.dumps(one)}\n\n" for one in chunks) + "data: [DONE]\n\n"
        return Response(body, media_type="text/event-stream", headers={"x-request-id": ROWS[1].request_id})


@contextlib.asynccontextmanager
async def admin_console(folder: Path, public: Public | None = None) -> AsyncIterator[tuple[str, str]]:
    """The admin API with a ledger: its URL and the admin key."""
    if public is not None:
        async with listening(public.app) as url, _admin_console(folder, url) as found:
            yield found
    else:
        async with _admin_console(folder, "") as found:
            yield found


@contextlib.asynccontextmanager
async def _admin_console(folder: Path, public_url: str) -> AsyncIterator[tuple[str, str]]:
    ledger = sqlite_ledger(folder / "ledger.sqlite")
    ledger.insert(ROWS)
    store, config = Store(StoreConfig(), folder), AdminConfig(wrong_key_delay_s=0.0)
    keys, reader = AdminKeys(key_file(config, folder)), LedgerReader(Reports(ledger))
    routes = [*usage_routes(reader), *console_routes(public_url)]
    if public_url:
        routes += ChatForwarding(own_origin("127.0.0.1", int(public_url.rpartition(":")[2]), False)).routes()
    app = admin_app(store, config, keys, endpoints=("chat",), extra_routes=routes)
    async with listening(app) as url:
        yield url, read_admin_keys(keys.path)[0][1]
    await reader.close()
    await store.close()


def signed_in(tab: Any, key: str, fragment: str = "") -> Any:
    page = tab.open(fragment)
    page.wait_for_selector("dialog[open] input:focus")
    page.keyboard.type(key)
    page.keyboard.press("Enter")
    return page


def test_totals_and_days_are_those_of_the_ledger_in_three_time_zones(browser: Any, tmp_path: Path) -> None:
    with threaded(lambda: admin_console(tmp_path)) as (url, key):
        for zone in ZONES:
            with tab_of(browser, url, timezone_id=zone) as tab:
                page = signed_in(tab, key)
                page.get_by_role("tab", name="7 days").click()
                today = datetime.now(ZoneInfo(zone)).date()
                first = (today - timedelta(days=6)).isoformat()
                expected: dict[str, int] = {}
                for one in ROWS:
                    day = datetime.fromtimestamp(one.at_ms / 1000, ZoneInfo(zone)).date().isoformat()
                    if day >= first:
                        expected[day] = expected.get(day, 0) + one.cost_pusd
                costs = {day: usd(cost) for day, cost in expected.items()}
                until(page, DAYS, costs)
                until(page, TOTALS, [usd(sum(expected.values()))] * 2)
                assert tab.requests.count("/admin/usage") <= 4


def test_a_new_key_is_shown_once_and_can_be_revoked(browser: Any, tmp_path: Path) -> None:
    script = gzip.decompress(AXE.read_bytes()).decode()
    with threaded(lambda: admin_console(tmp_path)) as (url, key), tab_of(browser, url) as tab:
        page = signed_in(tab, key, "#/keys")
        page.get_by_role("button", name="New key").click()
        page.wait_for_selector("dialog[open] input:focus")
        page.keyboard.type("my app")
        page.get_by_label("US dollars per day").fill("2.5")
        page.get_by_label("Models").fill("gpt-*, small")
        page.keyboard.press("Enter")
        secret = page.locator("dialog pre").inner_text()
        assert len(secret) > 20
        page.get_by_role("button", name="Done").click()
        page.wait_for_selector("tbody tr")
        row = page.locator("tbody tr").inner_text()
        assert "of $2.50" in row
        assert "models: gpt-*, small" in row
        assert secret not in page.content()
        assert key not in page.content()
        for name in ("keys", "spend"):
            page.click(f'nav a[href="#/{name}"]')
            page.wait_for_selector(f'h1:text-is("{name.capitalize()}")')  # then the rows are this page's
            page.wait_for_selector("tbody tr", state="attached")  # Spend's days are folded
            page.evaluate(script)
            for width in (1280, 360):
                page.set_viewport_size({"width": width, "height": 800})
                assert page.evaluate("document.documentElement.scrollWidth") <= width, name
                found = page.evaluate("axe.run().then((result) => result.violations.map((one) => one.id))")
                assert found == [], f"{name}, {width} px"
            page.set_viewport_size({"width": 1280, "height": 800})
        page.click('nav a[href="#/keys"]')
        page.get_by_role("button", name="Revoke my app").click()
        page.get_by_role("button", name="Revoke", exact=True).click()
        page.wait_for_selector("text=No keys yet")


def test_without_the_admin_key_the_page_shows_nothing_and_asks_for_it(browser: Any, tmp_path: Path) -> None:
    with threaded(lambda: admin_console(tmp_path)) as (url, _), tab_of(browser, url) as tab:
        page = signed_in(tab, "wrong")
        page.wait_for_selector("text=The admin key is needed")
        assert page.locator("[data-total]").count() == 0


def test_chat_of_a_gateway_uses_a_clients_key_and_shows_the_ledgers_cost(
    browser: Any, tmp_path: Path
) -> None:
    public = Public()
    with threaded(lambda: admin_console(tmp_path, public)) as (url, key), tab_of(browser, url) as tab:
        page = signed_in(tab, key)
        page.click('nav a[href="#/chat"]')
        page.get_by_role("button", name="Enter the key").click()
        page.wait_for_selector("dialog[open] input:focus")
        page.keyboard.type("a-client's-key")
        page.keyboard.press("Enter")
        page.wait_for_selector(".composer select option", state="attached")
        page.get_by_title("Two models side by side").click()
        pixel = base64.b64decode(PIXEL)
        page.set_input_files("input[type=file]", {"name": "p.png", "mimeType": "image/png", "buffer": pixel})
        page.wait_for_selector(".composer .attached img")
        page.fill("#prompt", "what is it?")
        page.press("#prompt", "Enter")
        cost = usd(ROWS[1].cost_pusd)
        until(page, "document.querySelectorAll('.reply[data-state=done]').length", 2)
        until(page, f"document.body.innerText.split('${cost}').length - 1", 2)
        assert {one["model"] for one in public.asked} == {"m0", "m1"}
        text, image = public.asked[0]["messages"][0]["content"]
        assert text == {"type": "text", "text": "what is it?"}
        assert image["image_url"]["url"] == f"data:image/png;base64,{PIXEL}"
        assert public.keys == {"Bearer a-client's-key"}
        page.get_by_role("button", name="Request").first.click()
        assert page.locator("dialog pre").inner_text().startswith("curl http://127.0.0.1:")
        assert f"curl {url}/" not in page.locator("dialog pre").inner_text()  # clients use the public port


def replica(id: str, state: str) -> ReplicaStatus:
    values = dict.fromkeys(ReplicaStatus.__struct_fields__, 0)
    words = {"version": "v1", "epoch": "e", "url": "http://x", "reason": "", "region": "", "pool": ""}
    more: dict[str, Any] = {"segments": {}, "weights": None, "limit_tokens_per_s": 400.0, "adopted": False}
    return ReplicaStatus(**(values | words | more | {"id": id, "model": "m", "state": state}))


def test_the_fleet_page_shows_replicas_and_decisions_as_they_come(browser: Any) -> None:
    board = Board()
    board.add(Event(1, time.time(), "scale", "m", "", "target 1 → 2: 40 requests wait"))
    words = dict.fromkeys(("rollout", "rollout_to", "rollout_awaits", "last_rollout", "blocked"), "")
    told = "target 2: 40 requests wait"
    model = ModelStatus("m", 2, 1, 1, "v1", True, **words, crash_loop=False, explained=told)
    replicas = [replica("m-1", "ready"), replica("m-2", "starting")]

    def status() -> FleetStatus:
        return FleetStatus("prod", "http://f", 1, 5.0, 1, 1, False, 1, 1, (model,), tuple(replicas))

    commands: Any = SimpleNamespace(status=status, board=board, store=None)

    @contextlib.asynccontextmanager
    async def fleet() -> AsyncIterator[str]:
        async with listening(control_app(commands, TOKEN)) as url:
            yield url
        board.close()

    with threaded(fleet) as url, tab_of(browser, url) as tab:
        page = signed_in(tab, TOKEN)
        page.wait_for_selector("text=40 requests wait")
        assert page.locator("tbody").first.locator("tr").count() == 2
        replicas[1] = replica("m-2", "ready")
        board.recent.append(Event(2, time.time(), "ready", "m", "m-2", "m-2 is ready"))
        page.wait_for_selector("text=m-2 is ready")
        assert page.locator("text=target 1 → 2").count() == 1
        until(page, GOOD, 2)
        page.evaluate(gzip.decompress(AXE.read_bytes()).decode())
        for width in (1280, 360):
            page.set_viewport_size({"width": width, "height": 800})
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            found = page.evaluate("axe.run().then((result) => result.violations.map((one) => one.id))")
            assert found == [], f"{width} px"
