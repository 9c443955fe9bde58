"""Whatever is sent as a key or a team: it makes one within all bounds, or is refused with its field."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.gateway.admin import fields
from ridgeline.gateway.errors import BadRequest
from ridgeline.gateway.tenants.keys import Key, Limits

ENDPOINTS, GUARDS = ("chat", "embeddings"), ("strict",)

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(10**14), 10**14)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=140)
    | st.sampled_from(["gpt-*", "*", "chat", "strict", "exact", "open", "2030-01-01T00:00:00Z", "\0"])
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
)
limits = st.dictionaries(st.sampled_from([*Limits.__struct_fields__, "rpm"]), scalars, max_size=5)
likely: dict[str, st.SearchStrategy[Any]] = {
    "name": st.text(max_size=140),
    "team": st.none() | st.text(max_size=140),
    "models": st.lists(st.text(max_size=6) | st.sampled_from(["gpt-*", "*"]), max_size=3),
    "endpoints": st.lists(st.sampled_from(["chat", "embeddings", "chatt"]), max_size=3),
    "limits": limits,
    "expires_in_s": st.floats(-10, 1e9),
    "priority": st.integers(-1, 3),
}
bodies = st.fixed_dictionaries({}, optional=likely) | st.dictionaries(
    st.sampled_from([*fields.KeyFields.__struct_fields__, "nmae"]), values, max_size=6
)


def tried(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except BadRequest as refusal:
        return refusal


@given(bodies)
def test_a_key_is_within_all_bounds_or_refused(body: dict[str, Any]) -> None:
    key = tried(
        lambda: fields.new_key(
            "key_1", fields.read(msgspec.json.encode(body), fields.KeyFields), ENDPOINTS, GUARDS
        )
    )
    if isinstance(key, BadRequest):
        assert key.param
        return
    assert msgspec.json.decode(msgspec.json.encode(key), type=Key) == key
    assert 0 < len(key.name) <= 128
    assert key.name.isprintable()
    assert all(0 < len(model) <= 256 and "*" not in model[:-1] for model in key.models)
    assert set(key.endpoints) <= set(ENDPOINTS)
    assert key.guard in ("", *GUARDS)
    assert key.priority in (0, 1, 2)
    assert key.cache in ("off", "exact", "semantic")
    assert key.when_limits_unknown in ("open", "closed")
    assert key.expires_at is None or key.expires_at > time.time() - 60
    assert key.revoked_at is None
    for limit in msgspec.structs.astuple(key.limits):
        assert limit is None or (0 <= limit <= 10**12 and math.isfinite(limit))


@given(st.binary(max_size=200) | values.map(msgspec.json.encode))
def test_a_body_of_any_bytes_is_read_or_refused(body: bytes) -> None:
    for kind in (fields.KeyFields, fields.TeamFields, fields.RotateFields):
        found = tried(lambda kind=kind: fields.read(body, kind))
        assert len(found.message) < 500 if isinstance(found, BadRequest) else isinstance(found, kind)


@given(st.dictionaries(st.sampled_from(["name", "weight", "limits"]), values | limits, max_size=3))
def test_a_team_is_within_all_bounds_or_refused(body: dict[str, Any]) -> None:
    team = tried(lambda: fields.new_team("team_1", fields.read(msgspec.json.encode(body), fields.TeamFields)))
    if isinstance(team, BadRequest):
        assert team.param
        return
    assert 0 < team.weight <= 1000
    assert 0 < len(team.name) <= 128


def test_a_change_of_nothing_changes_nothing() -> None:
    key = Key("key_1", "app", "team_1", ("m",), ("chat",), limits=Limits(1, 2, 3, 4.0, 5.0), priority=0)
    assert fields.changed_key(key, fields.read(b"{}", fields.KeyFields), ENDPOINTS, GUARDS) == key
    assert fields.changed_key(key, fields.read(b'{"limits": {}}', fields.KeyFields), ENDPOINTS, GUARDS) == key
