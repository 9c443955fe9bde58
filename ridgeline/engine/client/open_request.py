"""OpenRequest: one request that an AsyncClient has sent and whose answer is not complete."""

from __future__ import annotations

from typing import Protocol

from ridgeline.engine.client.inbox import Inbox
from ridgeline.engine.client.text import TextStream
from ridgeline.engine.errors import EngineError, failure
from ridgeline.engine.link.messages import Abort, ToEngine
from ridgeline.engine.schedule.request import FinishReason, Request
from ridgeline.engine.schedule.step import SeqDelta


class Link(Protocol):
    """The part of a client that its open requests use."""

    requests: dict[str, OpenRequest]

    def send(self, message: ToEngine) -> None: ...


class OpenRequest:
    """One open request: turns the engine's messages for it into chunks in its inbox."""

    def __init__(
        self, engine: Link, request: Request, streams: list[TextStream], inbox: Inbox, number: int
    ) -> None:
        """streams: one for each sample."""
        self.queued_tokens = len(request.prompt_ids)  # until the first output
        self._engine = engine
        self._request_id = request.request_id
        self._inbox = inbox
        self._number = number
        self._streams = streams
        self._unfinished = len(streams)
        inbox.open_requests += 1

    def push(self, delta: SeqDelta, step_end: float) -> None:
        """Handle what one step added. An error here affects only this request."""
        self.queued_tokens = 0
        try:
            if delta.finish_reason is FinishReason.ERROR:
                raise failure(delta.error)
            stream = self._streams[delta.index]
            chunk = stream.push(delta, step_end)
        except Exception as error:
            self._inbox.fail(error)
            self.close()
            return
        if chunk is None:
            return
        if stream.finished:
            self._unfinished -= 1
            if stream.stopped_by_text:
                self._engine.send(Abort(self._request_id, delta.index))
        self._inbox.put(self._number, chunk)
        if not self._unfinished:
            self._forget()

    def fail(self, error: EngineError) -> None:
        """The engine will send nothing more for it."""
        self._inbox.fail(error)
        self._forget()

    def close(self) -> None:
        """Stop waiting for it. If it has not ended, it is aborted in the engine."""
        if self._forget():
            self._engine.send(Abort(self._request_id))

    def _forget(self) -> bool:
        known = self._engine.requests.pop(self._request_id, None) is not None
        if known:
            self._inbox.end_request()
        return known
