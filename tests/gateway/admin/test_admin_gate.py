"""Which requests reach the admin API, what is recorded of it, and what a browser or a guesser cannot do."""

from __future__ import annotations

import asyncio
import stat
import time
from pathlib import Path

import httpx
import msgspec
import pytest

from ridgeline.gateway.admin import gate
from ridgeline.gateway.admin.app import admin_app
from ridgeline.gateway.admin.config import AdminConfig
from ridgeline.gateway.admin.credentials import AdminKeys
from ridgeline.gateway.tenants.audit import Actor
from ridgeline.gateway.tenants.config import StoreConfig
from ridgeline.gateway.tenants.errors import StoreError
from ridgeline.gateway.tenants.registry import Registry
from ridgeline.gateway.tenants.store import Store
from ridgeline.options import OptionError
from tests.gateway.admin.conftest import Admin
from tests.patience import PATIENCE_S

PATHS = (
    "/admin/keys",
    "/admin/keys/key_1",
    "/admin/teams",
    "/admin/audit",
    "/admin/upstreams",
    "/admin/reload",
    "/admin/usage",
    "/metrics",
    "/nothing",
    "/admin/keys/",
    "//admin/keys",
    "/health/../admin/keys",
    "/",
)


async def test_no_path_is_reached_without_the_admin_key(admin: Admin) -> None:
    secret = (await admin.create_key())["secret"]
    wrong = (
        {},
        {"authorization": "Bearer "},
        {"authorization": "Bearer rla-" + "x" * 43},
        {"authorization": f"Bearer {secret}"},  # a client's key is none
        {"authorization": f"Basic {admin.key}"},
        {"authorization": admin.key},
        {"authorization": f"Bearer {admin.key}x"},
        {"authorization": f"Bearer {admin.key[:-1]}"},
        {"x-api-key": admin.key},
        {"cookie": f"key={admin.key}"},
    )
    for path in PATHS:
        for headers in wrong:
            for method in ("GET", "POST"):
                answer = await admin.client.request(method, path, headers=headers)
                assert answer.status_code == 401, (path, headers)
    twice = [("authorization", f"Bearer {admin.key}")] * 2
    assert (await admin.client.get("/admin/keys", headers=twice)).status_code == 401
    assert admin.reloads == []


async def test_health_says_nothing_and_needs_no_key(admin: Admin) -> None:
    assert (await admin.client.get("/health")).json() == {"status": "ok"}


async def test_metrics_health_of_upstreams_and_further_routes_are_behind_the_gate(admin: Admin) -> None:
    metrics = await admin.ask("GET", "/metrics")
    assert metrics.text == "ridgeline_up 1\n"
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert (await admin.ask("GET", "/admin/upstreams")).json() == {
        "data": [{"name": "gpu", "breaker": "closed"}]
    }
    assert (await admin.ask("GET", "/admin/usage")).text == "12 cents"


async def test_only_json_changes_anything_as_no_form_of_a_browser_can_send(admin: Admin) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        answer = await admin.ask(
            "POST", "/admin/keys", content=b'{"name": "a"}', headers={"content-type": kind}
        )
        assert answer.status_code == 415
    answer = await admin.client.post(
        "/admin/keys", content=b'{"name": "a"}', headers={"authorization": f"Bearer {admin.key}"}
    )
    assert answer.status_code == 415
    assert (await admin.ask("GET", "/admin/keys")).json()["data"] == []
    records = await admin.audit()
    assert {(record.action, record.outcome, record.who) for record in records} == {
        ("admin.request", "refused", "admin")
    }
    assert len(records) == 5
    answer = await admin.ask("OPTIONS", "/admin/keys", headers={"origin": "https://evil.test"})
    assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_the_host_header_is_of_no_consequence(admin: Admin) -> None:
    for host in ("evil.test", "127.0.0.1:8081", "a@b", "x" * 500):
        answer = await admin.ask("GET", "/admin/keys", headers={"host": host})
        assert answer.status_code == 200
        answer = await admin.ask("GET", "/admin/keys/", headers={"host": host})
        assert (answer.status_code, "location" in answer.headers) == (404, False)


async def test_no_answer_is_kept_by_caches(admin: Admin) -> None:
    for answer in (
        await admin.ask("POST", "/admin/keys", {"name": "a"}),
        await admin.client.get("/admin/keys"),
    ):
        assert answer.headers["cache-control"] == "no-store"


async def test_every_change_is_recorded_with_who_from_where_before_and_after(admin: Admin) -> None:
    made = await admin.create_key(limits={"requests_per_minute": 1})
    path = f"/admin/keys/{made['id']}"
    await admin.ask("PATCH", path, {"limits": {"requests_per_minute": 2}})
    rotated = (await admin.ask("POST", f"{path}/rotate", {"grace_s": 5})).json()
    await admin.ask("POST", f"{path}/revoke")
    await admin.ask("PATCH", path, {"priority": 0})
    await admin.ask("POST", "/admin/reload")
    answer = await admin.ask("GET", "/admin/audit")
    records = answer.json()["data"]
    assert [(record["action"], record["target"], record["outcome"]) for record in records] == [
        ("key.create", made["id"], "done"),
        ("key.update", made["id"], "done"),
        ("key.rotate", made["id"], "done"),
        ("key.revoke", made["id"], "done"),
        ("key.update", made["id"], "refused"),
        ("gateway.reload", "", "done"),
    ]
    assert {(record["who"], record["address"]) for record in records} == {("admin", "192.0.2.7")}
    update = records[1]
    assert update["before"]["limits"]["requests_per_minute"] == 1
    assert update["after"]["limits"]["requests_per_minute"] == 2
    assert records[3]["before"]["revoked_at"] is None
    assert records[3]["after"]["revoked_at"] is not None
    assert all(abs(record["at_ms"] / 1000 - time.time()) < 60 for record in records)
    for secret in (made["secret"], rotated["secret"], admin.key):
        assert secret not in answer.text
    assert admin.reloads == [1]
    later = (await admin.ask("GET", f"/admin/audit?after={records[3]['id']}&limit=1")).json()["data"]
    assert later == [records[4]]
    assert (await admin.ask("GET", "/admin/audit?limit=2")).json()["data"] == records[-2:]
    assert (await admin.ask("GET", "/admin/audit?since=2099-01-01")).json()["data"] == []
    assert len((await admin.ask("GET", "/admin/audit?since=2020-01-01T00:00:00Z")).json()["data"]) == 6


async def test_nothing_happens_when_it_cannot_be_recorded(admin: Admin) -> None:
    made = await admin.create_key()
    await admin.store.write(_renamed())
    for path in (f"/admin/keys/{made['id']}/revoke", "/admin/reload"):
        answer = await admin.ask("POST", path)
        assert answer.status_code == 503
        assert "audit" not in answer.text
    assert (await admin.key_table()).lookup(made["secret"]) is not None
    assert admin.reloads == []


async def test_wrong_keys_are_recorded_once_a_minute_for_each_address_with_their_number(
    admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(5):
        await admin.client.get("/admin/keys", headers={"authorization": "Bearer wrong-key"})
    (record,) = await admin.audit()
    assert (record.action, record.outcome, record.who, record.address) == (
        "admin.wrong_key",
        "refused",
        "",
        "192.0.2.7",
    )
    assert record.after is not None
    assert msgspec.json.decode(record.after) == {"attempts": 1}
    monkeypatch.setattr(gate, "RECORD_EVERY_S", 0.0)
    await admin.client.get("/admin/keys")
    last = (await admin.audit())[-1]
    assert msgspec.json.decode(last.after) == {"attempts": 5}
    assert "wrong-key" not in repr(await admin.audit())


async def test_wrong_keys_wait_longer_each_time_and_good_ones_never(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    held = asyncio.Event()

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        await held.wait()

    monkeypatch.setattr(gate.asyncio, "sleep", sleep)
    store = Store(StoreConfig(), tmp_path)
    await store.prepare()
    wrong = gate.WrongKeys(0.5, Registry(store))
    waiting = [asyncio.create_task(wrong.seen("192.0.2.1")) for _ in range(6)]
    waiting.append(asyncio.create_task(wrong.seen("192.0.2.2")))
    while len(waits) < 7:
        await asyncio.wait(waiting, timeout=0.01)
    assert sorted(waits) == [0.5, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0]
    waiting += [asyncio.create_task(wrong.seen(f"192.0.2.{n}")) for n in range(10, 60)]
    async with asyncio.timeout(PATIENCE_S):
        while len(waits) + sum(task.done() for task in waiting) < len(waiting):
            await asyncio.wait(waiting, timeout=0.01)
    refused = [task.exception() for task in waiting if task.done()]
    assert len(waits) == gate.MAX_DELAYED
    assert len(refused) == len(waiting) - gate.MAX_DELAYED
    assert {getattr(error, "status", None) for error in refused} == {429}
    held.set()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert len(await Registry(store).audit(None, None, 1000)) == gate.MAX_RECORDS
    await store.close()


async def test_the_key_file_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "state" / "admin-key"
    first = AdminKeys(path)
    text = path.read_text()
    assert first.is_new
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert text.startswith("rla-")
    assert len(text.strip()) == 47
    again = AdminKeys(path)
    assert not again.is_new
    assert path.read_text() == text
    assert again.who(text.strip()) == "admin"


async def test_a_key_file_is_read_again_when_it_changes_and_without_it_nobody_is_let_in(
    tmp_path: Path,
) -> None:
    path = tmp_path / "keys"
    ann, bob = "a" * 40, "b" * 40
    path.write_text(f"# who may\nann {ann}\n\nbob {bob} # for now\n")
    keys = AdminKeys(path)
    assert (keys.who(ann), keys.who(bob), keys.who("c" * 40), keys.who("")) == ("ann", "bob", None, None)
    path.write_text(f"ann {ann}\n")
    assert (keys.who(ann), keys.who(bob)) == ("ann", None)
    path.unlink()
    assert keys.who(ann) is None
    path.write_text("short\n")
    assert keys.who("short") is None
    path.write_text(f"{bob}\n")
    assert keys.who(bob) == "admin"


@pytest.mark.parametrize("text", ["", "# nothing\n", "short", "a b " + "c" * 40])
def test_a_key_file_that_is_no_use_ends_the_start(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(StoreError, match="keys"):
        AdminKeys(path)


async def test_metrics_may_be_opened_to_everybody_and_only_they(tmp_path: Path) -> None:
    store = Store(StoreConfig(), tmp_path)
    config = AdminConfig(metrics_without_key=True, wrong_key_delay_s=0)
    app = admin_app(store, config, AdminKeys(tmp_path / "k"), endpoints=(), metrics=lambda: b"x 1\n")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://a") as client:  # type: ignore[arg-type]
        assert (await client.get("/metrics")).text == "x 1\n"
        assert (await client.post("/metrics")).status_code == 401
        assert (await client.get("/admin/audit")).status_code == 401
    await store.close()


async def test_a_failure_of_ours_is_a_500_that_tells_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(StoreConfig(), tmp_path)

    def broken() -> None:
        raise ValueError("hunter2")

    keys = AdminKeys(tmp_path / "k")
    app = admin_app(store, AdminConfig(), keys, endpoints=(), status=broken)
    headers = {"authorization": f"Bearer {keys.path.read_text().strip()}"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://a") as client:  # type: ignore[arg-type]
        answer = await client.get("/admin/upstreams", headers=headers)
    assert answer.status_code == 500
    assert "hunter2" not in answer.text + caplog.text
    assert "ValueError" in caplog.text
    await store.close()


async def test_records_of_others_wait_for_no_one(admin: Admin) -> None:
    """Changes and records made at once all end up in the log."""
    registry = Registry(admin.store)
    by = Actor("ann", "192.0.2.9")
    await asyncio.gather(*(registry.record(by, "x", str(n), "done") for n in range(20)))
    assert {record.target for record in await admin.audit()} == {str(n) for n in range(20)}


def test_settings_of_the_listener_are_checked() -> None:
    for wrong in ({"port": 70000}, {"wrong_key_delay_s": 60.0}):
        with pytest.raises(OptionError, match=f"admin.{next(iter(wrong))}"):
            AdminConfig(**wrong)


def _renamed():  # type: ignore[no-untyped-def]
    yield "ALTER TABLE ridgeline_audit RENAME TO ridgeline_audit_away", ()
