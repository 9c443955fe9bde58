"""Keys and teams over the admin API: made, shown once, changed, rotated, revoked, listed."""

from __future__ import annotations

import time

from tests.gateway.admin.conftest import Admin


async def test_a_new_key_has_all_that_was_asked_for_and_its_secret_once(admin: Admin) -> None:
    team = (await admin.ask("POST", "/admin/teams", {"name": "red", "weight": 2})).json()
    made = await admin.create_key(
        team=team["id"],
        models=["gpt-*", "small"],
        endpoints=["chat"],
        expires_in_s=3600,
        limits={"requests_per_minute": 100, "tokens_per_minute": 20_000, "daily_usd": 5},
        priority=0,
        when_limits_unknown="open",
        guard="strict",
        cache="exact",
    )
    secret = made.pop("secret")
    key = (await admin.key_table()).lookup(secret)
    assert key is not None
    assert (key.models, key.endpoints, key.team) == (("gpt-*", "small"), ("chat",), team["id"])
    assert (key.priority, key.when_limits_unknown, key.guard, key.cache) == (0, "open", "strict", "exact")
    assert (key.limits.requests_per_minute, key.limits.daily_usd, key.limits.monthly_usd) == (100, 5.0, None)
    assert key.expires_at is not None
    assert 3500 < key.expires_at - time.time() <= 3600
    shown = await admin.ask("GET", f"/admin/keys/{made['id']}")
    assert shown.json() == made
    assert made["state"] == "live"
    listed = await admin.ask("GET", "/admin/keys")
    assert listed.json() == {"data": [made], "next": None}
    for answer in (shown, listed):
        assert secret not in answer.text


async def test_a_key_is_changed_field_by_field_while_it_is_in_use(admin: Admin) -> None:
    made = await admin.create_key(models=["a"], limits={"requests_per_minute": 1, "concurrent": 2})
    path = f"/admin/keys/{made['id']}"
    changed = await admin.ask("PATCH", path, {"limits": {"requests_per_minute": 50}, "models": None})
    assert changed.status_code == 200
    key = (await admin.key_table()).lookup(made["secret"])
    assert key is not None
    assert (key.limits.requests_per_minute, key.limits.concurrent, key.models, key.name) == (50, 2, (), "app")
    await admin.ask("PATCH", path, {"limits": {"concurrent": None}, "expires_at": "2030-01-01"})
    key = (await admin.key_table()).lookup(made["secret"])
    assert key is not None
    assert (key.limits.concurrent, key.expires_at) == (None, 1893456000.0)
    await admin.ask("PATCH", path, {"limits": None, "expires_at": None, "name": "renamed"})
    key = (await admin.key_table()).lookup(made["secret"])
    assert key is not None
    assert (key.limits.requests_per_minute, key.expires_at, key.name) == (None, None, "renamed")


async def test_rotation_ends_the_old_secret_at_once_or_after_its_grace(admin: Admin) -> None:
    made = await admin.create_key()
    path = f"/admin/keys/{made['id']}/rotate"
    second = (await admin.ask("POST", path, {"grace_s": 600})).json()
    table = await admin.key_table()
    assert table.lookup(made["secret"]) == table.lookup(second["secret"]) is not None
    assert 500 < second["old_secrets_until"][0] - time.time() <= 600
    third = (await admin.ask("POST", path)).json()
    table = await admin.key_table()
    assert [table.lookup(one["secret"]) is not None for one in (made, second, third)] == [False, False, True]
    assert third["old_secrets_until"] == []


async def test_a_revoked_key_is_shown_as_such_and_can_be_deleted(admin: Admin) -> None:
    made = await admin.create_key()
    path = f"/admin/keys/{made['id']}"
    assert (await admin.ask("DELETE", path)).status_code == 409
    assert (await admin.ask("POST", f"{path}/revoke")).json()["state"] == "revoked"
    assert (await admin.key_table()).lookup(made["secret"]) is None
    assert (await admin.ask("POST", f"{path}/revoke")).status_code == 409
    assert (await admin.ask("GET", "/admin/keys")).json()["data"] == []
    assert len((await admin.ask("GET", "/admin/keys?revoked=true")).json()["data"]) == 1
    assert (await admin.ask("DELETE", path)).json() == {"id": made["id"], "deleted": True}
    assert (await admin.ask("GET", path)).status_code == 404


async def test_lists_come_in_pages(admin: Admin) -> None:
    ids = {(await admin.create_key(name=f"k{n}"))["id"] for n in range(5)}
    first = (await admin.ask("GET", "/admin/keys?limit=3")).json()
    rest = (await admin.ask("GET", f"/admin/keys?limit=3&after={first['next']}")).json()
    assert {key["id"] for key in first["data"] + rest["data"]} == ids
    assert (len(first["data"]), rest["next"]) == (3, None)
    assert [key["name"] for key in (await admin.ask("GET", "/admin/keys?name=k2")).json()["data"]] == ["k2"]


async def test_teams_are_made_changed_and_deleted(admin: Admin) -> None:
    made = (await admin.ask("POST", "/admin/teams", {"name": "red"})).json()
    path = f"/admin/teams/{made['id']}"
    changed = await admin.ask("PATCH", path, {"weight": 3, "limits": {"monthly_usd": 100.5}})
    team = (await admin.key_table()).team(made["id"])
    assert team is not None
    assert (team.weight, team.limits.monthly_usd) == (3.0, 100.5)
    assert (await admin.ask("GET", path)).json() == changed.json()
    assert (await admin.ask("GET", "/admin/teams?name=red")).json()["data"] == [changed.json()]
    assert (await admin.ask("POST", "/admin/teams", {"name": "red"})).status_code == 409
    key = await admin.create_key(team=made["id"])
    assert (await admin.ask("DELETE", path)).status_code == 409
    await admin.ask("PATCH", f"/admin/keys/{key['id']}", {"team": None})
    assert (await admin.ask("DELETE", path)).status_code == 200
    assert (await admin.ask("GET", path)).status_code == 404
