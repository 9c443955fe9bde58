"""docs/limits.md has every bound on what a client may send, made from the code that enforces it.

`python -m tests.server.test_limits_page` rewrites it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from ridgeline.engine.grammar import keywords
from ridgeline.retrieval import filters
from ridgeline.server.answering import prompts
from ridgeline.server.app import ENDPOINTS
from ridgeline.server.batches import lines, multipart
from ridgeline.server.config import ServerConfig
from ridgeline.server.http import limits, websocket, weight
from ridgeline.server.openapi.schemas import Schema, Schemas
from ridgeline.server.vectors.protocol import MAX_TEXTS
from ridgeline.web import connection

PAGE = Path(__file__).resolve().parents[2] / "docs" / "limits.md"
CONFIG = ServerConfig()

# These fields are bounded by something other than their own number.
TEXT = "text: with all else it must fit the context"
SCHEMA = (
    f"{keywords.MAX_SCHEMA_BYTES} bytes, {keywords.MAX_DEPTH} levels, {keywords.MAX_SUBSCHEMAS} subschemas, "
    f"{keywords.MAX_PROPERTIES} properties, {keywords.MAX_ENUM_VALUES} values of an enum"
)
TOOLS = f"all tools together: {limits.MAX_TOOL_BYTES} bytes"
ELSEWHERE = {
    **dict.fromkeys(("content", "text", "reasoning_content", "thinking", "system", "instructions"), TEXT),
    **dict.fromkeys(("arguments", "output", "reasoning", "encrypted_content"), TEXT),
    **dict.fromkeys(("guided_json", "json", "schema", "format"), SCHEMA),
    **dict.fromkeys(("parameters", "input_schema", "description"), TOOLS),
    "prompt": f"{TEXT}; {prompts.MAX_CHOICES} prompts times `n` in one request",
    "input": f"{TEXT}; {MAX_TEXTS} texts for embeddings",
    **dict.fromkeys(("query", "documents", "text_1", "text_2"), f"{TEXT}; {MAX_TEXTS} texts in one request"),
    "filters": f"{filters.MAX_CONDITIONS} conditions, {filters.MAX_DEPTH} levels",
    "queries": TEXT,
    "file": f"`--max-file-bytes`; {lines.MAX_LINES} lines for a batch",
}


def generated() -> str:
    return "\n".join(
        [
            "# Limits",
            "",
            "What one client may send, and what happens beyond it. Every refusal has the shape of",
            "[the errors](http-api.md#errors) and names the field. This page is generated from the code that",
            "enforces it (`tests/server/test_limits_page.py`); options are set with `ridgeline serve`.",
            "",
            "## Connections and requests",
            "",
            _table(("what", "limit", "set by", "beyond it"), CONNECTIONS),
            "## Bodies",
            "",
            _table(("what", "limit", "beyond it"), BODIES),
            "Of two fields with one name the last counts. An ignored field is bounded by the body alone.",
            "",
            "## Fields",
            "",
            "Beyond these: 400 with the field's path. A field without its own number holds text or a",
            "schema, and is bounded by what is said of it.",
            "",
            _table(("body", "field", "bounds"), list(field_rows())),
        ]
    )


CONNECTIONS: list[tuple[str, ...]] = [
    ("connections open at once", f"{CONFIG.max_connections}", "`--max-connections`", "503, closed"),
    ("of these, from one address", "no limit", "`--max-connections-per-address`", "503, closed"),
    ("first line and headers, bytes", f"{CONFIG.max_head_bytes}", "`--max-head-bytes`", "431, closed"),
    ("headers", f"{connection.MAX_HEADERS}", "", "431, closed"),
    ("time for them to arrive", f"{CONFIG.head_timeout_s:g} s", "`--head-timeout-s`", "408, closed"),
    ("body, bytes", f"{CONFIG.max_body_bytes}", "`--max-body-bytes`", "413"),
    ("time for it to arrive", f"{CONFIG.upload_timeout_s:g} s", "`--upload-timeout-s`", "408, closed"),
    ("rest of a body that was answered early", f"{connection.LINGER_S:g} s", "", "closed"),
    ("time for a whole answer", "no limit", "`--request-timeout-s`", "504"),
    ("a stream's reader taking nothing", f"{CONFIG.stream_stall_s:g} s", "`--stream-stall-s`", "cut"),
    ("chunks waiting for it", f"{CONFIG.stream_buffer_chunks}", "`--stream-buffer-chunks`", "cut"),
    ("requests on one WebSocket", f"{CONFIG.websocket_requests}", "`--websocket-requests`", "429 in a frame"),
    ("a WebSocket's message, bytes", f"{CONFIG.max_body_bytes}", "`--max-body-bytes`", "closed with 1009"),
    ("no answer to a ping", f"{CONFIG.websocket_ping_s:g} s", "`--websocket-ping-s`", "closed"),
    ("a `stream_id`, characters", f"{websocket.MAX_STREAM_ID}", "", "400 in a frame"),
    ("requests that wait", "per engine", "`--max-waiting`", "429 with Retry-After"),
    ("headers of a multipart part, bytes", f"{multipart.MAX_HEADERS_BYTES}", "", "400"),
    ("parts of a multipart body", f"{multipart.MAX_PARTS}", "", "400"),
]
BODIES: list[tuple[str, ...]] = [
    ("levels of JSON", "about 900", "400 `invalid_json`"),
    ("lists and objects", f"{weight.MAX_CONTAINERS}", "400 `too_many_values`, naming the largest field"),
    ("values of all kinds", f"{weight.MAX_VALUES}", "400 `too_many_values`, naming the largest field"),
    ("strings, where there is much else", f"{weight.MAX_STRINGS}", "400 `too_many_values`"),
    (
        "tokens of a text that is only counted or tokenized",
        f"{limits.MAX_DETOKENIZED}, or the context if that is longer",
        "400 `context_length_exceeded`",
    ),
    ("an error's own text, characters", "2000, a field's path 200", "cut"),
]


def field_rows() -> Iterator[tuple[str, str, str]]:
    for name, schema in sorted(_components().items()):
        for field, described in schema.get("properties", {}).items():
            if described.get("x-ridgeline-status") in ("refused", "ignored"):
                continue
            said = list(dict.fromkeys(_bounds(described)))
            if _unbounded(described):
                said.append(ELSEWHERE.get(field, "no bound"))
            if said:
                yield f"`{name}`", f"`{field}`", "; ".join(said)


def _components() -> dict[str, Schema]:
    types = [kind for one in ENDPOINTS for kind in (one.request, one.form, one.query) if kind is not None]
    return Schemas(types).components


_WORDS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {}",
    "maxItems": "at most {} of them",
    "maxProperties": "at most {} of them",
}


def _bounds(schema: Schema) -> Iterator[str]:
    for key, words in _WORDS.items():
        if key in schema:
            yield words.format(schema[key])
    for inner in (*schema.get("anyOf", ()), schema.get("items"), schema.get("additionalProperties")):
        if isinstance(inner, dict):
            yield from _bounds(inner)


def _unbounded(schema: Schema) -> bool:
    """Whether there is no end to how large a value may be, by the schema alone."""
    if "anyOf" in schema:
        return any(_unbounded(choice) for choice in schema["anyOf"])
    kind: Any = schema.get("type")
    if "$ref" in schema or "enum" in schema or "const" in schema or kind in ("boolean", "null"):
        return False
    if kind in ("integer", "number"):
        return not schema.keys() & {"maximum", "exclusiveMaximum"}
    if kind == "array":
        return "maxItems" not in schema or _unbounded(schema.get("items", {}))
    return {"string": "maxLength", "object": "maxProperties"}.get(kind, "nothing") not in schema


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in lines) + "\n"


def test_the_page_is_current() -> None:
    assert PAGE.read_text("utf-8") == generated()


def test_every_field_that_a_client_controls_has_a_bound() -> None:
    """Its own bound, or a named one: the context, a schema's, that of all tools together."""
    unbounded = [row for row in field_rows() if "no bound" in row[2]]
    assert unbounded == []


def test_every_option_on_the_page_is_one() -> None:
    known = {f"`--{name.replace('_', '-')}`" for name in ServerConfig.__dataclass_fields__}
    named = {row[2] for row in CONNECTIONS if row[2]}
    assert named - known <= {"`--max-waiting`"}  # which is the engine's


if __name__ == "__main__":
    PAGE.write_text(generated(), "utf-8")
    print(msgspec.json.encode([row for row in field_rows() if "no bound" in row[2]]).decode())
