"""`ridgeline gateway usage`: table, CSV and JSON of a ledger, read from its SQLite file."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ridgeline.cli.main import main
from ridgeline.gateway.accounting.store.places import sqlite_ledger
from ridgeline.gateway.accounting.store.records import line_of
from ridgeline.gateway.admin.listener import AdminListener
from ridgeline.gateway.settings import make_settings
from tests.gateway.accounting.books import row


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    store = sqlite_ledger(tmp_path / "ledger.sqlite")
    store.insert(
        [row(number, key_id=f"key_{number % 2}", cost_pusd=10**11 + number) for number in range(1, 6)]
    )
    store.close()
    return tmp_path


def test_the_table_has_exact_dollars_and_a_total(state_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["usage", "--state-dir", str(state_dir)]) == 0
    head, *lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert head[:2] == ["KEY", "REQUESTS"]
    assert lines == [
        ["key_0", "2", "2", "26", "0", "6", "0.200000000006"],
        ["key_1", "3", "3", "39", "0", "9", "0.300000000009"],
        ["total", "5", "5", "65", "0", "15", "0.500000000015"],
    ]


def test_csv_and_json_say_the_same(state_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["usage", "--state-dir", str(state_dir), "--by", "model,key", "--key", "key_1"]
    assert main([*words, "--csv"]) == 0
    (line,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (line["model"], line["key"], line["tokens_in"]) == ("small", "key_1", "39")
    assert answer["data"][0]["group"] == {"model": "small", "key": "key_1"}
    assert answer["total"]["cost_usd"] == line["cost_usd"] == "0.300000000009"


def test_rows_that_still_wait_are_said(state_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = state_dir / "ledger" / "dead"
    folder.mkdir(parents=True)
    (folder / "0000000001.wal").write_bytes(line_of(row(3)) + line_of(row(77)))
    assert main(["usage", "--state-dir", str(state_dir)]) == 0
    assert capsys.readouterr().err == "1 more rows in write-ahead files are not in the store yet\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--by", "nobody"], "by: 'nobody' is not one of key, team"),
        (["--since", "soon"], "since: 'soon' is not a time"),
        (["--store", "postgresql://x@127.0.0.1:1/x"], "PostgreSQL cannot be used"),
    ],
)
def test_what_is_wrong_is_one_line(
    state_dir: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["usage", "--state-dir", str(state_dir), *words]) == 1
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1


def test_a_running_gateway_answers_the_same(state_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with admin_listener(state_dir) as url:
        assert main(["usage", "--state-dir", str(state_dir), "--admin-url", url, "--by", "key"]) == 0
        asked = capsys.readouterr().out
        assert main(["usage", "--state-dir", str(state_dir), "--admin-url", url, "--since", "soon"]) == 1
        assert "since: 'soon' is not a time" in capsys.readouterr().err
    assert main(["usage", "--state-dir", str(state_dir), "--by", "key"]) == 0
    assert asked == capsys.readouterr().out


@contextmanager
def admin_listener(state_dir: Path) -> Iterator[str]:
    """The gateway's own, in a thread."""

    async def nothing() -> Any:
        return ""

    async def serve() -> None:
        upstream = {"name": "u", "url": "http://127.0.0.1:1"}
        settings = make_settings(
            {
                "gateway": {"state_dir": state_dir},
                "admin": {"port": 0},
                "upstreams": [upstream],
                "models": [{"name": "*", "targets": ("u/*",)}],
            }
        )
        admin = AdminListener(settings, nothing, nothing, nothing)
        await admin.start()
        addresses.append(admin.url)
        while not ended.is_set():
            await asyncio.sleep(0.01)
        await admin.stop()

    addresses: list[str] = []
    ended = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    while not addresses:
        assert thread.is_alive()
        thread.join(0.01)
    try:
        yield addresses[0]
    finally:
        ended.set()
        thread.join()


def test_a_folder_without_a_ledger_says_what_to_give(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["usage", "--state-dir", str(tmp_path)]) == 1
    assert "give --state-dir, --store or --admin-url" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_keys_go_by_their_names_where_people_read(
    state_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from ridgeline.gateway.tenants.audit import Actor
    from ridgeline.gateway.tenants.config import StoreConfig
    from ridgeline.gateway.tenants.keys import Key
    from ridgeline.gateway.tenants.registry import Registry
    from ridgeline.gateway.tenants.store import Store

    async def make(count: int) -> list[str]:
        store = Store(StoreConfig(), state_dir)
        actor = Actor("test", "127.0.0.1")
        made = [await Registry(store).create_key(lambda id: Key(id, "app"), actor) for _ in range(count)]
        await store.close()
        return [record.key.id for record, _ in made]

    (id,) = asyncio.run(make(1))
    ledger = sqlite_ledger(state_dir / "ledger.sqlite")
    ledger.insert([row(9, key_id=id)])
    ledger.close()
    assert main(["usage", "--state-dir", str(state_dir), "--key", "app"]) == 0
    assert f"app ({id})" in capsys.readouterr().out
    assert main(["usage", "--state-dir", str(state_dir), "--key", "app", "--csv"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith(f"{id},1,")
    assert main(["usage", "--state-dir", str(state_dir), "--key", "nobody"]) == 1
    assert "no key is named 'nobody'" in capsys.readouterr().err
    asyncio.run(make(1))
    assert main(["usage", "--state-dir", str(state_dir), "--key", "app"]) == 1
    assert "2 keys are named 'app'; use an id" in capsys.readouterr().err
