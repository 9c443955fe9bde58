"""Grammars: what an answer must look like, token by token.

A `Grammar` is what a request says; `compiler` makes of it, beside the engine's steps, what gives each of the
request's sequences a `Matcher`; samplers ask the matcher which tokens may come next. Only `library` knows the
grammar library, and is imported when the first grammar comes.
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
    a grammar in the library's flavour of Lark, which may embed %json {…} and special tokens <|…|>; nothing
    for any JSON object.
    check: a JSON schema that the finished answer is checked against; "" where the source enforces all of it.
    ignored, checked: the schema's words that constrain nothing, and those that only the check enforces.
    """

    kind: GrammarKind
    source: str = ""
    check: str = field(default="", compare=False)
    ignored: tuple[str, ...] = field(default=(), compare=False)
    checked: tuple[str, ...] = field(default=(), compare=False)
    is_prepared: bool = field(default=False, compare=False)  # its schema has been read by `keywords`

    def __post_init__(self) -> None:
        try:
            size = len(self.source.encode())
        except UnicodeEncodeError:
            raise InvalidRequest("grammar", "contains half of a character (a lone surrogate)") from None
        if size > MAX_SOURCE_BYTES:
            raise InvalidRequest("grammar", f"has {size} bytes; at most {MAX_SOURCE_BYTES} can be served")


class Untried(InvalidRequest):
    """The trial of a grammar failed, or the machine had no time for it: the next time may be another."""

    def __init__(self) -> None:
        super().__init__("grammar", "could not be tried out now, so it is not served; ask again later")
