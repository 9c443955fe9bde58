"""The arguments of one tool as a grammar, in JSON or in other formats that some models use.

The grammar library handles JSON. The others are generated from the schema here: keywords that they cannot
express are refused for strict tools and not enforced for others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from ridgeline.engine.errors import InvalidRequest
from ridgeline.engine.grammar.keywords import enforced_schema
from ridgeline.server.parsing.events import Tool
from ridgeline.server.parsing.formats import dsml, gemma, qwen_xml
from ridgeline.server.parsing.lark import Lark, either, pattern, quoted
from ridgeline.server.parsing.written_values import value_types

ArgumentGrammar = Callable[[Lark, Tool, str, bool], str]

_EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
_SAYS_NOTHING = frozenset(
    ("title", "description", "default", "examples", "$schema", "$id", "$comment", "deprecated", "readOnly")
)
_OF_OBJECTS = frozenset(("type", "properties", "required", "additionalProperties", "$defs", "definitions"))
_OF_STRINGS = frozenset(("type", "enum", "const"))
_OF_NUMBERS = frozenset(("type",))
_OF_ARRAYS = frozenset(("type", "items"))
_MAX_DEPTH = 16


class UnsupportedSchema(ValueError):
    """A strict tool's schema has a keyword that this model's call format cannot enforce."""

    def __init__(self, tool_name: str, message: str) -> None:
        super().__init__(message)
        self.tool_name = tool_name


def json_arguments(lark: Lark, tool: Tool, name: str, by_schema: bool) -> str:
    """A rule for a JSON object. Not `by_schema`: any object."""
    schema = object_schema(tool) if by_schema else {"type": "object"}
    return lark.rule(name, _json(lark, tool, schema))


def qwen_arguments(lark: Lark, tool: Tool, name: str, by_schema: bool) -> str:
    end = f"\n{qwen_xml.PARAMETER_CLOSE}\n"
    free = lark.rule("value", f"/(?s:.*){pattern(end)}/", "[lazy]")
    if not by_schema:
        return lark.rule(name, f'( {quoted(qwen_xml.PARAMETER_OPEN)} /[^>\\n]+/ ">\\n" {free} )*')

    def member(key: str, schema: Mapping[str, Any], place: str) -> str:
        opening = quoted(f"{qwen_xml.PARAMETER_OPEN}{key}>\n")
        return f"{opening} {_tagged_value(lark, tool, key, schema, place, free, end)}"

    return lark.rule(name, " ".join(_members(tool, name, member)) or quoted(""))


def dsml_arguments(lark: Lark, tool: Tool, name: str, by_schema: bool) -> str:
    end = f"{dsml.PARAMETER_CLOSE}\n"
    free = lark.text_until(dsml.PARAMETER_CLOSE, "value", is_special=False)
    free = f'{free} "\\n"'
    if not by_schema:
        attributes = either([quoted('" string="true">'), quoted('" string="false">')])
        return lark.rule(name, f'( {lark.text(dsml.PARAMETER)} /[^">\\n]+/ {attributes} {free} )*')

    def member(key: str, schema: Mapping[str, Any], place: str) -> str:
        is_text = "string" in value_types(tool, key)
        opening = lark.text(f'{dsml.PARAMETER}{key}" string="{"true" if is_text else "false"}">')
        return f"{opening} {_tagged_value(lark, tool, key, schema, place, free, end)}"

    return lark.rule(name, " ".join(_members(tool, name, member)) or quoted(""))


def gemma_arguments(lark: Lark, tool: Tool, name: str, by_schema: bool) -> str:
    """The members between the braces."""
    gemma_any(lark)
    if not by_schema:
        return lark.rule(name, "any_members?")
    return lark.rule(name, _GemmaSchema(lark, tool).members(object_schema(tool), name, 0) or quoted(""))


def object_schema(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments, which are an object."""
    schema = tool.parameters
    if not schema:
        return dict(_EMPTY)
    if schema.get("type", "object") != "object":
        raise UnsupportedSchema(
            tool.name, f"arguments must be an object; the schema's type is {schema['type']!r}"
        )
    return {**schema, "type": "object"}


def _json(lark: Lark, tool: Tool, schema: Mapping[str, Any]) -> str:
    """JSON of a schema: every keyword for a strict tool, otherwise as far as the library supports it."""
    try:
        return lark.json(enforced_schema(dict(schema), tool.strict), lenient=not tool.strict)
    except InvalidRequest as error:
        if not tool.strict:
            return lark.json(schema, lenient=True)
        raise UnsupportedSchema(tool.name, f"{error.field}: {error.message}".removeprefix(": ")) from None


def _members(tool: Tool, name: str, member: Callable[[str, Mapping[str, Any], str], str]) -> list[str]:
    """Each parameter in the schema's order; those not required are optional."""
    schema = object_schema(tool)
    _check(tool, schema, _OF_OBJECTS, "the parameters")
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    required = schema.get("required") or ()
    members: list[str] = []
    for index, (key, field) in enumerate((schema.get("properties") or {}).items()):
        if ">" in key or '"' in key or "\n" in key:
            raise UnsupportedSchema(tool.name, f"a parameter called {key!r} cannot be written in this format")
        field = {**definitions, **field} if isinstance(field, Mapping) else dict(definitions)
        written = member(key, field, f"{name}_{index}")
        members.append(written if key in required else f"( {written} )?")
    return members


def _tagged_value(
    lark: Lark, tool: Tool, key: str, schema: Mapping[str, Any], place: str, free: str, end: str
) -> str:
    """A value with its closing tag: a string as it is, anything else as JSON."""
    types = value_types(tool, key)
    if types and "string" not in types:
        return f"{lark.rule(place, _json(lark, tool, schema))} {lark.text(end)}"
    _check(tool, schema, _OF_STRINGS | {"$defs", "definitions", "anyOf", "oneOf", "$ref"}, key)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and values:
        written = [value if isinstance(value, str) else json.dumps(value) for value in values]
        return f"{either([quoted(value) for value in written])} {lark.text(end)}"
    return free


def _check(tool: Tool, schema: Mapping[str, Any], known: frozenset[str], place: str) -> None:
    unknown = sorted(set(schema) - known - _SAYS_NOTHING)
    if tool.strict and unknown:
        message = f"{unknown[0]} of {place} cannot be enforced in this model's call format"
        raise UnsupportedSchema(tool.name, message)


def gemma_any(lark: Lark) -> str:
    """A value of any kind, in Gemma's format."""
    quote = lark.text(gemma.QUOTE)
    if gemma.QUOTE in lark.tokens:
        lark.rule("any_string", f"{quote} {lark.any_text('ANY_STRING')} {quote}")
    else:
        until = lark.text_until(gemma.QUOTE, "any_string_end", is_special=True)
        lark.rule("any_string", f"{quote} {until}")
    lark.rule("NUMBER", r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][+-]?[0-9]{1,3})?/")
    lark.rule("INTEGER", r"/-?(0|[1-9][0-9]{0,17})/")
    lark.rule("any_members", 'KEY ":" any_value ( "," KEY ":" any_value )*')
    lark.rule("KEY", r"/[A-Za-z_][A-Za-z0-9_-]*/")
    return lark.rule(
        "any_value",
        'any_string | NUMBER | "true" | "false" | "null" | "{" any_members? "}" '
        '| "[" ( any_value ( "," any_value )* )? "]"',
    )


class _GemmaSchema:
    """Generates the grammar of a schema in Gemma's format."""

    def __init__(self, lark: Lark, tool: Tool) -> None:
        self._lark = lark
        self._tool = tool

    def members(self, schema: Mapping[str, Any], place: str, depth: int) -> str:
        """Members in the schema's order, with commas between those that are present."""
        _check(self._tool, schema, _OF_OBJECTS, place)
        required = schema.get("required") or ()
        items = [
            (quoted(f"{key}:") + " " + self.value(field, f"{place}_{index}", depth + 1), key in required)
            for index, (key, field) in enumerate((schema.get("properties") or {}).items())
        ]
        first, later = "", ""
        # From the last member on: what may follow if nothing has been written yet, and if something has.
        for index, (written, is_required) in reversed(list(enumerate(items))):
            item = self._lark.rule(f"{place}_item_{index}", written)
            with_rest = f"{item} {later}".rstrip()
            options = [with_rest] if is_required else [with_rest, first or quoted("")]
            following = [f'"," {with_rest}'] if is_required else [f'"," {with_rest}', later or quoted("")]
            first = self._lark.rule(f"{place}_first_{index}", " | ".join(options))
            later = self._lark.rule(f"{place}_later_{index}", " | ".join(following))
        return first

    def value(self, schema: Any, place: str, depth: int) -> str:
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return "any_value"
        if "const" in schema or isinstance(schema.get("enum"), list):
            _check(self._tool, schema, _OF_STRINGS, place)
            values = [schema["const"]] if "const" in schema else schema["enum"]
            return either([self._literal(value) for value in values])
        types = schema.get("type")
        kinds = [types] if isinstance(types, str) else types if isinstance(types, list) else []
        if not kinds:
            _check(self._tool, schema, _OF_NUMBERS, place)
            return "any_value"
        return either([self._kind(kind, schema, f"{place}_{kind}", depth) for kind in kinds])

    def _kind(self, kind: Any, schema: Mapping[str, Any], place: str, depth: int) -> str:
        if kind == "object" and schema.get("properties"):
            return f'"{{" {self.members(schema, place, depth)} "}}"'
        if kind == "array" and "items" in schema:
            _check(self._tool, schema, _OF_ARRAYS, place)
            item = self._lark.rule(f"{place}_each", self.value(schema["items"], f"{place}_i", depth + 1))
            return f'"[" ( {item} ( "," {item} )* )? "]"'
        _check(self._tool, schema, _OF_OBJECTS | _OF_ARRAYS, place)
        plain = {
            "string": "any_string",
            "number": "NUMBER",
            "integer": "INTEGER",
            "boolean": '( "true" | "false" )',
            "null": '"null"',
            "object": '"{" any_members? "}"',
            "array": '"[" ( any_value ( "," any_value )* )? "]"',
        }
        if kind not in plain:
            raise UnsupportedSchema(self._tool.name, f"there is no type {kind!r}")
        return plain[kind]

    def _literal(self, value: Any) -> str:
        if isinstance(value, str):
            return self._lark.text(f"{gemma.QUOTE}{value}{gemma.QUOTE}")
        return quoted(json.dumps(value))
