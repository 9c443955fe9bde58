"""docs/http-api.md says what the server does: its tables are made from the structs that decode requests.

`python -m tests.server.test_http_api_page` rewrites them.
"""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from openai.types import chat, completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from ridgeline.server.app import ENDPOINTS
from ridgeline.server.errors import ErrorCode
from ridgeline.server.http.body_fields import About, fields_of
from ridgeline.server.openai_api import request_bodies

PAGE = Path(__file__).resolve().parents[2] / "docs" / "http-api.md"
BEGIN, END = (
    "<!-- fields: generated from ridgeline/server/openai_api/request_bodies.py -->\n",
    "<!-- end of fields -->\n",
)

COMMON = tuple(fields_of(request_bodies.GenerationRequest))


def generated() -> str:
    """The tables as the page must have them: one per body, then one for each struct that it is made of."""
    tables = [_table("Chat and completions", request_bodies.GenerationRequest)]
    shown: set[type] = {request_bodies.GenerationRequest}
    for endpoint in ENDPOINTS:
        for body in (endpoint.request, endpoint.form, endpoint.query):
            if body is None or body in shown:
                continue
            shown.add(body)
            paths = [one.path for one in ENDPOINTS if body in (one.request, one.form, one.query)]
            elsewhere = COMMON if issubclass(body, request_bodies.GenerationRequest) else ()
            title = ", ".join(f"`{path}`" for path in paths)
            tables.append(_table(f"Only {title}" if elsewhere else title, body, elsewhere))
            for path, nested in _nested(body):
                if nested not in shown:
                    shown.add(nested)
                    name = f"`{path}`{_kind(nested)}"
                    tables.append(_table(name if elsewhere else f"{name} of {title}", nested))
    return "\n" + "\n".join(tables) + "\n"


def _kind(struct: type[msgspec.Struct]) -> str:
    """Which of several that may stand at one path."""
    config = struct.__struct_config__
    return "" if config.tag is None else f" with `{config.tag_field}: {config.tag}`"


def _table(title: str, body: type[msgspec.Struct], elsewhere: tuple[str, ...] = ()) -> str:
    rows = [_row(name, about) for name, about in fields_of(body).items() if name not in elsewhere]
    return "\n".join([f"### {title}", "", "| field | | |", "|---|---|---|", *rows, ""])


def _nested(
    body: type[msgspec.Struct], path: str = "", above: tuple[type, ...] = ()
) -> Iterator[tuple[str, type]]:
    """The structs that a body's fields are made of, each with the path that leads to it."""
    for field in msgspec.structs.fields(body):
        for suffix, struct in _structs_in(field.type):
            here = f"{path}{field.encode_name}{suffix}"
            if struct not in above:
                yield here, struct
                yield from _nested(struct, f"{here}.", (*above, struct))


def _structs_in(hint: Any) -> Iterator[tuple[str, type[msgspec.Struct]]]:
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        yield "", hint
    suffix = "[]" if typing.get_origin(hint) is list else ""
    for part in typing.get_args(hint):
        yield from ((suffix + inner, struct) for inner, struct in _structs_in(part))


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
        (chat_create_params.CompletionCreateParamsBase, request_bodies.ChatRequest),
        (completion_create_params.CompletionCreateParamsBase, request_bodies.CompletionRequest),
        (chat.ChatCompletionAssistantMessageParam, request_bodies.Message),
        (chat.ChatCompletionUserMessageParam, request_bodies.Message),
        (chat.ChatCompletionContentPartTextParam, request_bodies.ContentPart),
        (chat.ChatCompletionStreamOptionsParam, request_bodies.StreamOptions),
    ],
)
def test_every_field_that_the_openai_sdk_can_send_is_decided_on(
    sdk: type, body: type[request_bodies.Body]
) -> None:
    assert set(typing.get_type_hints(sdk)) - set(fields_of(body)) == set()


def test_every_route_is_on_the_page() -> None:
    text = PAGE.read_text("utf-8")
    for endpoint in ENDPOINTS:
        assert re.sub(r"\{.*", "", endpoint.path) in text


def test_every_error_code_is_on_the_page() -> None:
    text = PAGE.read_text("utf-8")
    assert [code for code in typing.get_args(ErrorCode) if f"`{code}`" not in text] == []


if __name__ == "__main__":
    write()
