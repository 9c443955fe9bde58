"""A form of one's own beside calls: what alone would be served is served in the combined grammar too."""

from __future__ import annotations

from typing import Any

import pytest

from ridgeline.engine.grammar.library import as_lark
from ridgeline.server.config import ServerConfig
from tests.server.parsing.vocabulary import Vocabulary
from tests.server.stage import CHAT, HELLO, Stage

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
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
