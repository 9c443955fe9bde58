"""Exchange: one request to the fleet, from its first replica to the end of its answer.

The caller reads an UpstreamAnswer that outlives replicas. An answer that is not streamed is read here
completely, so that a peer can be asked again. A stream has markers (`replica.resume`): if its replica fails,
a peer continues it from the tokens that the client has. A stream that cannot be continued fails with
RequestBroken, and the caller tells its client; it never looks like a complete answer.
"""

from __future__ import annotations

import asyncio
import logging

from ridgeline.fleet.router.asking import Asking
from ridgeline.proxy.answer import UpstreamAnswer
from ridgeline.proxy.errors import Cause, ProxyError, RequestBroken
from ridgeline.proxy.request_head import Headers
from ridgeline.replica.resume import RESUMABLE_HEADER, BrokenMarkers, Failure, GroupReader, ResumeState

MARKED = RESUMABLE_HEADER.encode()
# Headers of a replica's answer that are not passed on: the router's HTTP server sends its own.
OWN_HEADERS = frozenset((MARKED, b"content-length", b"date"))

log = logging.getLogger(__name__)


class _Elsewhere(Exception):
    """The replica reports that it cannot continue; a peer may."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.code)


class Exchange:
    """The source of the caller's answer: the caller pauses and drops it through this object."""

    def __init__(self, asking: Asking) -> None:
        tuning, request = asking.means.tuning, asking.request
        self._asking, self._request, self._book = asking, request, asking.book
        self._answer = UpstreamAnswer(
            tuning.first_byte_timeout_s, tuning.idle_timeout_s, request.until, True, request.stream
        )
        self._state = ResumeState()
        self._reader: GroupReader | None = None  # the state of a stream with markers
        self._task: asyncio.Task[None] | None = None
        self._has_first = False
        self._began = asking.means.clock()

    async def open(self) -> UpstreamAnswer:
        """Returns the answer once it has begun. Raises QueueRefused, NoReplica or RequestBroken."""
        asking, answer = self._asking, self._answer
        answer.attach(self, self._began)
        try:
            inner = await asking.ask()
            answer.asked_at = inner.asked_at
            if self._request.stream and inner.status < 300:
                answer.feed_head(inner.status, self._headers(inner))
                self._reader = _reader_of(inner)
                self._task = asyncio.get_running_loop().create_task(self._carry(inner))
                await answer.begin()
            else:
                await self._whole(inner)
        except ProxyError as error:
            asking.end("failed" if isinstance(error, RequestBroken) else "refused")
            raise
        except asyncio.CancelledError:
            self.drop()
            raise
        return answer

    # ── Source ──

    def pause(self) -> None:
        if self._asking.inner is not None:
            self._asking.inner.pause()

    def resume(self) -> None:
        if self._asking.inner is not None:
            self._asking.inner.resume()

    def drop(self) -> None:
        """The caller dropped its answer."""
        inner, task = self._asking.inner, self._task
        self._task = None
        self._asking.end("cancelled")
        if inner is not None:
            inner.abort()
        if task is not None:
            task.cancel()

    # ── the answer ──

    async def _whole(self, inner: UpstreamAnswer) -> None:
        """Read the whole answer: until then nothing has reached the client, and a peer can be asked."""
        asking, answer = self._asking, self._answer
        while True:
            try:
                body = await inner.read(asking.means.tuning.max_answer_bytes)
                break
            except RequestBroken as error:
                asking.after_break(error.cause)
                if not asking.may_move(error.cause, resuming=False):
                    raise
                inner = await asking.ask()
        answer.last_at = inner.last_at
        self._first_token(inner.status)
        answer.feed_head(inner.status, self._headers(inner))
        answer.feed(body)
        asking.end("ok" if inner.status < 500 else "failed")
        answer.complete()

    async def _carry(self, inner: UpstreamAnswer) -> None:
        """Pass a stream on, from as many replicas as it needs."""
        asking, answer = self._asking, self._answer
        try:
            while True:
                cause = await self._relayed(inner)
                if cause is None:
                    asking.end("ok" if self._state.failure is None else "failed")
                    answer.complete()
                    return
                asking.after_break(cause)
                inner = await self._continue(cause)
                if answer.is_paused:
                    inner.pause()
        except RequestBroken as error:
            self._fail(error.cause)
        except ProxyError:
            self._fail("unresumable")
        except asyncio.CancelledError:
            asking.end("cancelled")
            raise
        except Exception:
            log.exception("a stream could not be passed on")
            self._fail("garbage")

    def _fail(self, cause: Cause) -> None:
        self._asking.end("failed")
        self._task = None
        self._answer.fail(cause)

    async def _relayed(self, inner: UpstreamAnswer) -> Cause | None:
        """Why the replica did not finish the stream; None if it did."""
        try:
            await inner.relay(self._pass_on)
        except RequestBroken as error:
            return error.cause
        except _Elsewhere:
            return "reset"
        except BrokenMarkers as error:
            log.error("a replica's stream has broken markers: %s", error)
            return "garbage"
        if self._reader is not None and not self._state.ended and self._state.failure is None:
            return "truncated"  # the connection ended cleanly in the middle of the answer
        return None

    async def _continue(self, cause: Cause) -> UpstreamAnswer:
        """A peer's answer that continues where the stream broke. Raises RequestBroken if there is none."""
        asking, state = self._asking, self._state
        resuming = bool(self._answer.first_at)
        if resuming and not (self._reader is not None and state.may_continue):
            raise RequestBroken(cause)
        if not asking.may_move(cause, resuming):
            raise RequestBroken(cause)
        if not resuming:
            self._state = ResumeState()
        inner = await asking.ask(state if resuming else None)
        self._reader = _reader_of(inner)
        if inner.status >= 300 or (resuming and self._reader is None):
            inner.abort()
            raise RequestBroken("unresumable")
        return inner

    def _pass_on(self, data: bytes) -> None:
        answer, reader, asking = self._answer, self._reader, self._asking
        if asking.inner is not None and asking.placed is not None:
            answer.last_at = asking.inner.last_at
            asking.placed.replica.heard_bytes(answer.last_at)
        if reader is None:
            if not self._has_first:
                self._first_token(200)
            asking.computed(1)  # or more: a server without markers does not say how many
            answer.feed(data)
            return
        out: list[bytes] = []
        tokens, failure = 0, None
        for group in reader.feed(data):
            marker = group.marker
            if marker.failure is not None and marker.failure.elsewhere and asking.can_move:
                failure = marker.failure
                break
            self._state.add(marker)
            for one in marker.t:
                tokens += len(one.ids)
            if group.events:
                out.append(group.events)
        if tokens:
            if not self._has_first:
                self._first_token(200)
            self._book.output_tokens += tokens
            if not asking.is_proven:
                asking.computed(tokens)
        if out:
            answer.feed(out[0] if len(out) == 1 else b"".join(out))
        if failure is not None:
            raise _Elsewhere(failure)

    def _first_token(self, status: int) -> None:
        self._has_first = True
        placed, means = self._asking.placed, self._asking.means
        if placed is not None and status < 400:
            means.first_token(placed)
            self._book.first_token(placed.replica.entry.version, means.clock() - self._began)

    def _headers(self, inner: UpstreamAnswer) -> Headers:
        headers = [one for one in inner.headers if one[0] not in OWN_HEADERS]
        hold, placed = self._asking.hold, self._asking.placed
        if hold.position:
            headers.append((b"x-ridgeline-held-position", b"%d" % hold.position))
            headers.append((b"x-ridgeline-held-estimate-s", b"%.3f" % hold.estimate_s))
            headers.append((b"x-ridgeline-held-s", b"%.3f" % hold.waited_s))
        if placed is not None:
            headers.append((b"x-ridgeline-replica", placed.replica.id.encode("latin-1", "replace")))
        return headers


def _reader_of(inner: UpstreamAnswer) -> GroupReader | None:
    return None if inner.header(MARKED) is None else GroupReader()
