"""Reading: the inputs of a routing decision, read once from a request's fields in any dialect.

Called only by the router, for requests that name a route. It keeps user turns and drops assistant replies:
they make a later turn look like the model's own work, and predictions worse.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from ridgeline.gateway.body import Fields, field
from ridgeline.gateway.routing.learned.language import language_of

USER_TURNS = 3  # the last and two before it
CHARS_PER_TOKEN = 4  # of English; an estimate
CHARS_PER_TOKEN_WIDE = 1.5  # of Chinese, Japanese, Korean …
IMAGE_TOKENS = 1000
_IMAGE_PARTS = frozenset({"image_url", "image", "input_image"})


class _Part(msgspec.Struct):
    type: str = ""
    text: str | None = None


class _Message(msgspec.Struct):
    role: str = ""
    content: str | list[_Part] | None = None
    type: str = ""
    arguments: str | None = None  # a function call of /v1/responses
    output: Any = None


@dataclass(frozen=True)
class Reading:
    """turns: texts of the user's turns, the last one last. opening: the beginning of the conversation."""

    kind: str
    turns: tuple[str, ...]
    opening: tuple[str, ...]
    is_later_turn: bool  # whether it has an earlier answer
    chars: int
    wide_chars: int
    images: int
    tools: bool
    max_tokens: int | None

    @property
    def last(self) -> str:
        return self.turns[-1] if self.turns else ""

    @property
    def tokens(self) -> int:
        """An estimate from characters, without an upstream's tokenizer."""
        narrow = self.chars - self.wide_chars
        text = narrow / CHARS_PER_TOKEN + self.wide_chars / CHARS_PER_TOKEN_WIDE
        return round(text) + self.images * IMAGE_TOKENS

    @cached_property
    def language(self) -> str:
        return language_of(self.last)


def read(kind: str, fields: Fields) -> Reading:
    """The reading of one request; BadRequest if a field has a wrong type."""
    system: list[str] = []
    messages: list[_Message] = []
    if kind in ("chat", "messages"):
        messages = field(fields, "messages", list[_Message], [])
        if kind == "messages":
            system = _system(fields, "system")
    elif kind == "responses":
        system = _system(fields, "instructions")
        given = field(fields, "input", str | list[_Message], "")  # type: ignore[arg-type]
        messages = [_Message("user", given)] if isinstance(given, str) else given
    elif kind == "completions":
        messages = [_Message("user", text) for text in _prompts(fields)]
    return _summary(kind, fields, system, messages)


def _summary(kind: str, fields: Fields, system: list[str], messages: list[_Message]) -> Reading:
    turns: list[str] = []
    opening = list(system)
    images = 0
    chars = wide = 0
    is_later = False
    for text in system:
        chars, wide = chars + len(text), wide + _wide(text)
    for message in messages:
        text, found = _text(message)
        images += found
        chars, wide = chars + len(text), wide + _wide(text)
        if message.role == "user" and text:
            turns.append(text)
        if message.role == "assistant" or message.type == "function_call":
            is_later = True
        if len(turns) <= 1 and not is_later:
            opening.append(text)
    return Reading(
        kind=kind,
        turns=tuple(turns[-USER_TURNS:]),
        opening=tuple(opening),
        is_later_turn=is_later,
        chars=chars,
        wide_chars=wide,
        images=images,
        tools=_has_tools(fields),
        max_tokens=_max_tokens(fields),
    )


def _text(message: _Message) -> tuple[str, int]:
    if isinstance(message.content, str):
        return message.content, 0
    if message.content is None:
        return (message.arguments or (message.output if isinstance(message.output, str) else "")), 0
    texts = [part.text for part in message.content if part.text]
    return "\n".join(texts), sum(part.type in _IMAGE_PARTS for part in message.content)


def _system(fields: Fields, name: str) -> list[str]:
    given = field(fields, name, str | list[_Part], "")  # type: ignore[arg-type]
    if isinstance(given, str):
        return [given] if given else []
    return [part.text for part in given if part.text]


def _prompts(fields: Fields) -> list[str]:
    given: Any = field(fields, "prompt", object, "")
    items = given if isinstance(given, list) else [given]
    return [item for item in items if isinstance(item, str)]  # token ids cannot be read here


def _has_tools(fields: Fields) -> bool:
    for name in ("tools", "functions"):
        given = fields.get(name)
        if given is not None and bytes(given).strip() not in (b"null", b"[]"):
            return True
    return False


def _max_tokens(fields: Fields) -> int | None:
    for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"):
        if name in fields:
            return field(fields, name, int, 0) or None
    return None


def _wide(text: str) -> int:
    """Characters with more tokens each, estimated from their bytes: Chinese counts fully, Cyrillic half."""
    return 0 if text.isascii() else (len(text.encode("utf-8", "replace")) - len(text)) // 2
