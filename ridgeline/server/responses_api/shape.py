"""ResponseShape: pieces as the events of a streamed response, or as one response.

Both come from the same growing list of output items, so a stream ends with what a whole answer contains.
Independent of HTTP and of the store.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from ridgeline.server.answering.pieces import Piece
from ridgeline.server.errors import ErrorReply
from ridgeline.server.openai_api.logprobs import TokenNames, chat_logprobs
from ridgeline.server.openai_api.response_bodies import ChatLogprob, Usage
from ridgeline.server.parsing.events import ParsedEvent
from ridgeline.server.responses_api import bodies
from ridgeline.server.responses_api.bodies import (
    IncompleteDetails,
    ItemStatus,
    OutputItem,
    ResponseBody,
    ResponseError,
    ResponseUsage,
    Status,
)
from ridgeline.server.responses_api.event_writer import EventWriter
from ridgeline.server.responses_api.file_search import FileSearch
from ridgeline.server.responses_api.growing import GrowingCall, GrowingItem, GrowingReasoning, GrowingText
from ridgeline.server.responses_api.items import NewId, new_id
from ridgeline.server.responses_api.namespaces import Homes
from ridgeline.web.answer_parts import CallArguments, CallStart, Content, Reasoning

ENDS = {
    "completed": bodies.Completed,
    "incomplete": bodies.Incomplete,
    "failed": bodies.Failed,
    "cancelled": bodies.Failed,  # has no event type; the status in the body tells them apart
}


class ResponseShape:
    """`body` is the initial response. `homes`: namespaces of the functions. Events are numbered from 0 in the
    order they are made.
    """

    def __init__(
        self,
        body: ResponseBody,
        names: TokenNames,
        with_logprobs: bool,
        homes: Homes,
        new_id: NewId = new_id,
        search: FileSearch | None = None,
    ) -> None:
        """search: what was found before the answer; its item is the first of the output."""
        self.body = body
        self._search = search
        self._homes = homes
        self._names = names
        self._with_logprobs = with_logprobs
        self._output: list[OutputItem] = []  # those that are done
        self._growing: GrowingItem | None = None
        self._unsaid: list[ChatLogprob] = []  # of tokens whose text has not been emitted
        self._fresh: list[ChatLogprob] = []  # of the current piece
        self._finish_reason = "stop"
        self._running = False
        self._events = EventWriter(new_id)

    def opening(self) -> bytes:
        return b"".join(self.opening_events())

    def events(self, piece: Piece) -> bytes:
        return b"".join(self.piece_events(piece))

    def closing(self, usage: Usage) -> bytes:
        return b"".join(self.closing_events(usage))

    def failure(self, reply: ErrorReply) -> bytes:
        return b"".join(self.failure_events(reply))

    def whole(self, pieces: list[Piece], usage: Usage) -> ResponseBody:
        self._events.is_enabled = False
        for piece in pieces:
            self.piece_events(piece)
        self.closing_events(usage)
        return self.body

    def opening_events(self) -> list[bytes]:
        """A queued response is reported as queued, any other as in progress."""
        self._events.write(bodies.Created, response=self.body)
        if self.body.status == "queued":
            self._events.write(bodies.Queued, response=self.body)
        else:
            self._run()
        return self._events.taken()

    def piece_events(self, piece: Piece) -> list[bytes]:
        self._run()
        if self._with_logprobs:
            self._fresh = chat_logprobs(self._names, piece.logprobs)
            self._unsaid += self._fresh
        for part in piece.events:
            self._grow(part)
        if piece.finish_reason is not None:
            self._finish_reason = piece.finish_reason
        return self._events.taken()

    def closing_events(self, usage: Usage) -> list[bytes]:
        """The last item is done, and so is the response."""
        cut = self._finish_reason == "length"
        self._run()
        if len(self._output) == (self._search is not None) and self._growing is None:
            self._begin(self._new_text)  # an empty answer still has a message
        # A call to be made has its own finish reason.
        call_is_cut = isinstance(self._growing, GrowingCall) and self._finish_reason != "tool_calls"
        self._end_item("incomplete" if cut or call_is_cut else "completed")
        self._end(
            "incomplete" if cut else "completed",
            usage=response_usage(usage),
            incomplete_details=IncompleteDetails("max_output_tokens") if cut else None,
            completed_at=None if cut else int(time.time()),
        )
        return self._events.taken()

    def failure_events(self, reply: ErrorReply) -> list[bytes]:
        """The output so far stays, marked as incomplete."""
        self._end_item("incomplete")
        self._end("failed", error=response_error(reply))
        return self._events.taken()

    def cancelled_events(self) -> list[bytes]:
        self._end_item("incomplete")
        self._end("cancelled")
        return self._events.taken()

    def _run(self) -> None:
        if not self._running:
            self._running = True
            self.body = msgspec.structs.replace(self.body, status="in_progress")
            self._events.write(bodies.InProgress, response=self.body)
            if self._search is not None:
                self._output.append(self._search.write(self._events))

    def _new_text(self, events: EventWriter, index: int) -> GrowingItem:
        return GrowingText(events, index, None if self._search is None else self._search.cite)

    def _grow(self, part: ParsedEvent) -> None:
        match part:
            case Content(text):
                if not isinstance(self._growing, GrowingText):
                    if self._growing is not None:
                        self._unsaid = self._fresh  # earlier tokens were markers between reasoning and text
                    self._begin(self._new_text)
                self._add(text)
            case Reasoning(text):
                self._unsaid = []  # reasoning has no log-probabilities
                if not isinstance(self._growing, GrowingReasoning):
                    self._begin(GrowingReasoning)
                self._add(text)
            case CallStart(id, name):
                self._unsaid = []
                home = self._homes.get(name, (None, name))
                self._begin(lambda events, index: GrowingCall(events, index, id, *home))
            case CallArguments(text):
                self._unsaid = []
                assert isinstance(self._growing, GrowingCall)  # parsers begin a call before its arguments
                self._add(text)

    def _add(self, text: str) -> None:
        assert self._growing is not None
        logprobs, self._unsaid = self._unsaid, []
        self._growing.add(text, logprobs)

    def _begin(self, new: Callable[[EventWriter, int], GrowingItem]) -> None:
        self._end_item("completed")
        self._growing = new(self._events, len(self._output))

    def _end_item(self, status: ItemStatus) -> None:
        if self._growing is None:
            return
        if self._unsaid and isinstance(self._growing, GrowingText):
            self._add("")  # the end tokens
        self._output.append(self._growing.done(status))
        self._growing = None

    def _end(self, status: Status, **changes: Any) -> None:
        self.body = msgspec.structs.replace(self.body, status=status, output=self._output, **changes)
        self._events.write(ENDS[status], response=self.body)


def response_usage(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        usage.prompt_tokens,
        bodies.InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
        usage.completion_tokens,
        bodies.OutputTokensDetails(usage.completion_tokens_details.reasoning_tokens),
        usage.total_tokens,
    )


def response_error(reply: ErrorReply) -> ResponseError:
    """A failure as one of the few codes that clients of this endpoint know."""
    if reply.status == 429:
        return ResponseError("rate_limit_exceeded", reply.message, reply.param)
    return ResponseError(
        "invalid_prompt" if reply.status == 400 else "server_error", reply.message, reply.param
    )
