"""From a body's fields on the form of its answer to a grammar, or to a 400 that names the field.

Chat and completions pass `response_format`, the `guided_` fields and `structured_outputs`; the other
endpoints pass schemas and formats of other shapes. Everything is bounded. Nothing is compiled here: errors
that only the engine finds come back with the field "grammar", and the job renames it.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from ridgeline.engine.errors import InvalidRequest
from ridgeline.engine.grammar import Grammar
from ridgeline.engine.grammar.enforced import ANY_OBJECT
from ridgeline.engine.grammar.keywords import enforced_schema, refuse_embedded, schema_grammar
from ridgeline.engine.grammar.patterns import WHITESPACE
from ridgeline.server.errors import BadRequest
from ridgeline.server.openai_api.request_bodies import (
    ChatRequest,
    CompletionRequest,
    JsonSchemaFormat,
    ResponseFormat,
    StructuredOutputs,
)

MAX_REGEX_BYTES = 16 << 10
MAX_GRAMMAR_BYTES = 64 << 10
MAX_CHOICES = 1_000
MAX_CHOICE_BYTES = 4 << 10
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")

RequestedGrammar = tuple[Grammar, str]  # and the field of the body that asks for it


def requested_grammar(body: ChatRequest | CompletionRequest) -> RequestedGrammar | None:
    """The one grammar that the body asks for, from any of its fields."""
    format = body.response_format if isinstance(body, ChatRequest) else None
    asked = [
        format_grammar(format) if format is not None else None,
        guided_grammar("guided_json", "json", body.guided_json),
        guided_grammar("guided_regex", "regex", body.guided_regex),
        guided_grammar("guided_choice", "choice", body.guided_choice),
        guided_grammar("guided_grammar", "grammar", body.guided_grammar),
        _structured_outputs(body.structured_outputs),
    ]
    return one_of(asked)


def one_of(asked: list[RequestedGrammar | None]) -> RequestedGrammar | None:
    found = [one for one in asked if one is not None]
    if len(found) > 1:
        raise BadRequest(found[1][1], f"cannot be combined with {found[0][1]}: an answer has one format")
    return found[0] if found else None


def format_grammar(format: ResponseFormat, field: str = "response_format") -> RequestedGrammar | None:
    """From OpenAI's `response_format`, or llama.cpp's, which has the schema beside the type."""
    if format.schema is not None and (format.type == "text" or format.json_schema is not None):
        raise BadRequest(f"{field}.schema", "only allowed with type: json_object, or without json_schema")
    match format.type:
        case "text":
            return None
        case "json_object" | "json_schema" if format.schema is not None and format.json_schema is None:
            return json_schema_grammar(format.schema, f"{field}.schema"), f"{field}.schema"
        case "json_object":
            return Grammar("json_object"), field
        case "json_schema":
            if format.json_schema is None:
                raise BadRequest(f"{field}.json_schema", "this field is required", "missing_field")
            return named_schema_grammar(format.json_schema, f"{field}.json_schema")
    message = f"{format.type[:100]!r} is unknown; known are text, json_object and json_schema"
    raise BadRequest(f"{field}.type", message)


def named_schema_grammar(named: JsonSchemaFormat, field: str) -> RequestedGrammar:
    """From a schema with a name: `response_format.json_schema`, or `text.format` of /v1/responses."""
    if named.name is not None and not _NAME.fullmatch(named.name):
        raise BadRequest(f"{field}.name", "must be 1 to 64 of a-z, A-Z, 0-9, _ and -")
    if named.schema is None:
        raise BadRequest(f"{field}.schema", "this field is required", "missing_field")
    return json_schema_grammar(named.schema, f"{field}.schema"), f"{field}.schema"


def json_schema_grammar(schema: Any, field: str) -> Grammar:
    """From a schema in `field`; unsupported parts are refused with their path in it."""
    try:
        return schema_grammar(schema)
    except InvalidRequest as error:
        raise _refusal(error, field) from None


def check_strict_schema(schema: Any, field: str) -> None:
    """For a strict tool: the grammar must enforce every keyword of its parameters."""
    try:
        enforced_schema(schema, strict=True)
    except InvalidRequest as error:
        raise _refusal(error, field) from None


def _refusal(error: InvalidRequest, field: str) -> BadRequest:
    path = f"{field}.{error.field}" if error.field else field
    return BadRequest(path, error.message, "unsupported_field" if "not supported" in error.message else None)


def schema_headers(grammar: Grammar | None) -> dict[str, str]:
    """Response headers about the schema: keywords without effect, and keywords checked at the end."""
    if grammar is None:
        return {}
    told = {"x-ridgeline-schema-ignored": grammar.ignored, "x-ridgeline-schema-checked": grammar.checked}
    return {name: _header_value(words) for name, words in told.items() if words}


def _header_value(words: tuple[str, ...]) -> str:
    return ", ".join("".join(c if " " <= c <= "~" and c != "," else "?" for c in word) for word in words)


def embedded(grammar: Grammar) -> str:
    """A JSON grammar as it follows %json in a Lark grammar, without the prefix by which the engine detects
    another notation.
    """
    schema: Any = json.loads(grammar.source) if grammar.kind == "json_schema" else ANY_OBJECT
    if schema is True:
        schema = {}
    if isinstance(schema, dict):
        own = schema.get("x-guidance", {})
        schema = {**schema, "x-guidance": {**own, "whitespace_pattern": WHITESPACE}}  # as in a schema alone
    return json.dumps(schema, ensure_ascii=False).replace("::=", r":\u003a=")


def guided_grammar(field: str, kind: str, value: Any) -> RequestedGrammar | None:
    """From a `guided_` field, or its equivalent in `structured_outputs`."""
    if value is None:
        return None
    match kind:
        case "json":
            return json_schema_grammar(_parsed(value, field), field), field
        case "regex":
            _check_text(value, field, MAX_REGEX_BYTES)
            return Grammar("regex", value), field
        case "choice":
            return _choice(value, field), field
        case _:
            return _own_grammar(value, field), field


def _structured_outputs(asked: StructuredOutputs | None) -> RequestedGrammar | None:
    if asked is None:
        return None
    field = "structured_outputs"
    return one_of(
        [
            guided_grammar(f"{field}.json", "json", asked.json),
            guided_grammar(f"{field}.regex", "regex", asked.regex),
            guided_grammar(f"{field}.choice", "choice", asked.choice),
            guided_grammar(f"{field}.grammar", "grammar", asked.grammar),
            (Grammar("json_object"), f"{field}.json_object") if asked.json_object else None,
        ]
    )


def _parsed(value: Any, field: str) -> Any:
    """A schema may be given as text."""
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        raise BadRequest(field, f"is not JSON: {error}") from None


def _choice(texts: list[str], field: str) -> Grammar:
    if not 1 <= len(texts) <= MAX_CHOICES:
        raise BadRequest(field, f"must have 1 to {MAX_CHOICES} texts, has {len(texts)}")
    for place, text in enumerate(texts):
        _check_text(text, f"{field}[{place}]", MAX_CHOICE_BYTES)
    source = json.dumps(texts, ensure_ascii=False)
    if len(source.encode()) > MAX_GRAMMAR_BYTES:
        raise BadRequest(field, f"has more than {MAX_GRAMMAR_BYTES} bytes")
    return Grammar("choice", source)


def _own_grammar(source: str, field: str) -> Grammar:
    _check_text(source, field, MAX_GRAMMAR_BYTES)
    try:
        refuse_embedded(source)
    except InvalidRequest as error:
        raise BadRequest(field, f"in an embedded schema, {error}") from None
    return Grammar("lark", source)


def _check_text(text: str, field: str, most_bytes: int) -> None:
    if not text:
        raise BadRequest(field, "is empty")
    if "\0" in text:
        raise BadRequest(field, "contains a null character")
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise BadRequest(field, "contains half of a character (a lone surrogate)") from None
    if size > most_bytes:
        raise BadRequest(field, f"has {size} bytes; at most {most_bytes} can be served")
