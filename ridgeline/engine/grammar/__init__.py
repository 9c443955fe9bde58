"""Grammars: constraints on an answer's text, enforced token by token.

A `Grammar` is the request's constraint. `compiler` compiles it in parallel with the engine's steps and gives
each of the request's sequences a `Matcher`; samplers ask the matcher which tokens are allowed next. Only
`library` uses the grammar library, and it is imported when the first grammar arrives.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ridgeline.engine.errors import InvalidRequest

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "lark"]

MAX_SOURCE_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class Grammar:
    """The language of an answer.

    source: a schema as JSON text; a regular expression that the whole answer matches; a JSON list of strings;
    a grammar in the library's dialect of Lark, which may embed %json {…} and special tokens <|…|>; empty for
    any JSON object.
    check: a JSON schema that the finished answer is checked against; "" if the source enforces all of it.
    ignored, checked: the schema's keywords that have no effect, and those that only the check enforces.
    """

    kind: GrammarKind
    source: str = ""
    check: str = field(default="", compare=False)
    ignored: tuple[str, ...] = field(default=(), compare=False)
    checked: tuple[str, ...] = field(default=(), compare=False)
    is_prepared: bool = field(default=False, compare=False)  # `keywords` has processed its schema

    def __post_init__(self) -> None:
        try:
            size = len(self.source.encode())
        except UnicodeEncodeError:
            raise InvalidRequest("grammar", "contains a lone surrogate (half of a character)") from None
        if size > MAX_SOURCE_BYTES:
            raise InvalidRequest("grammar", f"has {size} bytes; the limit is {MAX_SOURCE_BYTES}")


class Untried(InvalidRequest):
    """The trial of a grammar failed, or the machine was too busy for it. A retry may succeed."""

    def __init__(self) -> None:
        super().__init__("grammar", "could not be tested now and is not served; retry later")
