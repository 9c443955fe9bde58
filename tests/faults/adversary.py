"""What an adversary sends: for every endpoint with a body, each way of being wrong that its fields allow.

The list is made from the endpoints themselves, so that a new one is attacked as soon as it has a route.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ridgeline.server.app import ENDPOINTS
from ridgeline.server.http.body_fields import fields_of
from ridgeline.server.http.endpoint import Endpoint
from ridgeline.server.openapi.schemas import structs_of

JSON_TYPE = {"content-type": "application/json"}
MEGABYTE = "x" * 1_000_000
MANY = 100_000
MORE = 150_000  # than any endpoint takes


@dataclass(frozen=True)
class Attack:
    """`names`: what the answer must name; None where the body as a whole is wrong. `may_pass`: it is odd, but
    no client's mistake, and may be answered.
    """

    what: str
    endpoint: Endpoint
    body: bytes
    names: str | None = None
    headers: dict[str, str] = field(default_factory=lambda: dict(JSON_TYPE))
    may_pass: bool = False


ATTACKED = [one for one in ENDPOINTS if (one.request or one.form) and "{" not in one.path]


def attacks(endpoint: Endpoint) -> Iterator[Attack]:
    """Made one by one: together they are a hundred megabytes."""
    return _on_json(endpoint) if endpoint.request is not None else _on_form(endpoint)


def _on_json(endpoint: Endpoint) -> Iterator[Attack]:
    assert endpoint.request is not None
    known = {field.encode_name: field for field in msgspec.structs.fields(endpoint.request)}
    served = {name for name, about in fields_of(endpoint.request).items() if about.status == "supported"}
    good = next((one for one in endpoint.examples if "messages" in one), endpoint.examples[0])
    first = next(iter(good), "model")
    if endpoint.path.startswith("/api/") and "options" in served:
        good = {**good, "options": {"num_predict": 1}}  # what passes writes one token

    def with_field(name: str, raw: str) -> bytes:
        """The good body with this text, which need not be JSON, as a field's value."""
        rest = {key: value for key, value in good.items() if key != name}
        return json.dumps({**rest, name: 0}).encode()[:-2] + raw.encode("utf-8", "surrogatepass") + b"}"

    def attack(what: str, body: bytes, names: str | None = None, **more: Any) -> Attack:
        return Attack(what, endpoint, body, names, **more)

    yield attack("nothing", b"")
    yield attack("half an object", json.dumps(good).encode()[:-1])
    yield attack("an object and more", json.dumps(good).encode() + b"}")
    yield attack("a list", b"[]")
    yield attack("a word", b"nul")
    yield attack("zip's bytes", b"\x1f\x8b\x08\x00\x00\x00\x00\x00", headers={**JSON_TYPE})
    yield attack("a null byte outside", b"\x00" + json.dumps(good).encode())
    yield attack("a null byte inside", with_field(first, '"a\x00b"'))
    yield attack("bad UTF-8", with_field(first, '"x"').replace(b'"x"', b'"\xff\xfe"'))
    yield attack("half a surrogate pair", with_field(first, r'"\ud800"'), first)
    yield attack("deep lists", with_field(first, "[" * MANY))
    yield attack("deep objects", with_field(first, '{"a":' * MANY))
    yield attack("deep in an unknown field", with_field("surprise", "[" * MANY))
    yield attack("deep, yet closed", with_field(first, "[" * 900 + "]" * 900), first)
    yield attack("an unknown field", with_field("surprise", "1"), "surprise")
    yield attack("a name of a megabyte", json.dumps({**good, MEGABYTE: 1}).encode())
    yield attack("a wrong type", with_field(first, "true"), first)
    yield attack("a number beyond numbers", with_field(first, "1" * 10_000), first)
    yield attack("an exponent beyond numbers", with_field(first, "1e400"), first)
    yield attack(
        "a name twice", with_field(first, "true")[:-1] + b"," + json.dumps(good).encode()[1:], may_pass=True
    )
    yield attack("no JSON by its type", json.dumps(good).encode(), headers={"content-type": "text/plain"})
    yield attack("no type at all", json.dumps(good).encode(), headers={})
    yield attack("a form", b"a=b", headers={"content-type": "application/x-www-form-urlencoded"})
    yield attack("too large", b" " * ((8 << 20) + 1))
    if "model" in served:
        yield attack("a model's name of a megabyte", with_field("model", json.dumps(MEGABYTE)), "model")
        yield attack("null bytes in a model's name", with_field("model", r'"\u0000m\u0000"'), "model")
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "n", "seed", "top_k"):
        if name in served:
            yield attack(f"{name} of 10,000 digits", with_field(name, "9" * 10_000), name)
            yield attack(f"{name} below all numbers", with_field(name, "-1e999"), name)
    if "temperature" in served:
        yield attack("a temperature of no degree", with_field("temperature", "NaN"), "temperature")
        yield attack("a temperature of 1e308", with_field("temperature", "1e308"), "temperature")
    for name in {"prompt", "input"} & served & good.keys():
        text = json.dumps("word " * 1_500_000)
        names = None if "/embed" in endpoint.path else name  # there is no model for it
        yield attack("megabytes of text", with_field(name, text), names)
    if "messages" in served:
        yield from _on_messages(attack, with_field, endpoint.path == "/apply_template")
    if "tools" in served:
        yield from _on_tools(attack, with_field, _tool_fields(known["tools"].type))
    for name, wrap in _SCHEMAS.items():
        if name in served:
            for what, schema in SCHEMA_BOMBS.items():
                body = with_field(name, json.dumps(wrap(schema)))
                may_pass = what in HARMLESS or not endpoint.events  # what makes no text needs no grammar
                yield attack(f"{what} in {name}", body, name, may_pass=may_pass)
    if "guided_regex" in served:
        for what, pattern in REGEX_BOMBS.items():
            body = {**good, "guided_regex": pattern, "max_tokens": 1}
            yield attack(
                f"{what} as a regex", json.dumps(body).encode(), "guided_regex", may_pass=what in HARMLESS
            )
    if "metadata" in served:
        body = {**good, "metadata": {str(i): "x" for i in range(MANY)}}
        yield attack("100,000 metadata", json.dumps(body).encode(), "metadata")
    if "stop" in served:
        yield attack("100,000 stops", with_field("stop", json.dumps(["x"] * MANY)), "stop")
        yield attack("a stop of a megabyte", with_field("stop", json.dumps(MEGABYTE)), "stop")
    if "chat_template_kwargs" in served:
        deep = '{"x":' + "[" * 900 + "]" * 900 + "}"
        yield attack("deep variables", with_field("chat_template_kwargs", deep), "chat_template_kwargs")


def _on_messages(attack: Any, with_field: Any, is_template: bool) -> Iterator[Attack]:
    def messages(raw: str) -> bytes:
        body: bytes = with_field("messages", raw)
        return body

    yield attack(
        "150,000 messages", messages(json.dumps([{"role": "user", "content": "x"}] * MORE)), "messages"
    )
    parts = [{"type": "text", "text": "x"}] * MANY
    yield attack("100,000 parts", messages(json.dumps([{"role": "user", "content": parts}])), "messages")
    text = json.dumps([{"role": "user", "content": "word " * 1_500_000}])
    yield attack("megabytes of text", messages(text), "messages", may_pass=is_template)
    yield attack(
        "a role of a megabyte", messages(json.dumps([{"role": MEGABYTE, "content": "x"}])), "messages"
    )
    yield attack("a surrogate in a message", messages(r'[{"role": "user", "content": "\udfff"}]'), "messages")
    yield attack(
        "null characters in a message", messages(r'[{"role": "user", "content": "a\u0000b"}]'), may_pass=True
    )


def _tool_fields(hint: Any) -> set[str]:
    """The names that the tools of this endpoint have, in whichever of the shapes clients know."""
    return {name for struct in structs_of([hint]) for name in struct.__struct_encode_fields__}


def _on_tools(attack: Any, with_field: Any, fields: set[str]) -> Iterator[Attack]:
    def tool(name: str) -> dict[str, Any]:
        if "input_schema" in fields:
            return {"name": name, "input_schema": {}}
        if "function" in fields:
            return {"type": "function", "function": {"name": name}}
        return {"type": "function", "name": name}

    many = json.dumps([tool(f"t{i}") for i in range(MANY)])
    yield attack("100,000 tools", with_field("tools", many), "tools")
    yield attack("a tool's name of a megabyte", with_field("tools", json.dumps([tool(MEGABYTE)])), "tools")


def _doubling(levels: int) -> dict[str, Any]:
    """Small to write, 2**levels to unfold."""
    definitions: dict[str, Any] = {f"d{levels}": {"type": "null"}}
    for i in range(levels):
        below = {"$ref": f"#/$defs/d{i + 1}"}
        definitions[f"d{i}"] = {
            "type": "object",
            "properties": {"a": below, "b": below},
            "required": ["a", "b"],
        }
    return {"$ref": "#/$defs/d0", "$defs": definitions}


def _nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


SCHEMA_BOMBS: dict[str, Any] = {
    "a reference to itself alone": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
    "a circle of references": {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
    },
    "2**40 by doubling": _doubling(40),
    "a schema 300 deep": _nested(300),
    "100,000 properties": {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(MANY)}},
    "100,000 alternatives": {"anyOf": [{"const": i} for i in range(MANY)]},
    "a billion items": {"type": "array", "items": {"type": "null"}, "minItems": 10**9},
    "a pattern of repetitions": {"type": "string", "pattern": "(((a{1,1000}){1,1000}){1,1000}){1,1000}"},
    "a reference to a file": {"$ref": "file:///etc/passwd"},
    "a reference to a page": {"$ref": "http://127.0.0.1:1/schema.json"},
}
REGEX_BOMBS: dict[str, str] = {
    "repetitions of repetitions": "(a+)+(a+)+(a+)+b",
    "counted repetitions": "((a{1,1000}){1,1000}){1,1000}",
    "an unclosed group": "(" * 10_000,
    "a megabyte": "a" * 1_000_000,
    "a look back": r"(?<=a)b",
    "a back-reference": r"(a)\1",
}
# For a matcher that never goes back, and for grammars that are never unfolded.
HARMLESS = ("repetitions of repetitions", "2**40 by doubling", "a pattern of repetitions")
_SCHEMAS: dict[str, Any] = {
    "response_format": lambda schema: {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    "guided_json": lambda schema: schema,
    "text": lambda schema: {"format": {"type": "json_schema", "name": "x", "schema": schema}},
}


def _on_form(endpoint: Endpoint) -> Iterator[Attack]:
    multipart = {"content-type": "multipart/form-data; boundary=b"}
    part = b'--b\r\ncontent-disposition: form-data; name="%s"\r\n\r\n%s\r\n'
    yield Attack("JSON for a form", endpoint, b"{}")
    yield Attack("nothing", endpoint, b"", headers=multipart)
    yield Attack("no boundary", endpoint, b"--b--", headers={"content-type": "multipart/form-data"})
    yield Attack("no end", endpoint, part % (b"purpose", b"batch"), headers=multipart)
    yield Attack("an unknown part", endpoint, part % (b"surprise", b"x") + b"--b--\r\n", headers=multipart)
    many = part % (b"purpose", b"x") * 10_000
    yield Attack("10,000 parts", endpoint, many + b"--b--\r\n", headers=multipart)
    long = b"--b\r\n" + b"x" * 1_000_000 + b"\r\n\r\n--b--\r\n"
    yield Attack("a header of a megabyte", endpoint, long, headers=multipart)
