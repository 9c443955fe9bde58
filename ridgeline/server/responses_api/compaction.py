"""POST /v1/responses/compact: reduces a conversation to its user messages and a summary by the model.

The summary is in a `compaction` item, as in OpenAI's API. It is encoded, not encrypted: the client that holds
the item has seen the conversation.
"""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.server.answering.pieces import Piece
from ridgeline.server.openai_api.response_bodies import Usage
from ridgeline.server.responses_api.bodies import CompactedResponse, CompactionItem, InputText, MessageItem
from ridgeline.server.responses_api.items import Placed, new_id, sealed
from ridgeline.server.responses_api.protocol import CompactRequest, ReasoningOptions, ResponseRequest
from ridgeline.server.responses_api.shape import response_usage
from ridgeline.web.answer_parts import Content

MAX_SUMMARY_TOKENS = 1024
INSTRUCTION = (
    "Summarize this conversation for an assistant that continues it: what was asked, decided and found, "
    "and what remains to do."
)


def summary_request(body: CompactRequest) -> ResponseRequest:
    """The request for the summary, without tools or thinking."""
    return ResponseRequest(
        model=body.model,
        instructions=body.instructions,
        chat_template_kwargs=body.chat_template_kwargs,
        reasoning=ReasoningOptions(effort="none"),
        max_output_tokens=MAX_SUMMARY_TOKENS,
        temperature=0.0,
        priority=body.priority,
        cache_salt=body.cache_salt,
    )


def with_instruction(items: Sequence[Placed]) -> list[Placed]:
    text = InputText(text=INSTRUCTION)
    message = MessageItem(id=new_id("msg"), status="completed", role="user", content=[text])
    return [*items, Placed(message, "input")]


class CompactionShape:
    """The whole answer: user messages stay, the rest is in the summary."""

    def __init__(self, items: Sequence[Placed], created_at: int) -> None:
        self._items = items
        self._created_at = created_at

    def whole(self, pieces: list[Piece], usage: Usage) -> CompactedResponse:
        events = (event for piece in pieces for event in piece.events)
        summary = "".join(event.text for event in events if isinstance(event, Content))
        said = [placed.item for placed in self._items if isinstance(placed.item, MessageItem)]
        kept = [message for message in said if message.role == "user"]
        item = CompactionItem(id=new_id("cmp"), encrypted_content=sealed(summary.strip()))
        return CompactedResponse(
            id=new_id("resp"),
            created_at=self._created_at,
            output=[*kept, item],
            usage=response_usage(usage),
        )
