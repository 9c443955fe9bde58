"""`ridgeline gateway keys` and `ridgeline gateway teams` against a real admin listener."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ridgeline.cli.main import main
from ridgeline.gateway.admin.app import admin_app
from ridgeline.gateway.admin.config import AdminConfig
from ridgeline.gateway.admin.credentials import AdminKeys
from ridgeline.gateway.tenants.config import StoreConfig
from ridgeline.gateway.tenants.key_table import KeyTable
from ridgeline.gateway.tenants.store import Store
from ridgeline.web.connection import ConnectionLimits
from ridgeline.web.listener import HttpServer
from tests.conftest import free_port
from tests.patience import PATIENCE_S


@dataclass
class Gateway:
    url: str
    key_file: Path
    store: Store
    loop: asyncio.AbstractEventLoop
    capsys: pytest.CaptureFixture[str]

    def run(self, *words: str, code: int = 0) -> tuple[str, str]:
        """stdout and stderr of one command."""
        where = ["--admin-url", self.url, "--admin-key-file", str(self.key_file)]
        assert main([*words, *where]) == code
        captured = self.capsys.readouterr()
        return captured.out, captured.err

    def json(self, *words: str) -> Any:
        return json.loads(self.run(*words, "--json")[0])

    def key_table(self) -> KeyTable:
        changes = asyncio.run_coroutine_threadsafe(self.store.changes(0), self.loop).result(PATIENCE_S)
        return KeyTable(self.store.server_secret).apply(changes)


@pytest.fixture
def gateway(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Gateway]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    listener = socket.create_server(("127.0.0.1", 0))
    port, key_file = listener.getsockname()[1], tmp_path / "admin-key"
    servers: list[HttpServer] = []
    stores: list[Store] = []

    async def serve() -> None:
        stores.append(Store(StoreConfig(), tmp_path))
        config = AdminConfig(wrong_key_delay_s=0)
        app = admin_app(stores[0], config, AdminKeys(key_file), endpoints=("chat", "messages"))
        server = HttpServer(app, ConnectionLimits(32768, PATIENCE_S, 16, None))
        servers.append(server)
        await server.serve(sockets=[listener])
        await stores[0].close()

    serving = asyncio.run_coroutine_threadsafe(serve(), loop)
    while not (servers and servers[0].started):
        assert not serving.done(), serving.exception()
        thread.join(0.01)
    yield Gateway(f"http://127.0.0.1:{port}", key_file, stores[0], loop, capsys)
    servers[0].should_exit = True
    serving.result(PATIENCE_S)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_a_key_from_its_making_to_its_end(gateway: Gateway) -> None:
    gateway.run("teams", "create", "search", "--monthly-usd", "500", "--weight", "2")
    out, told = gateway.run(
        *("keys", "create", "--name", "app", "--team", "search", "--model", "gpt-*", "--model", "small"),
        *("--endpoint", "chat", "--rpm", "100", "--tpm", "20000", "--daily-usd", "0.5", "--expires", "30d"),
    )
    secret = out.strip()  # stdout has the key, and nothing else
    assert "100 rpm, 20,000 tpm, $0.5 a day" in told
    assert "shown only once" in told
    key = gateway.key_table().lookup(secret)
    assert key is not None
    assert (key.name, key.models, key.endpoints) == ("app", ("gpt-*", "small"), ("chat",))
    team = gateway.key_table().team(key.team)
    assert team is not None
    assert (team.name, team.weight, team.limits.monthly_usd) == ("search", 2.0, 500.0)

    shown, _ = gateway.run("keys", "show", "app")
    assert f"team                 search ({key.team})" in shown
    assert secret not in shown
    listed, _ = gateway.run("keys", "list", "--team", "search")
    assert key.id in listed
    assert "gpt-*, small" in listed

    gateway.run(
        "keys",
        "update",
        "app",
        "--rpm",
        "none",
        "--tpm",
        "5",
        "--model",
        "*",
        "--expires",
        "never",
        "--team",
        "none",
    )
    key = gateway.key_table().lookup(secret)
    assert key is not None
    assert (key.limits.requests_per_minute, key.limits.tokens_per_minute, key.limits.daily_usd) == (
        None,
        5,
        0.5,
    )
    assert (key.models, key.expires_at, key.team) == ((), None, "")

    rotated, told = gateway.run("keys", "rotate", "app", "--grace", "10m")
    assert "an older secret is valid until" in told
    assert gateway.key_table().lookup(rotated.strip()) == gateway.key_table().lookup(secret) == key

    assert gateway.run("keys", "revoke", key.id)[0] == f"revoked {key.id} (app)\n"
    assert gateway.key_table().lookup(rotated.strip()) is None
    assert gateway.json("keys", "list") == []
    assert gateway.json("keys", "show", "app")["state"] == "revoked"
    assert gateway.run("keys", "delete", "app")[0] == f"deleted {key.id}\n"
    assert gateway.run("teams", "delete", "search")[0].startswith("deleted team_")

    records = gateway.json("keys", "audit", "--since", "1h")
    actions = [
        "team.create",
        "key.create",
        "key.update",
        "key.rotate",
        "key.revoke",
        "key.delete",
        "team.delete",
    ]
    assert [record["action"] for record in records] == actions
    table, _ = gateway.run("keys", "audit")
    assert "key.revoke" in table
    assert "127.0.0.1" in table
    for hidden in (secret, rotated.strip(), gateway.key_file.read_text().strip()):
        assert hidden not in table + json.dumps(records)


def test_teams_are_listed_shown_and_changed(gateway: Gateway) -> None:
    made = gateway.json("teams", "create", "search")
    changed = gateway.json("teams", "update", "search", "--name", "found", "--rpm", "7")
    assert (changed["id"], changed["name"], changed["limits"]["requests_per_minute"]) == (
        made["id"],
        "found",
        7,
    )
    assert gateway.json("teams", "list") == [changed]
    assert gateway.json("teams", "show", "found") == changed
    out, _ = gateway.run("teams", "list")
    assert "7 rpm" in out


def test_json_of_a_new_key_has_its_secret(gateway: Gateway) -> None:
    made = gateway.json("keys", "create", "--name", "ci", "--priority", "2", "--cache", "exact")
    assert gateway.key_table().lookup(made["secret"]) is not None
    assert (made["priority"], made["cache"], made["state"]) == (2, "exact", "live")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("keys", "create", "--name", ""), "name must have from 1 to 128 printable characters"),
        (("keys", "create", "--name", "a", "--endpoint", "chatt"), "did you mean chat?"),
        (("keys", "create", "--name", "a", "--rpm", "-1"), "limits.requests_per_minute must be from 0"),
        (("keys", "create", "--name", "a", "--expires", "soon"), "--expires 'soon' is not a time"),
        (("keys", "create", "--name", "a", "--team", "none-such"), "no team is named 'none-such'"),
        (("keys", "show", "nobody"), "no key is named 'nobody'"),
        (("keys", "show", "key_nobody"), "no key has this id"),
        (("keys", "revoke", "rl-" + "x" * 43), "that is a key's secret"),
        (("keys", "update", "app"), "nothing to change"),
        (("keys", "rotate", "app", "--grace", "soon"), "--grace 'soon' is not a time"),
        (("keys", "audit", "--since", "soon"), "since must be"),
        (("teams", "update", "none-such", "--rpm", "1"), "no team is named"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(gateway: Gateway, words: tuple[str, ...], said: str) -> None:
    out, told = gateway.run(*words, code=1)
    assert said in told
    assert told.count("\n") == 1
    assert out == ""


def test_a_name_that_two_keys_have_is_not_guessed(gateway: Gateway) -> None:
    ids = [gateway.json("keys", "create", "--name", "twin")["id"] for _ in range(2)]
    _, told = gateway.run("keys", "revoke", "twin", code=1)
    assert all(id in told for id in ids)
    assert len(gateway.json("keys", "list")) == 2


def test_a_wrong_admin_key_a_missing_file_and_no_gateway_are_told_apart(
    gateway: Gateway, tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("x" * 40)
    flags = ["keys", "list", "--admin-url"]
    closed = f"http://127.0.0.1:{free_port()}"
    for url, path, said in (
        (gateway.url, wrong, "rejected this admin key"),
        (gateway.url, tmp_path / "none", "give that file with --admin-key-file"),
        (closed, gateway.key_file, f"no gateway listens at {closed}"),
        ("ftp://x", gateway.key_file, "must begin with http"),
    ):
        assert main([*flags, url, "--admin-key-file", str(path)]) == 1
        told = gateway.capsys.readouterr().err
        assert said in told
        assert "x" * 40 not in told
        assert told.count("\n") == 1


def test_a_redirect_is_not_followed_with_the_admin_key(gateway: Gateway) -> None:
    import http.server

    asked: list[str] = []

    class Redirect(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(302)
            self.send_header("location", "/elsewhere")
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Redirect)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        assert main(["keys", "list", "--admin-url", url, "--admin-key-file", str(gateway.key_file)]) == 1
        assert "not the admin API" in gateway.capsys.readouterr().err
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert len(asked) == 1
