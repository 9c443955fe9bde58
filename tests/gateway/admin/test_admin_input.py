"""What is wrong in a request to the admin API is named, changes nothing, and is never repeated back."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.admin.conftest import Admin

WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({}, "name", "is needed"),
    ({"name": ""}, "name", "1 to 128"),
    ({"name": "  "}, "name", "1 to 128"),
    ({"name": "x" * 129}, "name", "1 to 128"),
    ({"name": "a\nb"}, "name", "printable"),
    ({"name": "a\u202eb"}, "name", "printable"),
    ({"name": 5}, "name", "Expected `str`"),
    ({"name": "a", "nmae": 1}, "nmae", "did you mean name?"),
    ({"name": "a", "rpm": 1}, "rpm", "known: "),
    ({"name": "a", "limits": {"request_per_minute": 1}}, "limits.request_per_minute", "requests_per_minute?"),
    ({"name": "a", "limits": {"requests_per_minute": -1}}, "limits.requests_per_minute", "from 0"),
    ({"name": "a", "limits": {"requests_per_minute": 1.5}}, "limits.requests_per_minute", "Expected `int"),
    ({"name": "a", "limits": {"requests_per_minute": True}}, "limits.requests_per_minute", "Expected `int"),
    ({"name": "a", "limits": {"tokens_per_minute": 10**13}}, "limits.tokens_per_minute", "from 0"),
    ({"name": "a", "limits": {"daily_usd": -0.01}}, "limits.daily_usd", "from 0"),
    ({"name": "a", "limits": {"monthly_usd": "5"}}, "limits.monthly_usd", "Expected `float"),
    ({"name": "a", "limits": 5}, "limits", "Expected `object"),
    ({"name": "a", "models": ["g*t"]}, "models", "at the end"),
    ({"name": "a", "models": ["**"]}, "models", "at the end"),
    ({"name": "a", "models": [""]}, "models", "1 to 256"),
    ({"name": "a", "models": ["a b"]}, "models", "without spaces"),
    ({"name": "a", "models": ["m"] * 257}, "models", "256 names"),
    ({"name": "a", "models": "gpt-*"}, "models", "Expected `array"),
    ({"name": "a", "models": [1]}, "models", "Expected `str`"),
    ({"name": "a", "endpoints": ["chatt"]}, "endpoints", "did you mean chat?"),
    ({"name": "a", "expires_at": 1.0}, "expires_at", "future"),
    ({"name": "a", "expires_at": 1e300}, "expires_at", "ten years"),
    ({"name": "a", "expires_at": "soon"}, "expires_at", "2027-01-31"),
    ({"name": "a", "expires_in_s": 0}, "expires_in_s", "future"),
    ({"name": "a", "expires_in_s": 5, "expires_at": 5}, "expires_in_s", "combined"),
    ({"name": "a", "priority": 3}, "priority", "0, 1 or 2"),
    ({"name": "a", "when_limits_unknown": "maybe"}, "when_limits_unknown", "not allowed"),
    ({"name": "a", "guard": "strickt"}, "guard", "did you mean strict?"),
    ({"name": "a", "cache": "all"}, "cache", "not allowed"),
    ({"name": "a", "team": "team_none"}, "team", "no team"),
    ({"name": "a", "team": "a\0b"}, "team", "printable"),
    ({"name": "a", "id": "key_mine"}, "id", "unknown field"),
    ({"name": "a", "secret": "rl-mine"}, "secret", "unknown field"),
]


@pytest.mark.parametrize(("body", "field", "words"), WRONG, ids=lambda value: str(value)[:40])
async def test_a_wrong_field_of_a_key_is_named(admin: Admin, body: Any, field: str, words: str) -> None:
    answer = await admin.ask("POST", "/admin/keys", body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == field
    assert field in error["message"]
    assert words in error["message"]
    assert (await admin.ask("GET", "/admin/keys")).json()["data"] == []
    (record,) = await admin.audit()
    assert (record.action, record.outcome) == ("key.create", "refused")


async def test_the_same_holds_for_changes_rotations_and_teams(admin: Admin) -> None:
    made = await admin.create_key()
    team = (await admin.ask("POST", "/admin/teams", {"name": "red"})).json()
    key, teams = f"/admin/keys/{made['id']}", f"/admin/teams/{team['id']}"
    for method, path, body, field in (
        ("PATCH", key, {"priority": -1}, "priority"),
        ("PATCH", key, {"team": "team_none"}, "team"),
        ("PATCH", key, {"revoked_at": None}, "revoked_at"),
        ("POST", f"{key}/rotate", {"grace_s": -1}, "grace_s"),
        ("POST", f"{key}/rotate", {"grace_s": 1e9}, "grace_s"),
        ("POST", f"{key}/rotate", {"grace": 1}, "grace"),
        ("POST", f"{key}/revoke", {"now": True}, "now"),
        ("PATCH", teams, {"weight": 0}, "weight"),
        ("PATCH", teams, {"weight": 1e9}, "weight"),
        ("POST", "/admin/teams", {"weight": 1}, "name"),
    ):
        answer = await admin.ask(method, path, body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), (method, path, body)
    assert (await admin.ask("GET", key)).json()["state"] == "live"
    assert (await admin.key_table()).lookup(made["secret"]) is not None


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"5", b'{"name": NaN}', b"\xff", b'{"a":' * 5000])
async def test_a_body_that_is_no_object_is_refused(admin: Admin, body: bytes) -> None:
    answer = await admin.ask(
        "POST", "/admin/keys", content=body, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400


async def test_a_large_body_is_refused_unread(admin: Admin) -> None:
    answer = await admin.ask("POST", "/admin/keys", {"name": "x" * 70_000})
    assert answer.status_code == 413


async def test_queries_are_checked_too(admin: Admin) -> None:
    for path, field in (
        ("/admin/keys?limit=0", "limit"),
        ("/admin/keys?limit=9999", "limit"),
        ("/admin/keys?limit=-1", "limit"),
        ("/admin/keys?revoked=yes", "revoked"),
        ("/admin/keys?tema=x", "tema"),
        ("/admin/keys?name=a&name=b", "name"),
        ("/admin/keys?name=%00", "name"),
        ("/admin/audit?since=yesterday", "since"),
        ("/admin/audit?since=-1", "since"),
        ("/admin/audit?after=x", "after"),
        ("/admin/teams?limit=%D9%A5", "limit"),
    ):
        answer = await admin.ask("GET", path)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), path


async def test_no_such_thing_is_a_404_that_repeats_nothing(admin: Admin) -> None:
    odd = "key_%27%20OR%201=1--"
    for method, path in (
        ("GET", f"/admin/keys/{odd}"),
        ("PATCH", f"/admin/keys/{odd}"),
        ("DELETE", f"/admin/keys/{odd}"),
        ("POST", f"/admin/keys/{odd}/rotate"),
        ("GET", f"/admin/teams/{odd}"),
        ("GET", "/admin/keys/OR%00"),
        ("POST", "/admin/keys/OR%00/revoke"),
        ("PATCH", "/admin/keys/" + "OR" * 500),
        ("GET", "/admin/nothing"),
        ("GET", "/admin/keys/"),
    ):
        answer = await admin.ask(method, path)
        assert answer.status_code == 404, path
        assert "OR" not in answer.text
    assert (await admin.ask("PUT", "/admin/keys", {})).status_code == 405


async def test_a_secret_sent_in_a_wrong_place_is_neither_repeated_nor_kept(
    admin: Admin, caplog: pytest.LogCaptureFixture
) -> None:
    secret = (await admin.create_key())["secret"]
    for body in ({"name": secret + "x" * 100}, {"name": "a", "team": secret}, {"name": "a", "guard": secret}):
        answer = await admin.ask("POST", "/admin/keys", body)
        assert answer.status_code == 400
        assert secret not in answer.text
    assert (await admin.ask("GET", f"/admin/keys?after={secret}")).status_code == 200
    assert secret not in repr(await admin.audit())
    assert secret not in caplog.text
