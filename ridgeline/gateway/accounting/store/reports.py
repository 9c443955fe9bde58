"""Reports: usage and cost, summed by the store itself. Never loads rows to add them up.

Read by the admin API, by `ridgeline gateway usage`, and by limits that rebuild a budget. Blocking.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec

from ridgeline.gateway.accounting.errors import LedgerError
from ridgeline.gateway.accounting.store.journal import JournalReader, journals
from ridgeline.gateway.accounting.store.records import CLOSED, Damaged, value_of
from ridgeline.gateway.accounting.store.schema import TABLE
from ridgeline.gateway.accounting.store.table import COLUMNS, LedgerStore
from ridgeline.storage.database import Row, Value

GROUPS = {
    "key": "key_id",
    "team": "team_id",
    "model": "model",
    "upstream": "upstream",
    "endpoint": "endpoint",
    "outcome": "outcome",
    "day": "at_ms / 86400000",
}
FILTERS = {"key": "key_id", "team": "team_id", "model": "model", "upstream": "upstream"}
MAX_LINES = 10_000
MAX_DAYS = 400  # of a zone, in one report
PUSD_PER_USD = 10**12

_DAY_MS = 86_400_000
_END_OF_TIME_MS = 253_402_300_800_000  # the year 10000
_HALF = 10**6  # sums of picodollars outgrow 64 bits at nine million dollars: their halves do not
_SUMS = (
    "COUNT(*) + SUM(repeats)",
    "SUM(CASE WHEN outcome IN ('ok', 'cached') THEN 1 ELSE 0 END)",
    "SUM(CASE WHEN outcome IN ('client_gone', 'lost') THEN 1 ELSE 0 END)",
    "SUM(CASE WHEN outcome = 'cached' THEN 1 ELSE 0 END)",
    "SUM(CASE WHEN usage_source = 'estimated' THEN 1 ELSE 0 END)",
    "SUM(tokens_in)",
    "SUM(tokens_cached)",
    "SUM(tokens_cache_write)",
    "SUM(tokens_out)",
    "SUM(tokens_reasoning)",
    "SUM(audio_ms)",
    "SUM(characters)",
    f"SUM(cost_pusd / {_HALF})",
    f"SUM(cost_pusd % {_HALF})",
)


class UsageLine(msgspec.Struct, frozen=True):
    """One group's sums. `cost_usd` is exact, to the picodollar."""

    group: dict[str, str]
    requests: int
    answered: int  # completely, from an upstream or a cache
    broken_off: int  # the client disconnected, or the gateway died
    from_cache: int
    estimated: int  # whose tokens no upstream reported
    tokens_in: int
    tokens_cached: int
    tokens_cache_write: int
    tokens_out: int
    tokens_reasoning: int
    audio_ms: int
    characters: int
    cost_pusd: int
    cost_usd: str


_COUNTED = UsageLine.__struct_fields__[1:-2]  # in the order of _SUMS


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """Which rows are summed, and by what. Times in unix milliseconds, the end not included."""

    by: tuple[str, ...] = ()
    since_ms: int = 0
    until_ms: int = _END_OF_TIME_MS
    only: tuple[tuple[str, str], ...] = ()  # (a name of FILTERS, what it must be)
    days: tuple[tuple[str, int], ...] = ()  # a zone's days and their ends; empty: days of UTC


class Reports:
    def __init__(self, store: LedgerStore, journals_root: Path | None = None) -> None:
        self._store, self._root = store, journals_root

    def usage(self, query: UsageQuery) -> list[UsageLine]:
        """A line per group, in order; at most MAX_LINES."""
        groups = [_day_of(query.days) if name == "day" and query.days else GROUPS[name] for name in query.by]
        where = ["at_ms >= ?", "at_ms < ?"]
        values: list[Value] = [query.since_ms, query.until_ms]
        for name, wanted in query.only:
            where.append(f"{FILTERS[name]} = ?")
            values.append(wanted)
        statement = f"SELECT {', '.join([*groups, *_SUMS])} FROM {TABLE} WHERE {' AND '.join(where)}"
        if groups:
            places = ", ".join(str(number + 1) for number in range(len(groups)))
            statement += f" GROUP BY {places} ORDER BY {places} LIMIT {MAX_LINES}"
        return [_line(query, row) for row in self._store.query(statement, values)]

    def spent(self, kind: str, id: str, since_ms: int) -> int:
        """Picodollars of a key, team or model since then."""
        (line,) = self.usage(UsageQuery(since_ms=since_ms, only=((kind, id),)))
        return line.cost_pusd

    def row(self, request_id: str) -> dict[str, Value] | None:
        found = self._store.query(
            f"SELECT {', '.join(COLUMNS)} FROM {TABLE} WHERE request_id = ?", (request_id,)
        )
        return dict(zip(COLUMNS, found[0], strict=True)) if found else None

    def waiting(self) -> int:
        """Rows in write-ahead files of this machine that the store does not have yet."""
        count = 0
        for folder in journals(self._root) if self._root is not None else ():
            try:
                reader = JournalReader(folder)
                while lines := reader.next_lines():
                    ids = _row_ids(lines)
                    count += len(ids - self._store.known(list(ids)))
            except FileNotFoundError:  # moved while it was read
                continue
        return count

    def close(self) -> None:
        self._store.close()


def total(lines: Sequence[UsageLine]) -> UsageLine:
    sums = {name: sum(getattr(line, name) for line in lines) for name in _COUNTED}
    pusd = sum(line.cost_pusd for line in lines)
    return UsageLine(group={}, cost_pusd=pusd, cost_usd=usd(pusd), **sums)


def usd(pusd: int) -> str:
    """Exact, without trailing zeros: 0.00125."""
    sign, whole, part = "-" if pusd < 0 else "", *divmod(abs(pusd), PUSD_PER_USD)
    return f"{sign}{whole}.{part:012d}".rstrip("0").removesuffix(".")


def usage_query(
    by: str, since: str | None, until: str | None, only: Mapping[str, str], zone: str | None = None
) -> UsageQuery:
    """Parses the user's words; LedgerError begins with the name of the wrong one.

    zone: whose days are meant by dates and summed by `day`, such as Europe/Berlin; default: UTC
    """
    place = UTC if not zone else _zone(zone)
    since_ms = 0 if not since else _moment_ms("since", since, place)
    until_ms = _END_OF_TIME_MS if not until else _moment_ms("until", until, place)
    groups = _groups(by)
    days: tuple[tuple[str, int], ...] = ()
    if zone and "day" in groups:
        if not since:
            raise LedgerError(
                f"since: give the first day, at most {MAX_DAYS} days ago, to sum by days of a zone"
            )
        days = _days(since_ms, min(until_ms, int(time.time() * 1000) + _DAY_MS), place)
    return UsageQuery(groups, since_ms, until_ms, tuple(only.items()), days)


def _zone(name: str) -> tzinfo:
    try:
        return ZoneInfo(name)
    except (ValueError, OSError, ZoneInfoNotFoundError):
        raise LedgerError(f"zone: {name[:60]!r} is not a time zone such as Europe/Berlin") from None


def _days(since_ms: int, until_ms: int, zone: tzinfo) -> tuple[tuple[str, int], ...]:
    """Each day of the zone in this time, and its end: the next midnight there, 23 to 25 hours later."""
    day = datetime.fromtimestamp(since_ms / 1000, zone).date()
    found: list[tuple[str, int]] = []
    while not found or found[-1][1] < until_ms:
        if len(found) == MAX_DAYS:
            raise LedgerError(f"since: more than {MAX_DAYS} days are not summed by days of a zone")
        after = day + timedelta(days=1)
        midnight = datetime(after.year, after.month, after.day, tzinfo=zone)
        found.append((day.isoformat(), int(midnight.timestamp() * 1000)))
        day = after
    return tuple(found)


def _day_of(days: tuple[tuple[str, int], ...]) -> str:
    """SQL for a row's place in `days`."""
    ends = " ".join(f"WHEN at_ms < {end} THEN {place}" for place, (_, end) in enumerate(days))
    return f"CASE {ends} ELSE {len(days) - 1} END"


def _groups(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in GROUPS:
            raise LedgerError(f"by: {name!r} is not one of {', '.join(GROUPS)}")
    if len(set(names)) < len(names):
        raise LedgerError("by: a name is given twice")
    return names


def _moment_ms(name: str, text: str, zone: tzinfo = UTC) -> int:
    """2026-11-15 (of the zone; as an end, that whole day), 2026-11-15T08:00+01:00, or an age: 36h, 7d."""
    age = re.fullmatch(r"(\d{1,5})([hd])", text)
    if age:
        return int((time.time() - int(age[1]) * (3600 if age[2] == "h" else 86400)) * 1000)
    try:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=zone)
        if name == "until" and re.fullmatch(r"\d{4}-?\d{2}-?\d{2}", text):
            moment += timedelta(days=1)
        return int(moment.timestamp() * 1000)
    except (ValueError, OverflowError):
        message = f"{name}: {text!r} is not a time; write 2026-11-15, 2026-11-15T08:00Z, 36h or 7d"
        raise LedgerError(message) from None


def _line(query: UsageQuery, row: Row) -> UsageLine:
    by = query.by
    group = {name: _shown(name, value, query.days) for name, value in zip(by, row, strict=False)}
    *counts, high, low = (int(value or 0) for value in row[len(by) :])
    pusd = high * _HALF + low
    named = dict(zip(_COUNTED, counts, strict=True))
    return UsageLine(group=group, cost_pusd=pusd, cost_usd=usd(pusd), **named)


def _shown(name: str, value: str | int, days: tuple[tuple[str, int], ...]) -> str:
    if name == "day" and days:
        return days[int(value)][0]
    if name == "day":
        return datetime.fromtimestamp(int(value) * _DAY_MS / 1000, UTC).strftime("%Y-%m-%d")
    return str(value)


def _row_ids(lines: Sequence[bytes]) -> set[str]:
    ids = set()
    for line in lines:
        if line[:1] == CLOSED:
            try:
                ids.add(value_of(line).request_id)
            except Damaged:
                continue
    return ids
