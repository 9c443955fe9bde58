"""Attributes as a payload of Qdrant, and a filter as its conditions, equal to `Filter.matches`.

A field's name holds the type and the key in hex: types never mix, and no key is read as a JSON path.
"""

from __future__ import annotations

from ridgeline.retrieval.filters import Compare, Filter, kind_of
from ridgeline.retrieval.stores.qdrant_api import Condition, matches, within
from ridgeline.retrieval.types import Attribute, Attributes

_NOTHING: Condition = {"has_id": []}
_LETTERS = {str: "s", float: "n", bool: "b"}
SCHEMAS = {"s": "keyword", "n": "float", "b": "bool"}  # of a payload index, by the letter


def field_of(key: str, value: Attribute) -> str:
    return _LETTERS[kind_of(value)] + key.encode("utf-8", "surrogatepass").hex()


def payload_of(attributes: Attributes) -> dict[str, Attribute]:
    return {field_of(key, value): value for key, value in attributes.items()}


def condition(where: Filter) -> Condition:
    if not isinstance(where, Compare):
        parts = [condition(one) for one in where.filters]
        return {"must": parts} if where.type == "and" else {"should": parts}
    if where.type in ("eq", "in"):
        return _any_of(where)
    if where.type in ("ne", "nin"):
        return {"must_not": [_any_of(where)]}
    value = where.values[0]
    return within("a." + field_of(where.key, value), **{where.type: float(value)})


def _any_of(where: Compare) -> Condition:
    parts = [_equals("a." + field_of(where.key, value), value) for value in where.values]
    return {"should": parts} if parts else _NOTHING


def _equals(field: str, value: Attribute) -> Condition:
    if kind_of(value) is float:
        return within(field, gte=float(value), lte=float(value))
    assert isinstance(value, str | bool)
    return matches(field, value)
