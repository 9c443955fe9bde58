"""A filter as a condition of PostgreSQL on a document's attributes (jsonb), equal to `Filter.matches`."""

from __future__ import annotations

import json

from ridgeline.retrieval.filters import Compare, Filter
from ridgeline.storage.database import Value

_SIGNS = {"gt": ">", "gte": ">=", "lt": "<", "lte": "<="}


def condition(where: Filter) -> tuple[str, list[Value]]:
    """SQL with a place for each value, and the values. Values never become part of the text."""
    if isinstance(where, Compare):
        return _comparison(where)
    parts = [condition(one) for one in where.filters]
    joined = f" {where.type.upper()} ".join(sql for sql, _ in parts)
    return f"({joined})", [value for _, values in parts for value in values]


def _comparison(where: Compare) -> tuple[str, list[Value]]:
    if where.type in _SIGNS:
        sql = (
            "(CASE WHEN jsonb_typeof(d.attributes -> ?::text) = 'number' "
            f"THEN (d.attributes ->> ?::text)::float8 {_SIGNS[where.type]} ?::float8 ELSE false END)"
        )
        return sql, [where.key, where.key, float(where.values[0])]
    if not where.values:
        return ("false" if where.type == "in" else "true"), []
    places = ", ".join(["?::text::jsonb"] * len(where.values))
    found = f"coalesce(d.attributes -> ?::text IN ({places}), false)"
    values: list[Value] = [where.key, *(json.dumps(value) for value in where.values)]
    return (found if where.type in ("eq", "in") else f"NOT {found}"), values
