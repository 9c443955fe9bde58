"""The snapshot that every request asks: digests, ends, rotations, changes."""

from __future__ import annotations

import hashlib
import hmac
import time

from hypothesis import given
from hypothesis import strategies as st

from ridgeline.gateway.tenants.digest import SECRET_LENGTH, digester, new_secret
from ridgeline.gateway.tenants.key_table import Changes, KeyEntry, KeyTable, Secret
from ridgeline.gateway.tenants.keys import Key, Team

SERVER_SECRET = "s" * 64


def digest(secret: str) -> str:
    return hmac.new(SERVER_SECRET.encode(), secret.encode(), hashlib.sha256).hexdigest()


def key_table(*entries: tuple[Key, dict[str, float | None]], teams: tuple[Team, ...] = ()) -> KeyTable:
    keys = tuple(
        KeyEntry(key, tuple(Secret(digest(secret), until) for secret, until in secrets.items()))
        for key, secrets in entries
    )
    return KeyTable(SERVER_SECRET).apply(Changes(1, True, keys, teams))


@given(
    st.text(alphabet=st.characters(min_codepoint=1, max_codepoint=200), max_size=100), st.text(max_size=200)
)
def test_a_digest_is_the_standard_hmac_of_what_could_be_a_key(server_secret: str, text: str) -> None:
    made = digester(server_secret)
    secret = new_secret()
    assert made(secret) == hmac.new(server_secret.encode(), secret.encode(), hashlib.sha256).digest()
    if len(text) != SECRET_LENGTH:
        assert made(text) is None


def test_a_secret_is_found_by_its_digest_and_nothing_else_is() -> None:
    secret, key = new_secret(), Key("key_1", "app")
    known = key_table((key, {secret: None}))
    assert known.lookup(secret) is key
    others = (
        new_secret(),
        secret[:-1],
        secret + "x",
        "",
        digest(secret),
        "rl-" + "é" * 43,
        secret.swapcase(),
    )
    assert [known.lookup(other) for other in others] == [None] * len(others)


def test_expired_revoked_and_rotated_keys_are_refused_with_the_reason() -> None:
    expired, revoked, old, new = (new_secret() for _ in range(4))
    now = time.time()
    known = key_table(
        (Key("key_1", "expired", expires_at=now - 1), {expired: None}),
        (Key("key_2", "revoked", revoked_at=now - 1), {revoked: None}),
        (Key("key_3", "rotated"), {old: now - 1, new: None}),
    )
    assert [known.lookup(secret) for secret in (expired, revoked, old)] == [None, None, None]
    codes = [known.refusal(secret).code for secret in (expired, revoked, old, new_secret())]
    assert codes == ["expired_api_key", "revoked_api_key", "rotated_api_key", "invalid_api_key"]
    found = known.lookup(new)
    assert found is not None
    assert found.id == "key_3"
    assert known.key("key_1") is None
    assert known.key("key_2") is None
    assert known.key("key_3") is found


def test_a_rotated_secret_is_valid_within_its_grace_but_not_past_the_keys_own_end() -> None:
    old, other = new_secret(), new_secret()
    now = time.time()
    known = key_table(
        (Key("key_1", "a"), {old: now + 100}),
        (Key("key_2", "b", expires_at=now - 1), {other: now + 100}),
    )
    assert known.lookup(old) is not None
    assert known.lookup(other) is None


def test_a_change_replaces_a_keys_secrets_and_leaves_other_keys_alone() -> None:
    first, second, untouched = new_secret(), new_secret(), new_secret()
    known = key_table((Key("key_1", "a"), {first: None}), (Key("key_2", "b"), {untouched: None}))
    change = KeyEntry(Key("key_1", "renamed"), (Secret(digest(second)),))
    known.apply(Changes(2, False, (change,), (Team("team_1", "t"),)))
    assert known.version == 2
    assert known.lookup(first) is None
    assert known.lookup(second) == known.key("key_1") == Key("key_1", "renamed")
    assert known.lookup(untouched) == Key("key_2", "b")
    assert known.team("team_1") == Team("team_1", "t")


def test_what_is_gone_is_forgotten_and_a_whole_replaces_all() -> None:
    first, second = new_secret(), new_secret()
    known = key_table(
        (Key("key_1", "a"), {first: None}), (Key("key_2", "b"), {second: None}), teams=(Team("team_1", "t"),)
    )
    known.apply(Changes(2, False, gone=("key_1", "team_1", "key_unknown")))
    assert known.lookup(first) is known.key("key_1") is known.team("team_1") is None
    assert known.refusal(first).code == "invalid_api_key"
    assert known.lookup(second) is not None
    known.apply(Changes(3, True))
    assert known.lookup(second) is None


def test_a_policy_made_of_anothers_contents_knows_the_same() -> None:
    secret = new_secret()
    known = key_table((Key("key_1", "a"), {secret: None}), teams=(Team("team_1", "t"),))
    copy = KeyTable(SERVER_SECRET).apply(known.contents())
    assert copy.lookup(secret) == known.lookup(secret)
    assert copy.team("team_1") == known.team("team_1")
