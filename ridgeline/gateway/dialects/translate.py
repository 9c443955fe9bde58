"""Translates requests and answers between families. The only module of this package that the pipeline calls.

Kinds: chat and messages into each other, and responses (without state) into either. Other endpoints have no
equivalent in the other family and are refused.
"""

from __future__ import annotations

from typing import Any

from ridgeline.gateway.body import Fields, field
from ridgeline.gateway.dialects.chat_to_messages import messages_from_chat
from ridgeline.gateway.dialects.config import DialectConfig
from ridgeline.gateway.dialects.families import Family, family_of, shape_of
from ridgeline.gateway.dialects.messages_to_chat import chat_from_messages
from ridgeline.gateway.dialects.responses_to_chat import as_responses_error, chat_from_responses
from ridgeline.gateway.dialects.streams.chat_source import ChatSource
from ridgeline.gateway.dialects.streams.chat_writer import ChatWriter
from ridgeline.gateway.dialects.streams.events import Events
from ridgeline.gateway.dialects.streams.message_source import MessageSource
from ridgeline.gateway.dialects.streams.message_writer import MessageWriter
from ridgeline.gateway.dialects.streams.response_writer import ResponseWriter
from ridgeline.gateway.dialects.streams.steps import Done, Failed, Source, Step, Writer
from ridgeline.gateway.errors import INVALID, BadRequest, GatewayError

PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages"}
_NO_FIELDS: Fields = {}
_DEFAULT = DialectConfig()


def translate_request(
    kind: str, fields: Fields, to: Family, config: DialectConfig = _DEFAULT
) -> tuple[str, Fields]:
    """The path and the fields for an upstream of the family `to`. Raises BadRequest with the field that
    cannot be translated. If no translation is needed, returns the same fields and no path.
    """
    shape = shape_of(kind, to)
    if shape == kind:
        if (family_of(kind) == "anthropic") != (to == "anthropic"):
            raise NoTwin(kind)
        return "", fields
    if kind == "messages":
        return PATHS[shape], chat_from_messages(fields, config)
    if kind == "chat":
        return PATHS[shape], messages_from_chat(fields, config)
    return PATHS[shape], _from_responses(fields, to, config)


def translate_answer(kind: str, body: bytes, family: Family, fields: Fields = _NO_FIELDS) -> bytes:
    """Translate a whole answer of an upstream of `family` for a client of `kind` that sent `fields`."""
    if shape_of(kind, family) == kind:
        return body
    return _writer(kind, fields).whole(_source(kind, family).whole(body))


class StreamTranslator:
    """Translates a stream of an upstream of `family` for a client of `kind`. The output does not depend on
    how the upstream's bytes are split, and adds up to what `translate_answer` makes of the whole answer.
    """

    def __init__(self, kind: str, family: Family, fields: Fields = _NO_FIELDS) -> None:
        self._events = Events()
        self._source = _source(kind, family)
        self._writer = _writer(kind, fields)
        self._ended = False

    def feed(self, data: bytes) -> bytes:
        steps: list[Step] = []
        for event in self._events.feed(data):
            if self._ended:
                break
            for step in self._source.event(event):
                steps.append(step)
                self._ended |= isinstance(step, Done | Failed)
        return self._writer.write(steps)

    def finish(self) -> bytes:
        """The upstream's stream has ended. After an incomplete answer an error follows, which the pipeline
        writes.
        """
        return b""


class NoTwin(GatewayError):
    """The upstream's family has no such endpoint. Claude Code, for one, then counts tokens itself."""

    status, type, code = 501, INVALID, "not_supported"

    def __init__(self, kind: str) -> None:
        super().__init__(f"{kind} is not available for this model: its upstream has no endpoint for it")


def _from_responses(fields: Fields, to: Family, config: DialectConfig) -> Fields:
    chat = chat_from_responses(fields, with_thinking=to == "anthropic")
    if to == "chat":
        if config.max_tokens_field != "max_completion_tokens" and "max_completion_tokens" in chat:
            chat[config.max_tokens_field] = chat.pop("max_completion_tokens")
        return chat
    try:
        return messages_from_chat(chat, config)
    except BadRequest as error:
        raise as_responses_error(error) from None


def _source(kind: str, family: Family) -> Source:
    match shape_of(kind, family):
        case "messages":
            return MessageSource()
        case "chat":
            return ChatSource()
    raise NoTwin(kind)


def _writer(kind: str, fields: Fields) -> Writer:
    if kind == "messages":
        thinking: dict[str, Any] = field(fields, "thinking", dict, {})
        if thinking.get("type") not in ("enabled", "adaptive"):
            return MessageWriter()
        return MessageWriter("omitted" if thinking.get("display") == "omitted" else "yes")
    if kind == "responses":
        return ResponseWriter(fields)
    options: dict[str, Any] = field(fields, "stream_options", dict, {})
    return ChatWriter(include_usage=bool(options.get("include_usage")))
