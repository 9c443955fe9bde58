"""A form of one's own beside calls: what alone would be served is served in the combined grammar too."""

from __future__ import annotations

from typing import Any

import pytest

from ridgeline.engine.errors import InvalidRequest
from ridgeline.engine.grammar.library import as_lark
from ridgeline.server.config import ServerConfig
from tests.server.parsing.vocabulary import Vocabulary
from tests.server.scripted_client import fail
from tests.server.stage import CHAT, HELLO, Stage

OF_WEATHER: dict[str, Any] = {"name": "weather", "parameters": {"type": "object"}}
WEATHER = {"type": "function", "function": OF_WEATHER}
CLOCK = {"type": "function", "function": {"name": "clock"}}
PARAMETERS = "tools[0].parameters"  # as /v1/responses calls them
SCHEMA = {"enum": ["a ::= b"]}


async def combined(**fields: Any) -> str:
    """The grammar that the engine is asked for, as it reads it."""
    stage = Stage(config=ServerConfig(tool_parser="hermes"))
    answer = await stage.post(CHAT, {**HELLO, "tools": [WEATHER], **fields})
    assert answer.status_code == 200, answer.text
    grammar = stage.client.asked[0]["params"].grammar
    assert grammar.kind == "lark"
    return as_lark(grammar.source)


@pytest.mark.parametrize(
    ("fields", "text", "other"),
    [
        ({"guided_regex": "a/b"}, "a/b", "a"),
        ({"guided_regex": r"a\/b"}, "a/b", "a"),
        ({"guided_regex": r"a\\/b"}, "a\\/b", "a/b"),
        ({"guided_regex": "x ::= [::=]"}, "x ::= =", "x"),
        ({"guided_choice": ["a/b", "😀", "a ::= b"]}, "a ::= b", "b"),
        ({"guided_json": SCHEMA}, '"a ::= b"', "a ::= b"),
    ],
)
async def test_a_form_that_may_stand_beside_calls_is_kept_to(
    fields: dict[str, Any], text: str, other: str
) -> None:
    source = await combined(**fields)
    vocabulary = Vocabulary()
    assert vocabulary.accepts(source, text)
    assert not vocabulary.accepts(source, other)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CHAT, {**HELLO, "tools": [WEATHER]}, "tools[0].function.parameters"),
        (CHAT, {**HELLO, "tools": [WEATHER, CLOCK]}, "tools"),
        (
            "/v1/responses",
            {"input": "a", "store": False, "tools": [{"type": "function", **OF_WEATHER}]},
            PARAMETERS,
        ),
        (
            "/v1/messages",
            {**HELLO, "max_tokens": 9, "tools": [{"name": "weather", "input_schema": {"type": "object"}}]},
            "tools[0].input_schema",
        ),
    ],
)
async def test_what_the_engine_finds_wrong_with_a_tool_is_said_of_it(
    path: str, body: dict[str, Any], field: str
) -> None:
    stage = Stage(fail(InvalidRequest("grammar", "no")), config=ServerConfig(tool_parser="hermes"))
    choice: Any = {"type": "any"} if path == "/v1/messages" else "required"
    answer = await stage.post(path, {**body, "tool_choice": choice})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, f"{field}: no")
