"""The endpoints of this package, for the table in `server.app`."""

from __future__ import annotations

from typing import Any

from ridgeline.server.http.endpoint import Endpoint, Generating
from ridgeline.server.messages_api.bodies import MessageAnswer, MessageEvent, MessagesError, TokenCount
from ridgeline.server.messages_api.errors import PATH
from ridgeline.server.messages_api.handlers import count_tokens, messages
from ridgeline.server.messages_api.request import CountTokensRequest, MessagesRequest

_EXAMPLE: dict[str, Any] = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
_BLOCKS: dict[str, Any] = {
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello!"}]}],
}

ENDPOINTS = [
    Endpoint(
        "POST",
        PATH,
        Generating(messages),
        "A conversation's next message in Anthropic's shape, whole or streamed",
        request=MessagesRequest,
        response=MessageAnswer,
        events=MessageEvent,
        error=MessagesError,
        examples=({**_EXAMPLE, "max_tokens": 20}, {**_BLOCKS, "max_tokens": 20, "stream": True}),
    ),
    Endpoint(
        "POST",
        f"{PATH}/count_tokens",
        count_tokens,
        "How many tokens a message's request has",
        request=CountTokensRequest,
        response=TokenCount,
        error=MessagesError,
        examples=(_EXAMPLE, _BLOCKS),
    ),
]
