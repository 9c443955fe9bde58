"""Filters on attributes, as in OpenAI's vector stores: parsed from JSON, evaluated in plain Python.

`matches` is the oracle: stores translate filters into masks, SQL or Qdrant's conditions that agree with it.
Types are never mixed: the number 1, the string "1" and true differ. A chunk without the attribute matches
`ne` and `nin` only. Order is defined for numbers alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

from ridgeline.retrieval.errors import BadInput
from ridgeline.retrieval.types import Attribute, Attributes

Comparison = Literal["eq", "ne", "gt", "gte", "lt", "lte", "in", "nin"]
COMPARISONS = ("eq", "ne", "gt", "gte", "lt", "lte", "in", "nin")
ORDERED = ("gt", "gte", "lt", "lte")
MAX_DEPTH = 16
MAX_CONDITIONS = 256


@dataclass(frozen=True, slots=True)
class Compare:
    """values has one member unless type is in or nin."""

    type: Comparison
    key: str
    values: tuple[Attribute, ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Compare) and self._typed == other._typed

    def __hash__(self) -> int:
        return hash(self._typed)

    @property
    def _typed(self) -> tuple[object, ...]:
        """Filters are the keys of caches: to Python alone, True equals 1.0 and has its hash."""
        return self.type, self.key, tuple((kind_of(value), value) for value in self.values)

    def matches(self, attributes: Attributes) -> bool:
        value = attributes.get(self.key)
        if self.type in ("ne", "nin"):
            return value is None or not any(equal(value, one) for one in self.values)
        if value is None:
            return False
        if self.type in ("eq", "in"):
            return any(equal(value, one) for one in self.values)
        return _ordered(self.type, value, self.values[0])

    def __str__(self) -> str:
        shown = ", ".join(repr(value) for value in self.values)
        return f"{self.key} {self.type} " + (f"[{shown}]" if self.type in ("in", "nin") else shown)


@dataclass(frozen=True, slots=True)
class Combine:
    type: Literal["and", "or"]
    filters: tuple[Filter, ...]

    def matches(self, attributes: Attributes) -> bool:
        results = (one.matches(attributes) for one in self.filters)
        return all(results) if self.type == "and" else any(results)

    def __str__(self) -> str:
        return "(" + f" {self.type} ".join(str(one) for one in self.filters) + ")"


Filter: TypeAlias = Compare | Combine


def parse_filter(value: object, field: str = "filters") -> Filter:
    """A filter from its JSON form. BadInput names the part that is wrong."""
    left = [MAX_CONDITIONS]
    return _parse(value, field, 1, left)


def kind_of(value: Attribute) -> type:
    """bool, float or str: the types that never mix."""
    return bool if isinstance(value, bool) else float if isinstance(value, int | float) else str


def equal(left: Attribute, right: Attribute) -> bool:
    return kind_of(left) is kind_of(right) and left == right


def reason(where: Filter | None, attributes: Attributes) -> str:
    """Why the filter lets these attributes through or not: the first part that decides."""
    if where is None:
        return "no filter"
    if where.matches(attributes):
        return f"matches {where}"
    if isinstance(where, Combine) and where.type == "and":
        return next(reason(one, attributes) for one in where.filters if not one.matches(attributes))
    if isinstance(where, Combine):
        return f"excluded: no part of {where} matches"
    return f"excluded by {where}: the value is {attributes.get(where.key)!r}"


def _ordered(type: str, left: Attribute, right: Attribute) -> bool:
    if kind_of(left) is not float:
        return False
    a, b = cast(float, left), cast(float, right)
    return {"gt": a > b, "gte": a >= b, "lt": a < b, "lte": a <= b}[type]


def _parse(value: object, field: str, depth: int, left: list[int]) -> Filter:
    if not isinstance(value, Mapping):
        raise BadInput(field, "must be an object with type")
    if depth > MAX_DEPTH:
        raise BadInput(field, f"filters are nested more than {MAX_DEPTH} deep")
    left[0] -= 1
    if left[0] < 0:
        raise BadInput(field, f"there are more than {MAX_CONDITIONS} conditions")
    kind = value.get("type")
    if kind in ("and", "or"):
        _check_keys(value, {"type", "filters"}, field)
        parts = value.get("filters")
        if not isinstance(parts, list) or not parts:
            raise BadInput(f"{field}.filters", "must be a list with at least one filter")
        parsed = (_parse(one, f"{field}.filters[{i}]", depth + 1, left) for i, one in enumerate(parts))
        return Combine(cast(Literal["and", "or"], kind), tuple(parsed))
    if kind not in COMPARISONS:
        known = ", ".join((*COMPARISONS, "and", "or"))
        raise BadInput(f"{field}.type", f"{kind!r} is not one of {known}")
    _check_keys(value, {"type", "key", "value"}, field)
    key = value.get("key")
    if not isinstance(key, str) or not key:
        raise BadInput(f"{field}.key", "must name an attribute")
    return Compare(cast(Comparison, kind), key, _values(kind, value.get("value"), f"{field}.value"))


def _values(kind: str, value: object, field: str) -> tuple[Attribute, ...]:
    if kind in ("in", "nin"):
        if not isinstance(value, list):
            raise BadInput(field, f"{kind} needs a list of values")
        return tuple(_scalar(one, f"{field}[{i}]") for i, one in enumerate(value))
    one = _scalar(value, field)
    if kind in ORDERED and kind_of(one) is not float:
        raise BadInput(field, f"{kind} needs a number: order is defined for numbers alone")
    return (one,)


def _scalar(value: object, field: str) -> Attribute:
    if isinstance(value, bool | str):
        return value
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    raise BadInput(field, "must be a string, a finite number or a boolean")


def _check_keys(value: Mapping[object, object], known: set[str], field: str) -> None:
    for key in value:
        if key not in known:
            raise BadInput(f"{field}.{key}", f"is not known; known are {', '.join(sorted(known))}")
