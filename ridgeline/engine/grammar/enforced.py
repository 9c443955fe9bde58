"""Enforced: splits a schema into the part the grammar library enforces per token and the part left to a
check.

The input comes from `keywords`. The output allows everything the schema allows, with two exceptions that
bound an answer: numbers have a limited count of digits, and objects get no more members than they need. A
keyword that the library does not know, or that it reads more loosely than a validator, is left out and
listed in `checked`.
"""

from __future__ import annotations

import re
from typing import Any

from ridgeline.engine.grammar.patterns import DATE, DATE_TIME, TIME, strict_pattern

LARGEST_INTEGER = 2**53 - 1  # the largest that every JSON parser reads exactly
LARGEST_BOUND = 2**63 - 1024  # the library reads bounds as float64 and makes no range beyond this one
DECIMALS = 9  # digits after the decimal point
MAX_MEMBERS = 32  # for an object whose members are not named in the schema

LIBRARY_FORMATS = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"]
)
CHECKED_FORMATS = frozenset(
    (
        *("idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template"),
        *("json-pointer", "relative-json-pointer", "regex"),
    )
)
# Formats that the library checks by their characters only: it allows 29 February of any year.
_STRICT_FORMATS = {"date": DATE, "time": TIME, "date-time": DATE_TIME}
_UNENFORCED = frozenset(
    (
        *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems"),
        *("propertyNames", "dependencies", "dependentRequired", "dependentSchemas"),
        *("unevaluatedItems", "unevaluatedProperties", "contentEncoding", "contentMediaType"),
    )
)
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SCHEMAS = ("additionalProperties", "additionalItems", "items")
_OBJECT_WORDS = frozenset({"properties", "patternProperties", "additionalProperties", "required"})
# Keywords other than the object's own that may name members.
_PLACES = frozenset(
    (
        *("allOf", "anyOf", "oneOf", "$ref", "not", "if", "then", "else", "propertyNames"),
        *("dependencies", "dependentRequired", "dependentSchemas"),
    )
)
_LOOKS_AROUND = re.compile(r"\(\?(?:[=!]|<[=!])|\\[1-9]|\\k<|\\[bB]")

_NUMBER = {
    "type": "number",
    "minimum": -LARGEST_INTEGER,
    "maximum": LARGEST_INTEGER,
    "multipleOf": 10**-DECIMALS,
}
# Any JSON object, within the same bounds.
ANY_OBJECT = {
    "$ref": "#/$defs/object",
    "$defs": {
        "object": {
            "type": "object",
            "additionalProperties": {"$ref": "#/$defs/value"},
            "maxProperties": MAX_MEMBERS,
        },
        "value": {
            "anyOf": [
                {"type": ["string", "boolean", "null"]},
                _NUMBER,
                {"type": "array", "items": {"$ref": "#/$defs/value"}},
                {"$ref": "#/$defs/object"},
            ]
        },
    },
}


class Enforced:
    """written: for the library. checked: keywords left to a check of the finished answer, each with the first
    path where it occurs.
    """

    def __init__(self, schema: Any) -> None:
        self.checked: dict[str, str] = {}
        self._may_close = not _combines(schema)
        self.written = self._schema(schema, ())

    def _schema(self, schema: Any, path: tuple[str, ...]) -> Any:
        if not isinstance(schema, dict):
            return schema
        written: dict[str, Any] = {}
        for keyword, value in schema.items():
            if keyword in _UNENFORCED:
                self._defer(keyword, path)
            elif keyword != "x-ridgeline-unbounded":
                written[keyword] = self._value(keyword, value, (*path, keyword))
        if "oneOf" in written:
            self._defer("oneOf", path)  # the library may treat it as anyOf
        self._text(written, path)
        if not schema.get("x-ridgeline-unbounded"):
            _bound_number(written)
            self._bound_object(written)
        _narrow_bounds(written)
        self._member_counts(written, path)
        return written

    def _defer(self, keyword: str, path: tuple[str, ...]) -> None:
        self.checked.setdefault(keyword, ".".join((*path, keyword)).replace(".[", "["))

    def _value(self, keyword: str, value: Any, path: tuple[str, ...]) -> Any:
        if keyword in _SCHEMA_MAPS and isinstance(value, dict):
            return {name: self._schema(one, (*path, name)) for name, one in value.items()}
        if keyword in _SCHEMA_LISTS and isinstance(value, list):
            return [self._schema(one, (*path, f"[{i}]")) for i, one in enumerate(value)]
        return self._schema(value, path) if keyword in _SCHEMAS else value

    def _text(self, written: dict[str, Any], path: tuple[str, ...]) -> None:
        """Write patterns and formats in the strictest reading of all validators."""
        names = written.get("patternProperties", {})
        if any(_LOOKS_AROUND.search(name) for name in names):
            self._defer("patternProperties", path)
            del written["patternProperties"]
            # The library does not know which members are additional.
            written.pop("additionalProperties", None)
        elif names:
            written["patternProperties"] = {strict_pattern(name): one for name, one in names.items()}
        pattern, format = written.get("pattern"), written.get("format")
        if pattern is not None and _LOOKS_AROUND.search(pattern):
            self._defer("pattern", path)
            del written["pattern"]
        elif pattern is not None:
            written["pattern"] = strict_pattern(pattern)
        if format in CHECKED_FORMATS or (format in _STRICT_FORMATS and "pattern" in written):
            self._defer("format", path)
            del written["format"]
        elif format in _STRICT_FORMATS:
            written["pattern"] = _STRICT_FORMATS[written.pop("format")]

    def _bound_object(self, written: dict[str, Any]) -> None:
        """Members that the schema neither names nor forbids are not generated; a map has MAX_MEMBERS."""
        if not self._may_close or {"enum", "const", "$ref"} & written.keys():
            return
        types = written.get("type")
        is_object = "object" in (types if isinstance(types, list) else [types])
        if "properties" not in written and "patternProperties" not in written:
            if is_object and written.get("additionalProperties") is not False:
                written.setdefault("maxProperties", max(MAX_MEMBERS, written.get("minProperties", 0)))
        elif (is_object or types is None) and not {"additionalProperties", "minProperties"} & written.keys():
            named = written.get("properties", {})
            missing: dict[str, Any] = {name: {} for name in written.get("required", ()) if name not in named}
            written["properties"] = {**named, **missing}
            written["additionalProperties"] = False

    def _member_counts(self, written: dict[str, Any], path: tuple[str, ...]) -> None:
        """The library counts members only if all named ones are required."""
        counts = {"minProperties", "maxProperties"} & written.keys()
        if counts and set(written.get("properties", ())) - set(written.get("required", ())):
            for name in counts:
                self._defer(name, path)
                del written[name]


def _bound_number(written: dict[str, Any]) -> None:
    kinds = written.get("type")
    each = kinds if isinstance(kinds, list) else [kinds]
    if {"enum", "const"} & written.keys() or not {"integer", "number"} & set(each):
        return
    low = written.get("minimum", written.get("exclusiveMinimum"))
    high = written.get("maximum", written.get("exclusiveMaximum"))
    if low is None:
        written["minimum"] = -_beyond(high)
    if high is None:
        written["maximum"] = _beyond(low)
    if "number" in each and "multipleOf" not in written:
        written["multipleOf"] = 10**-DECIMALS


def _narrow_bounds(written: dict[str, Any]) -> None:
    """Replace bounds that the library cannot read, those of int64 among them, by the nearest that it can."""
    for keyword in ("minimum", "exclusiveMinimum"):
        if _is_number(written.get(keyword)):
            written[keyword] = max(written[keyword], -LARGEST_BOUND)
    for keyword in ("maximum", "exclusiveMaximum"):
        if _is_number(written.get(keyword)):
            written[keyword] = min(written[keyword], LARGEST_BOUND)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _beyond(other: Any) -> int:
    """The bound on one side if the schema gives the other."""
    size = abs(other) if _is_number(other) else 0
    return LARGEST_INTEGER if size < LARGEST_INTEGER else int(size) * 10


def _combines(schema: Any) -> bool:
    """Whether an object's members may be named in several places, so that none may forbid the others'."""
    if isinstance(schema, list):
        return any(_combines(one) for one in schema)
    if not isinstance(schema, dict):
        return False
    several = schema.get("allOf")
    if isinstance(several, list) and len(several) > 1:
        return True
    if (_OBJECT_WORDS & schema.keys() or len(_PLACES & schema.keys()) > 1) and _PLACES & schema.keys():
        return True
    return any(_combines(one) for one in schema.values())
