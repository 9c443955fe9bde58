"""Usage reports: sums that are exact, by every group, from both stores, over the admin routes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from ridgeline.gateway.accounting.admin_endpoints import usage_routes
from ridgeline.gateway.accounting.errors import LedgerError
from ridgeline.gateway.accounting.store.places import postgres_ledger, sqlite_ledger
from ridgeline.gateway.accounting.store.reader import LedgerReader
from ridgeline.gateway.accounting.store.records import line_of
from ridgeline.gateway.accounting.store.reports import Reports, UsageQuery, total, usage_query, usd
from ridgeline.gateway.accounting.store.table import LedgerStore
from ridgeline.gateway.errors import GatewayError
from tests.gateway.accounting.books import opening, row

DAY = 86_400_000
MILLIONS = 8_000_000 * 10**12  # picodollars; two of them do not fit 64 bits

ROWS = [
    row(1, at_ms=DAY, key_id="key_a", model="small", cost_pusd=MILLIONS),
    row(2, at_ms=DAY + 5, key_id="key_b", model="small", cost_pusd=MILLIONS + 1),
    row(3, at_ms=2 * DAY - 1, key_id="key_a", model="large", outcome="client_gone", cost_pusd=7),
    row(4, at_ms=2 * DAY, key_id="key_a", model="large", outcome="cached", tokens_in=0, tokens_out=0),
    row(5, at_ms=3 * DAY, key_id="key_b", outcome="lost", usage_source="estimated", cost_pusd=999_999),
]


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LedgerStore]:
    made: LedgerStore
    if request.param == "sqlite":
        made = sqlite_ledger(tmp_path / "ledger.sqlite")
    else:
        made = postgres_ledger(request.getfixturevalue("postgres_url"))
    made.insert(ROWS)
    yield made
    made.close()


def test_sums_are_exact_beyond_64_bits(store: LedgerStore) -> None:
    (line,) = Reports(store).usage(UsageQuery())
    assert line.cost_pusd == sum(one.cost_pusd for one in ROWS) == 2 * MILLIONS + 1_001_011
    assert line.cost_usd == "16000000.000001001011"
    assert line.tokens_in == sum(one.tokens_in for one in ROWS)
    assert (line.requests, line.answered, line.broken_off, line.from_cache, line.estimated) == (5, 3, 2, 1, 1)


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        ("key", {("key_a",): 3, ("key_b",): 2}),
        ("day", {("1970-01-02",): 3, ("1970-01-03",): 1, ("1970-01-04",): 1}),
        ("model,key", {("large", "key_a"): 2, ("small", "key_a"): 1, ("small", "key_b"): 2}),
        ("outcome", {("cached",): 1, ("client_gone",): 1, ("lost",): 1, ("ok",): 2}),
    ],
)
def test_groups_add_up_to_the_whole(
    store: LedgerStore, by: str, expected: dict[tuple[str, ...], int]
) -> None:
    lines = Reports(store).usage(usage_query(by, None, None, {}))
    assert {tuple(line.group.values()): line.requests for line in lines} == expected
    (whole,) = Reports(store).usage(UsageQuery())
    assert total(lines) == whole


def test_days_of_a_zone_hold_its_own_rows_and_add_up_to_the_whole(store: LedgerStore) -> None:
    query = usage_query("day", "1970-01-01", "1970-01-04", {}, "America/Los_Angeles")
    lines = Reports(store).usage(query)
    found = {line.group["day"]: line.requests for line in lines}
    assert found == {"1970-01-01": 2, "1970-01-02": 2, "1970-01-03": 1}  # eight hours behind UTC
    assert total(lines) == Reports(store).usage(UsageQuery())[0]


def test_days_with_a_change_of_clocks_have_23_and_25_hours() -> None:
    days = dict(usage_query("day", "2026-03-28", "2026-10-26", {}, "Europe/Berlin").days)
    assert days["2026-03-29"] - days["2026-03-28"] == 23 * 3_600_000
    assert days["2026-10-25"] - days["2026-10-24"] == 25 * 3_600_000
    assert list(days)[-1] == "2026-10-26"


def test_times_and_names_choose_rows(store: LedgerStore) -> None:
    def count(since: str | None, until: str | None, **only: str) -> int:
        (line,) = Reports(store).usage(usage_query("", since, until, only))
        return line.requests

    assert count("1970-01-03", None) == 2
    assert count(None, "1970-01-02") == 3  # the whole day
    assert count(None, "1970-01-02T00:00:00.005Z") == 1  # up to it
    assert count("1970-01-02T01:00+01:00", "1970-01-02", key="key_b") == 1
    assert count(None, None, key="key_a", model="large") == 2
    assert count("1d", None) == 0
    assert count(None, None, key="' OR '1'='1") == 0


def test_what_a_key_has_spent_since_a_moment(store: LedgerStore) -> None:
    reports = Reports(store)
    assert reports.spent("key", "key_b", 2 * DAY) == 999_999
    assert reports.spent("key", "nobody", 0) == 0


def test_rows_that_wait_in_files_are_counted_once(store: LedgerStore, tmp_path: Path) -> None:
    folder = tmp_path / "ledger" / "w0"
    folder.mkdir(parents=True)
    lines = [line_of(ROWS[0]), line_of(opening(70)), line_of(row(71)), line_of(row(72)), b"R torn"]
    (folder / "0000000001.wal").write_bytes(b"".join(lines))
    assert Reports(store, tmp_path / "ledger").waiting() == 2


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("nobody", None, None), "by"),
        (("key", "yesterday", None), "since"),
        (("", None, "9999-12-31"), "until"),
    ],
)
def test_words_that_mean_nothing_are_named(words: tuple[str, str | None, str | None], names: str) -> None:
    with pytest.raises(LedgerError, match=f"^{names}: "):
        usage_query(*words, {})


@pytest.mark.parametrize(
    ("zone", "since", "names"),
    [
        ("Mars/Olympus", "2026-01-01", "zone"),
        ("../etc/passwd", "2026-01-01", "zone"),
        ("Asia/Tokyo", None, "since"),
        ("Asia/Tokyo", "2020-01-01", "since"),
    ],
)
def test_a_zone_is_checked(zone: str, since: str | None, names: str) -> None:
    with pytest.raises(LedgerError, match=f"^{names}: "):
        usage_query("day", since, None, {}, zone)


def test_dollars_are_written_to_the_last_picodollar() -> None:
    assert [usd(value) for value in (0, 1, 10**12, 1_250_000_000, -5 * 10**11)] == [
        "0",
        "0.000000000001",
        "1",
        "0.00125",
        "-0.5",
    ]


# ---- the admin's routes ----


@pytest.fixture
async def http(tmp_path: Path) -> Iterator[httpx.AsyncClient]:  # type: ignore[misc]
    made = sqlite_ledger(tmp_path / "ledger.sqlite")
    made.insert([*ROWS, row(6, at_ms=DAY, key_id="=HYPERLINK()", team_id='a,"b"')])
    reader = LedgerReader(Reports(made, tmp_path / "ledger"))
    app = refusing(Router(list(usage_routes(reader))))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://admin") as client:
        yield client
    await reader.close()


def refusing(app: Router) -> Callable[..., object]:
    """As the admin's gate does."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except GatewayError as error:
            answer: Response = JSONResponse({"param": error.param, "code": error.code}, error.status)
            await answer(scope, Request(scope).receive, send)

    return guarded


async def test_the_admin_api_sums_and_totals(http: httpx.AsyncClient) -> None:
    answer = (await http.get("/admin/usage", params={"by": "model", "key": "key_a"})).json()
    assert [(line["group"]["model"], line["requests"]) for line in answer["data"]] == [
        ("large", 2),
        ("small", 1),
    ]
    assert answer["total"]["cost_usd"] == "8000000.000000001011"
    assert answer["waiting_rows"] == 0


async def test_csv_has_exact_dollars_and_no_formulas(http: httpx.AsyncClient) -> None:
    answer = await http.get("/admin/usage", params={"by": "key,team", "format": "csv", "until": "1970-01-02"})
    head, *lines = answer.text.splitlines()
    assert head.startswith("key,team,requests,answered,")
    assert lines[0].startswith('\'=HYPERLINK(),"a,""b""",1,1,')
    assert lines[2].endswith(",8000000.000000000001")


async def test_one_request_has_its_row(http: httpx.AsyncClient) -> None:
    found = (await http.get("/admin/usage/req_000003")).json()
    assert (found["outcome"], found["model"], found["cost_pusd"]) == ("client_gone", "large", 7)
    assert (await http.get("/admin/usage/req_999999")).status_code == 404


@pytest.mark.parametrize("query", ["by=nobody", "since=x", "until=x", "format=xml", "surprise=1"])
async def test_a_wrong_parameter_is_a_400_that_names_it(http: httpx.AsyncClient, query: str) -> None:
    answer = await http.get(f"/admin/usage?{query}")
    assert (answer.status_code, answer.json()["param"]) == (400, query.partition("=")[0])
