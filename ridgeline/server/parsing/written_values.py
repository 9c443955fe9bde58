"""Converts arguments that a model writes as text between tags to one JSON object as they stream.

The tags give names and ends; the tool's schema (or the format itself) determines which values are strings. A
string is emitted as it streams; any other value when its end is known, unchanged if it is JSON, otherwise
quoted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ridgeline.server.parsing.events import Tool
from ridgeline.server.parsing.parsed_answer import ParsedAnswer

_TYPES_OF = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_MAX_DEPTH = 8


class ArgumentsWriter:
    """The arguments of one call, written member by member."""

    def __init__(self, answer: ParsedAnswer) -> None:
        self._out = answer.arguments
        self._names: set[str] = set()
        self._out("{")

    def is_new(self, name: str) -> bool:
        """Whether the member has no value yet; duplicates are not written."""
        return name not in self._names

    def name(self, name: str) -> None:
        self._out((", " if self._names else "") + quoted(name) + ": ")
        self._names.add(name)

    def whole(self, text: str) -> None:
        self._out(text)

    def open_string(self) -> None:
        self._out('"')

    def string(self, text: str) -> None:
        self._out(quoted(text)[1:-1])

    def close_string(self) -> None:
        self._out('"')

    def close(self) -> None:
        self._out("}")


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def value_types(tool: Tool, name: str) -> frozenset[str]:
    """The JSON types that the schema allows for a parameter; empty if it does not specify any."""
    properties = (tool.parameters or {}).get("properties")
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    return _types(schema, tool.parameters or {}, _MAX_DEPTH)


def as_json(text: str, types: frozenset[str]) -> str:
    """The JSON of a value written as text, given its allowed types.

    JSON of an allowed type stays unchanged; Python's True, False and None become their JSON equivalents.
    Everything else is a string, whatever the schema says: the client sees the model's text.
    """
    written = text.strip()
    written = _PYTHON_WORDS.get(written, written)
    found = _type_of(written)
    if found is None:
        return quoted(text)
    allowed = types or {"object", "array", "number", "boolean", "null"}
    if found in allowed or (found == "integer" and "number" in allowed):
        return written
    return quoted(text)


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    if not isinstance(schema, Mapping) or depth == 0:
        return frozenset()
    given = schema.get("type")
    if isinstance(given, str):
        return frozenset((given,))
    if isinstance(given, list):
        return frozenset(item for item in given if isinstance(item, str))
    if isinstance(schema.get("enum"), list):
        return frozenset(_json_type(value) for value in schema["enum"])
    if "const" in schema:
        return frozenset((_json_type(schema["const"]),))
    found: set[str] = set()
    for keyword in ("anyOf", "oneOf"):
        for part in schema[keyword] if isinstance(schema.get(keyword), list) else ():
            found |= _types(part, root, depth - 1)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = root
        for step in reference[2:].split("/"):
            target = target.get(step) if isinstance(target, Mapping) else None
        found |= _types(target, root, depth - 1)
    return frozenset(found)


def _type_of(written: str) -> str | None:
    try:
        return _json_type(json.loads(written, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return None


def _json_type(value: Any) -> str:
    if isinstance(value, bool) or type(value) in _TYPES_OF:
        return _TYPES_OF[type(value)]
    return "integer" if isinstance(value, int) or float(value).is_integer() else "number"


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
