"""Checks the fields of keys and teams in requests to the admin API.

Pure: takes a body; returns the values for making or changing a Key or a Team, or raises BadRequest with the
field. The registry checks what depends on the store, such as whether a team exists.
"""

from __future__ import annotations

import difflib
import math
import re
import time
from collections.abc import Collection
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from ridgeline.gateway.errors import BadRequest
from ridgeline.gateway.tenants.keys import Key, Limits, Team

MAX_NAME = 128
MAX_MODEL = 256
MAX_PATTERNS = 256
MAX_GRACE_S = 90 * 86400
MAX_EXPIRY_S = 10 * 366 * 86400
MAX_WEIGHT = 1000
_BOUNDS = {
    "requests_per_minute": 10**9,
    "tokens_per_minute": 10**12,
    "concurrent": 10**6,
    "daily_usd": 10**9,
    "monthly_usd": 10**9,
}

S = TypeVar("S", bound=msgspec.Struct)


class LimitsFields(msgspec.Struct):
    requests_per_minute: int | UnsetType | None = UNSET
    tokens_per_minute: int | UnsetType | None = UNSET
    concurrent: int | UnsetType | None = UNSET
    daily_usd: float | UnsetType | None = UNSET
    monthly_usd: float | UnsetType | None = UNSET


class TeamFields(msgspec.Struct):
    name: str | UnsetType = UNSET
    limits: LimitsFields | UnsetType | None = UNSET
    weight: float | UnsetType = UNSET
    residency: tuple[str, ...] | UnsetType | None = UNSET


class KeyFields(msgspec.Struct):
    """null: none. An absent field stays unchanged, or has its default in a new key."""

    name: str | UnsetType = UNSET
    team: str | UnsetType | None = UNSET
    models: tuple[str, ...] | UnsetType | None = UNSET
    endpoints: tuple[str, ...] | UnsetType | None = UNSET
    expires_at: float | str | UnsetType | None = UNSET  # unix seconds, or ISO 8601
    expires_in_s: float | UnsetType | None = UNSET
    limits: LimitsFields | UnsetType | None = UNSET
    priority: int | UnsetType = UNSET
    when_limits_unknown: Literal["open", "closed"] | UnsetType = UNSET
    guard: str | UnsetType | None = UNSET
    cache: Literal["off", "exact", "semantic"] | UnsetType = UNSET
    residency: tuple[str, ...] | UnsetType | None = UNSET


class RotateFields(msgspec.Struct):
    grace_s: float = 0.0


class RevokeFields(msgspec.Struct):
    end_requests: bool = False


def read(body: bytes, kind: type[S]) -> S:
    """The body decoded as this kind; an empty body has no fields."""
    try:
        values = msgspec.json.decode(body or b"{}", type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise BadRequest("the body is not a JSON object", code="invalid_json") from None
    _refuse_unknown(values, kind, "")
    if "limits" in kind.__struct_fields__ and isinstance(values.get("limits"), dict):
        _refuse_unknown(values["limits"], LimitsFields, "limits.")
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error)) from None


def new_key(id: str, fields: KeyFields, endpoints: Collection[str], guards: Collection[str]) -> Key:
    if fields.name is UNSET:
        raise _bad("name", "is needed")
    return changed_key(Key(id, ""), fields, endpoints, guards)


def changed_key(key: Key, fields: KeyFields, endpoints: Collection[str], guards: Collection[str]) -> Key:
    changes: dict[str, Any] = {}
    if fields.name is not UNSET:
        changes["name"] = _name("name", fields.name)
    if fields.team is not UNSET:
        changes["team"] = _name("team", fields.team) if fields.team else ""
    if fields.models is not UNSET:
        changes["models"] = _models(fields.models or ())
    if fields.endpoints is not UNSET:
        changes["endpoints"] = _endpoints(fields.endpoints or (), endpoints)
    if fields.expires_at is not UNSET or fields.expires_in_s is not UNSET:
        changes["expires_at"] = _expiry(fields.expires_at, fields.expires_in_s)
    if fields.limits is not UNSET:
        changes["limits"] = _limits(key.limits, fields.limits)
    if fields.priority is not UNSET:
        if not 0 <= fields.priority <= 2:
            raise _bad("priority", "must be 0, 1 or 2; 0 is served first")
        changes["priority"] = fields.priority
    if fields.when_limits_unknown is not UNSET:
        changes["when_limits_unknown"] = fields.when_limits_unknown
    if fields.guard is not UNSET:
        if fields.guard and fields.guard not in guards:
            raise _bad("guard", "is not the name of a [[guards]] policy" + _nearest(fields.guard, guards))
        changes["guard"] = fields.guard or ""
    if fields.cache is not UNSET:
        changes["cache"] = fields.cache
    if fields.residency is not UNSET:
        changes["residency"] = _residency(fields.residency or ())
    return msgspec.structs.replace(key, **changes)


def new_team(id: str, fields: TeamFields) -> Team:
    if fields.name is UNSET:
        raise _bad("name", "is needed")
    return changed_team(Team(id, ""), fields)


def changed_team(team: Team, fields: TeamFields) -> Team:
    changes: dict[str, Any] = {}
    if fields.name is not UNSET:
        changes["name"] = _name("name", fields.name)
    if fields.limits is not UNSET:
        changes["limits"] = _limits(team.limits, fields.limits)
    if fields.weight is not UNSET:
        if not 0 < fields.weight <= MAX_WEIGHT:
            raise _bad("weight", f"must be greater than 0 and at most {MAX_WEIGHT}")
        changes["weight"] = fields.weight
    if fields.residency is not UNSET:
        changes["residency"] = _residency(fields.residency or ())
    return msgspec.structs.replace(team, **changes)


def grace_s(fields: RotateFields) -> float:
    if not 0 <= fields.grace_s <= MAX_GRACE_S:
        raise _bad("grace_s", f"must be from 0 to {MAX_GRACE_S} seconds (90 days)")
    return fields.grace_s


# ---- one field ----


def _name(field: str, value: str) -> str:
    if not value.strip() or len(value) > MAX_NAME or not value.isprintable():
        raise _bad(field, f"must have from 1 to {MAX_NAME} printable characters")
    return value.strip()


def _models(patterns: tuple[str, ...]) -> tuple[str, ...]:
    if len(patterns) > MAX_PATTERNS:
        raise _bad("models", f"may have at most {MAX_PATTERNS} names, got {len(patterns)}")
    for pattern in patterns:
        is_text = pattern.isprintable() and not any(character.isspace() for character in pattern)
        if not 0 < len(pattern) <= MAX_MODEL or not is_text:
            raise _bad("models", f"each must have from 1 to {MAX_MODEL} printable characters without spaces")
        if "*" in pattern[:-1]:
            raise _bad("models", "a * is allowed only at the end of a name, as in gpt-*")
    return tuple(dict.fromkeys(patterns))


def _residency(regions: tuple[str, ...]) -> tuple[str, ...]:
    if len(regions) > MAX_PATTERNS:
        raise _bad("residency", f"may have at most {MAX_PATTERNS} regions, got {len(regions)}")
    for region in regions:
        is_text = region.isprintable() and not any(character.isspace() for character in region)
        if not 0 < len(region) <= MAX_NAME or not is_text:
            raise _bad(
                "residency", f"each must have from 1 to {MAX_NAME} printable characters without spaces"
            )
    return tuple(dict.fromkeys(regions))


def _endpoints(names: tuple[str, ...], known: Collection[str]) -> tuple[str, ...]:
    for name in names:
        if name not in known:
            raise _bad("endpoints", "contains an unknown name" + _nearest(name, known))
    return tuple(dict.fromkeys(names))


def _expiry(at: float | str | UnsetType | None, in_s: float | UnsetType | None) -> float | None:
    if at is not UNSET and in_s is not UNSET:
        raise _bad("expires_in_s", "cannot be combined with expires_at")
    now = time.time()
    if isinstance(in_s, float):
        field, end = "expires_in_s", now + in_s
    elif isinstance(at, str):
        field, end = "expires_at", _moment("expires_at", at)
    elif isinstance(at, float):
        field, end = "expires_at", at
    else:
        return None
    if not now < end <= now + MAX_EXPIRY_S:
        raise _bad(field, "must be in the future, at most ten years from now; revoke a key to end it now")
    return end


def _moment(field: str, text: str) -> float:
    """Without a time zone it is UTC."""
    try:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise _bad(field, "must be unix seconds, or a time such as 2027-01-31T12:00:00Z") from None


def _limits(before: Limits, fields: LimitsFields | UnsetType | None) -> Limits:
    if fields is None or fields is UNSET:
        return Limits()
    changes = {}
    for name, bound in _BOUNDS.items():
        value = getattr(fields, name)
        if value is UNSET:
            continue
        if value is not None and not (0 <= value <= bound and math.isfinite(value)):
            raise _bad(f"limits.{name}", f"must be from 0 to {bound}, or null for no limit")
        changes[name] = value
    return msgspec.structs.replace(before, **changes)


# ---- refusals; none repeats a value: it may be a key sent by mistake ----


def _bad(field: str, what: str) -> BadRequest:
    return BadRequest(f"{field} {what}", param=field)


def _refuse_unknown(values: dict[str, Any], kind: type[msgspec.Struct], prefix: str) -> None:
    known = kind.__struct_fields__
    for name in values:
        if name not in known:
            shown = (
                name
                if len(name) <= 40 and name.isprintable()
                else name[:40].encode("unicode_escape").decode()
            )
            near = _nearest(name, known)
            raise BadRequest(
                f"unknown field {prefix}{shown}{near}", param=prefix + shown, code="unknown_field"
            )


def _nearest(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name[:200], known, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; known: {', '.join(sorted(known))}" if known else ""


def _wrong_type(message: str) -> BadRequest:
    """Made from msgspec's message: what was expected and where, never the value."""
    what, _, where = message.partition(" - at ")
    field = re.sub(r"\[.*", "", where.strip("`").removeprefix("$.")) or "body"
    if what.startswith("Invalid enum value"):
        what = "has a value that is not allowed"
    return BadRequest(f"{field}: {what}", param=field, code="invalid_type")
