"""From fields of a body to a grammar: what is taken, what is refused, and what the refusal points at."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest

from ridgeline.engine.errors import SchemaViolation
from ridgeline.engine.grammar import Grammar, enforced, keywords
from ridgeline.engine.grammar.conformance import AnswerCheck, fault
from ridgeline.server.answering import structured
from ridgeline.server.answering.structured import (
    check_strict_schema,
    embedded,
    json_schema_grammar,
    requested_grammar,
    schema_headers,
)
from ridgeline.server.errors import BadRequest, ErrorReply
from ridgeline.server.http.decoding import decode
from ridgeline.server.openai_api.request_bodies import ChatRequest, CompletionRequest

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["x"],
    "additionalProperties": False,
}


def chat(**fields: Any) -> ChatRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return decode(json.dumps(body).encode(), ChatRequest)


def completion(**fields: Any) -> CompletionRequest:
    return decode(json.dumps({"model": "m", "prompt": "hi", **fields}).encode(), CompletionRequest)


def schema_format(schema: Any, **named: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "point", "schema": schema, **named}}


def refusal(**fields: Any) -> ErrorReply:
    with pytest.raises(BadRequest) as caught:
        requested_grammar(chat(**fields))
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
    asked = requested_grammar(chat(**fields))
    assert (asked and (asked[0].kind, asked[1])) == expected


def test_completions_take_the_guided_fields():
    assert requested_grammar(completion(guided_regex="a+")) == (Grammar("regex", "a+"), "guided_regex")


def test_annotations_pass_and_are_left_out():
    noted = {
        **POINT,
        "x-ridgeline-unbounded": True,
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
        ({"extends": {}}, "extends", "'extends' is not supported"),
        (
            {"properties": {"a": {"$dynamicRef": "#a"}}},
            "properties.a.$dynamicRef",
            "'$dynamicRef' is not supported",
        ),
        ({"anyOf": [{}, {"items": {"uniqueItems": 1}}]}, "anyOf[1].items.uniqueItems", "true or false"),
        ({"x-guidance": {"lenient": True}}, "x-guidance", "not supported"),
        ({"$ref": "https://example.com/a.json"}, "$ref", "another document"),
        ({"items": {"$id": "inner", "items": {"$ref": "#/items"}}}, "items.$id", "nested schema"),
        ({"$defs": {"a": {"$id": "#a"}}, "$ref": "#a"}, "$defs.a.$id", "nested schema"),
        ({"format": 3}, "format", "must be a string"),
        ({"type": ["string", "text"]}, "type", "'text' is not supported"),
        ({"properties": []}, "properties", "must be an object"),
        ({"anyOf": {}}, "anyOf", "must be an array"),
        ({"items": 3}, "items", "must be a schema"),
        ({"enum": []}, "enum", "at least one value"),
        ({"minItems": 10**9}, "minItems", "the limit is"),
        ({"minLength": 10**9}, "minLength", "the limit is"),
        ({"minLength": -1}, "minLength", "non-negative integer"),
        ({"minLength": "3"}, "minLength", "non-negative integer"),
        ({"pattern": "a" * 5000}, "pattern", "longer than"),
        ({"pattern": "a\0b"}, "pattern", "null character"),
        ({"patternProperties": {"a\0": {}}}, "patternProperties.a\0", "null character"),
        ({"not": {"type": "text"}}, "not.type", "'text' is not supported"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_its_path(schema, path, words):
    error = refusal(response_format=schema_format(schema))
    assert error.param == f"response_format.json_schema.schema.{path}"
    assert words in error.message


@pytest.mark.parametrize(
    ("schema", "ignored"),
    [
        ({"readonly": True, "links": [], "version": 3, "x-order": 1}, ("readonly", "links", "version")),
        ({"requierd": ["a"]}, ("requierd (required?)",)),
        ({"format": "google-duration"}, ("format google-duration",)),
        ({"format": "password"}, ("format password",)),
        ({"$schema": "https://example.com/own"}, ("$schema",)),
        ({"definitions": {"//": "a note"}}, ("//",)),
        ({"contentSchema": {}}, ("contentSchema",)),
    ],
)
def test_words_that_constrain_nothing_are_ignored_and_told(schema, ignored):
    grammar = json_schema_grammar({"type": "string", **schema}, "f")
    assert set(grammar.ignored) == set(ignored)
    assert schema_headers(grammar) == {"x-ridgeline-schema-ignored": ", ".join(grammar.ignored)}
    written = json.loads(grammar.source)
    assert written.pop("definitions", {}) == {}
    assert written == {"type": "string"}


def test_a_word_that_is_ignored_in_many_places_is_told_once():
    part = {"type": "string", "version": 3}
    schema = {"type": "object", "version": 1, "properties": {"a": part, "b": part}, "$defs": {"c": part}}
    headers = schema_headers(json_schema_grammar(schema, "f"))
    assert headers == {"x-ridgeline-schema-ignored": "version"}


@pytest.mark.parametrize(
    ("schema", "checked", "good", "bad"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems", "[1, 2]", "[1, 1]"),
        ({"not": {"const": 1}}, "not", "2", "1"),
        ({"if": {"type": "string"}, "then": {"const": "a"}}, "if", '"a"', '"b"'),
        ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, "oneOf", "1", "3"),
        ({"type": "object", "dependencies": {"a": ["b"]}}, "dependencies", '{"b": 1}', '{"a": 1}'),
        ({"dependentRequired": {"a": ["b"]}}, "dependentRequired", '{"b": 1}', '{"a": 1}'),
        ({"contains": {"const": 1}}, "contains", "[2, 1]", "[2]"),
        ({"propertyNames": {"maxLength": 1}}, "propertyNames", '{"a": 1}', '{"ab": 1}'),
        ({"type": "string", "pattern": "^(?!a)"}, "pattern", '"b"', '"a"'),
        ({"type": "string", "format": "regex"}, "format", '"a+"', '"a("'),
        ({"pattern": "^2", "format": "date"}, "format", '"2024-02-29"', '"2023-02-29"'),
        (
            {"type": "object", "properties": {"a": {}, "b": {}}, "maxProperties": 1},
            "maxProperties",
            '{"a": 1}',
            '{"a": 1, "b": 1}',
        ),
    ],
)
def test_what_no_grammar_enforces_is_checked_when_the_answer_is_complete(schema, checked, good, bad):
    grammar = json_schema_grammar(schema, "f")
    assert checked in grammar.checked
    assert checked in schema_headers(grammar)["x-ridgeline-schema-checked"]
    for text, is_good in ((good, True), (bad, False)):
        check = AnswerCheck.of(grammar)
        check.add(text)
        with contextlib.nullcontext() if is_good else pytest.raises(SchemaViolation):
            check.refuse_violation()


def test_older_and_foreign_words_are_written_in_todays():
    draft_3 = {"properties": {"a": {"type": "any", "required": True}, "b": {"required": False}}}
    assert json.loads(json_schema_grammar(draft_3, "f").source)["required"] == ["a"]
    open_api = {"type": "string", "nullable": True, "enum": ["a"]}
    written = json.loads(json_schema_grammar(open_api, "f").source)
    assert written == {"anyOf": [{"type": "string", "enum": ["a"]}, {"type": "null"}]}
    written = json.loads(json_schema_grammar({"type": "integer", "format": "int32"}, "f").source)
    assert (written["minimum"], written["maximum"]) == (-(2**31), 2**31 - 1)
    own = {"$id": "https://a.b/c", "$defs": {"d": {"type": "null"}}, "$ref": "https://a.b/c#/$defs/d"}
    assert json.loads(json_schema_grammar(own, "f").source)["$ref"] == "#/$defs/d"


@pytest.mark.parametrize("required", [5, [[]], ["a", 1], "a"])
def test_a_list_of_required_names_is_a_list_of_names(required):
    error = refusal(guided_json={"properties": {"a": {}}, "required": required})
    assert error.param == "guided_json.required"


def test_a_required_that_says_nothing_is_left_out():
    for nothing in (None, True):
        schema = {"type": "object", "anyOf": [{"properties": {"a": {}}, "required": nothing}]}
        assert "required" not in json_schema_grammar(schema, "f").source


def test_a_word_is_listed_as_checked_only_where_the_validator_checks_it():
    """Draft 7 does not know dependentRequired; a property named like an old word changes no draft."""
    asked = {"type": "object", "properties": {"dependencies": {}}, "dependentRequired": {"a": ["b"]}}
    for schema in (asked, {**asked, "definitions": {}}, {**asked, "dependencies": {"c": ["d"]}}):
        grammar = json_schema_grammar(schema, "f")
        assert "dependentRequired" in grammar.checked
        assert fault([grammar.check, '{"a": 1}'])
    old = json_schema_grammar({**asked, "$schema": "http://json-schema.org/draft-07/schema#"}, "f")
    assert "dependentRequired" in old.ignored
    assert "dependentRequired" not in old.checked
    pair = {"items": [{}], "prefixItems": [{}]}
    assert "older draft" in refusal(guided_json=pair).message


def test_an_object_whose_members_other_words_name_stays_open():
    then = {"if": {"required": ["k"]}, "then": {"required": ["x"]}}
    for words in (then, {"dependentRequired": {"k": ["x"]}}, {"dependencies": {"k": ["x"]}}):
        schema = {"type": "object", "properties": {"k": {}}, **words}
        assert "additionalProperties" not in json.loads(json_schema_grammar(schema, "f").source)
    either = {"type": ["object", "null"], "properties": {"k": {}}}
    assert json.loads(json_schema_grammar(either, "f").source)["additionalProperties"] is False
    maps = json.loads(json_schema_grammar({"type": ["object", "null"]}, "f").source)
    assert maps["maxProperties"] == enforced.MAX_MEMBERS


def test_a_nullable_object_keeps_the_places_of_its_members():
    nullable = {"type": "object", "nullable": True, "properties": {"x": {"type": "null"}}}
    schema = {"properties": {"a": nullable, "b": {"$ref": "#/properties/a/properties/x"}}}
    written = json.loads(json_schema_grammar(schema, "f").source)
    assert written["properties"]["a"]["type"] == ["object", "null"]
    assert "x" in written["properties"]["a"]["properties"]


def test_a_lone_surrogate_in_an_answer_is_not_blamed_on_memory():
    grammar = json_schema_grammar({"not": {"const": 1}}, "f")
    assert "memory" not in fault([grammar.check, '"\\ud800"'])


def test_a_schema_can_lift_the_bounds_on_numbers_and_members():
    bounded = json.loads(json_schema_grammar({"type": "number"}, "f").source)
    assert {"minimum", "maximum", "multipleOf"} <= bounded.keys()
    free = json_schema_grammar({"type": "number", "x-ridgeline-unbounded": True}, "f")
    assert json.loads(free.source) == {"type": "number"}
    assert schema_headers(free) == {}
    combined = {"allOf": [{"type": "object", "properties": {"a": {}}}, {"properties": {"b": {}}}]}
    assert "additionalProperties" not in json_schema_grammar(combined, "f").source


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
        json_schema_grammar({"extends": {}}, field)
    assert caught.value.reply.param == "tools[0].function.parameters.extends"
    with pytest.raises(BadRequest) as caught:  # a tool's arguments are not checked afterwards
        check_strict_schema({"properties": {"a": {"if": {}}}}, field)
    assert caught.value.reply.param == "tools[0].function.parameters.properties.a.if"
