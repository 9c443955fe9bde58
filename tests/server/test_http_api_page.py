"""docs/http-api.md says what the server does: its tables are made from the structs that decode requests.

`python -m tests.server.test_http_api_page` writes them anew.
"""

from __future__ import annotations

import json
import re
import typing
from pathlib import Path

import pytest
from openai.types import chat, completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from ridgeline.server import protocol
from ridgeline.server.app import ROUTES
from ridgeline.server.errors import ErrorCode
from ridgeline.server.protocol import About, fields_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "http-api.md"
BEGIN, END = "<!-- fields: generated from ridgeline/server/protocol.py -->\n", "<!-- end of fields -->\n"

COMMON = tuple(fields_of(protocol.GenerationRequest))
TABLES = {
    "Chat and completions": (protocol.GenerationRequest, ()),
    "Only chat": (protocol.ChatRequest, COMMON),
    "Only completions": (protocol.CompletionRequest, COMMON),
    "`messages[]`": (protocol.Message, ()),
    "`messages[].content[]`": (protocol.ContentPart, ()),
    "`messages[].tool_calls[]`": (protocol.MessageToolCall, ()),
    "`tools[]`": (protocol.ToolDefinition, ()),
    "`tools[].function`": (protocol.Function, ()),
    "`tool_choice` as an object": (protocol.NamedToolChoice, ()),
    "`response_format`": (protocol.ResponseFormat, ()),
    "`response_format.json_schema`": (protocol.JsonSchemaFormat, ()),
    "`structured_outputs`": (protocol.StructuredOutputs, ()),
    "`stream_options`": (protocol.StreamOptions, ()),
    "/tokenize": (protocol.TokenizeRequest, ()),
    "/detokenize": (protocol.DetokenizeRequest, ()),
}


def generated() -> str:
    """The tables as the page must have them."""
    sections = []
    for title, (body, elsewhere) in TABLES.items():
        rows = [_row(name, about) for name, about in fields_of(body).items() if name not in elsewhere]
        sections.append("\n".join([f"### {title}", "", "| field | | |", "|---|---|---|", *rows, ""]))
    return "\n" + "\n".join(sections) + "\n"


def _row(name: str, about: About) -> str:
    accepted = ", ".join(f"`{json.dumps(value)}`" for value in about.harmless)
    doc = f"{about.doc}; accepted: {accepted}" if accepted else about.doc
    return f"| `{name}` | {about.status} | {doc} |"


def write(page: Path = PAGE) -> None:
    before, _, rest = page.read_text("utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(before + BEGIN + generated() + END + after, "utf-8")


def test_the_tables_of_fields_are_current() -> None:
    text = PAGE.read_text("utf-8")
    assert text[text.index(BEGIN) + len(BEGIN) : text.index(END)] == generated()


@pytest.mark.parametrize(
    ("sdk", "body"),
    [
        (chat_create_params.CompletionCreateParamsBase, protocol.ChatRequest),
        (completion_create_params.CompletionCreateParamsBase, protocol.CompletionRequest),
        (chat.ChatCompletionAssistantMessageParam, protocol.Message),
        (chat.ChatCompletionUserMessageParam, protocol.Message),
        (chat.ChatCompletionContentPartTextParam, protocol.ContentPart),
        (chat.ChatCompletionStreamOptionsParam, protocol.StreamOptions),
    ],
)
def test_every_field_that_the_openai_sdk_can_send_is_decided_on(sdk: type, body: type[protocol.Body]) -> None:
    assert set(typing.get_type_hints(sdk)) - set(fields_of(body)) == set()


def test_every_route_is_on_the_page() -> None:
    text = PAGE.read_text("utf-8")
    for route in ROUTES:
        assert re.sub(r"\{.*", "", route.path) in text


def test_every_error_code_is_on_the_page() -> None:
    text = PAGE.read_text("utf-8")
    assert [code for code in typing.get_args(ErrorCode) if f"`{code}`" not in text] == []


if __name__ == "__main__":
    write()
