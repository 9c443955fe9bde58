"""From fields of a body to a grammar: what is taken, what is refused, and what the refusal points at."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ridgeline.engine.grammar import Grammar, keywords
from ridgeline.server import structured
from ridgeline.server.decoding import decode
from ridgeline.server.errors import BadRequest, ErrorReply
from ridgeline.server.protocol import ChatRequest, CompletionRequest
from ridgeline.server.structured import asked_grammar, embedded, json_schema_grammar

POINT = {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}


def chat(**fields: Any) -> ChatRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return decode(json.dumps(body).encode(), ChatRequest)


def completion(**fields: Any) -> CompletionRequest:
    return decode(json.dumps({"model": "m", "prompt": "hi", **fields}).encode(), CompletionRequest)


def schema_format(schema: Any, **named: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "point", "schema": schema, **named}}


def refusal(**fields: Any) -> ErrorReply:
    with pytest.raises(BadRequest) as caught:
        asked_grammar(chat(**fields))
    return caught.value.reply


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, ("json_object", "response_format")),
        (
            {"response_format": schema_format(POINT, strict=True, description="a point")},
            ("json_schema", "response_format.json_schema.schema"),
        ),
        ({"guided_json": POINT}, ("json_schema", "guided_json")),
        ({"guided_json": json.dumps(POINT)}, ("json_schema", "guided_json")),
        ({"guided_json": True}, ("json_schema", "guided_json")),
        ({"guided_regex": "[a-z]+"}, ("regex", "guided_regex")),
        ({"guided_choice": ["a", "b"]}, ("choice", "guided_choice")),
        ({"guided_grammar": 'start: "a"'}, ("lark", "guided_grammar")),
        ({"structured_outputs": {"json": POINT}}, ("json_schema", "structured_outputs.json")),
        ({"structured_outputs": {"regex": "a|b"}}, ("regex", "structured_outputs.regex")),
        ({"structured_outputs": {"choice": ["a"]}}, ("choice", "structured_outputs.choice")),
        ({"structured_outputs": {"grammar": "start: A"}}, ("lark", "structured_outputs.grammar")),
        ({"structured_outputs": {"json_object": True}}, ("json_object", "structured_outputs.json_object")),
    ],
)
def test_each_way_to_ask_becomes_one_grammar(fields, expected):
    asked = asked_grammar(chat(**fields))
    assert (asked and (asked[0].kind, asked[1])) == expected


def test_completions_take_the_guided_fields():
    assert asked_grammar(completion(guided_regex="a+")) == (Grammar("regex", "a+"), "guided_regex")


def test_annotations_pass_and_are_left_out():
    noted = {
        **POINT,
        "title": "Point",
        "description": "2-D",
        "x-order": 1,
        "$comment": "",
        "default": {"x": 1},
    }
    assert json.loads(json_schema_grammar(noted, "f").source) == POINT


def test_dates_are_those_of_the_calendar():
    written = json.loads(json_schema_grammar({"type": "string", "format": "date"}, "f").source)
    assert "format" not in written
    assert "-02-29" in written["pattern"]


@pytest.mark.parametrize(
    ("schema", "path", "words"),
    [
        ({"not": {}}, "not", "'not' is not supported"),
        (
            {"properties": {"a": {"unevaluatedProperties": False}}},
            "properties.a.unevaluatedProperties",
            "'unevaluatedProperties' is not supported",
        ),
        ({"anyOf": [{}, {"items": {"uniqueItems": True}}]}, "anyOf[1].items.uniqueItems", "not supported"),
        ({"$defs": {"d": {"contentEncoding": "base64"}}}, "$defs.d.contentEncoding", "not supported"),
        ({"requierd": ["a"]}, "requierd", "not a keyword"),
        ({"x-guidance": {"lenient": True}}, "x-guidance", "not a keyword"),
        ({"$ref": "https://example.com/a.json"}, "$ref", "outside of the schema"),
        ({"items": {"$id": "inner"}}, "items.$id", "within a schema"),
        ({"$schema": "http://json-schema.org/draft-03/schema#"}, "$schema", "draft"),
        ({"format": "idn-email"}, "format", "'idn-email' is not supported"),
        ({"type": ["string", "text"]}, "type", "'text' is not supported"),
        ({"properties": []}, "properties", "must be an object"),
        ({"anyOf": {}}, "anyOf", "must be an array"),
        ({"items": 3}, "items", "must be a schema"),
        ({"enum": []}, "enum", "at least one value"),
        ({"minItems": 10**9}, "minItems", "at most"),
        ({"maxLength": 10**9}, "maxLength", "at most"),
        ({"minLength": -1}, "minLength", "not negative"),
        ({"minLength": "3"}, "minLength", "whole number"),
        ({"pattern": "a" * 5000}, "pattern", "longer than"),
        ({"pattern": "a\0b"}, "pattern", "null character"),
        ({"patternProperties": {"a\0": {}}}, "patternProperties.a\0", "null character"),
        ({"pattern": "a", "format": "date"}, "format", "together with 'pattern'"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_its_path(schema, path, words):
    error = refusal(response_format=schema_format(schema))
    assert error.param == f"response_format.json_schema.schema.{path}"
    assert words in error.message


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (nested(keywords.MAX_DEPTH + 1), "nested deeper"),
        ({"anyOf": [{}] * keywords.MAX_SUBSCHEMAS}, "more than"),
        ({"properties": {f"p{i}": True for i in range(keywords.MAX_PROPERTIES + 1)}}, "properties"),
        ({"enum": list(range(keywords.MAX_ENUM_VALUES + 1))}, "values"),
        ({"const": "a" * keywords.MAX_SCHEMA_BYTES}, "bytes"),
    ],
    ids=["depth", "schemas", "properties", "enum", "bytes"],
)
def test_schemas_have_bounds(schema, words):
    error = refusal(guided_json=schema)
    assert error.param is not None
    assert error.param.startswith("guided_json")
    assert words in error.message


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
            "required",
        ),
        (
            {"response_format": schema_format(POINT, name="a b")},
            "response_format.json_schema.name",
            "1 to 64",
        ),
        ({"guided_json": "{"}, "guided_json", "not JSON"),
        ({"guided_json": "[" * 100_000}, "guided_json", "not JSON"),
        ({"guided_regex": ""}, "guided_regex", "empty"),
        ({"guided_regex": "a\0"}, "guided_regex", "null character"),
        ({"guided_regex": "a" * (structured.MAX_REGEX_BYTES + 1)}, "guided_regex", "bytes"),
        ({"guided_choice": []}, "guided_choice", "1 to"),
        ({"guided_choice": ["a", ""]}, "guided_choice[1]", "empty"),
        ({"guided_choice": ["a"] * (structured.MAX_CHOICES + 1)}, "guided_choice", "1000"),
        ({"guided_choice": ["a" * 5000]}, "guided_choice[0]", "bytes"),
        ({"guided_grammar": 'start: %json {"not": {}}'}, "guided_grammar", "'not' is not supported"),
        ({"guided_grammar": "start: " + "%json {} " * 40}, "guided_grammar", "more than 32"),
        ({"guided_grammar": "a" * (structured.MAX_GRAMMAR_BYTES + 1)}, "guided_grammar", "bytes"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "combined with guided_regex"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs.regex",
            "combined with response_format",
        ),
        (
            {"structured_outputs": {"regex": "a", "json": {}}},
            "structured_outputs.regex",
            "combined with structured_outputs.json",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_field_to_change(fields, param, words):
    error = refusal(**fields)
    assert error.param == param
    assert words in error.message


def test_an_embedded_schema_is_checked_and_its_blanks_are_bounded():
    field = "tools[0].function.parameters"
    assert "whitespace_pattern" in embedded(json_schema_grammar(POINT, field))
    with pytest.raises(BadRequest) as caught:
        json_schema_grammar({"if": {}}, field)
    assert caught.value.reply.param == "tools[0].function.parameters.if"
