"""The load's HTTP client: keep-alive connections as asyncio protocols, timestamps taken in data_received.

A benchmark must not measure its own client. Bytes are stamped as the loop delivers them and parsed only after
every ready socket has its stamp; one sweep checks the deadlines of all requests instead of a timer each. It
sends what it is given and reports each request once, whatever the server does. It retries only if a kept
connection was closed before the request reached the server.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import httptools

from ridgeline.lab.bench.client.streamed_answer import Garbage, StreamedAnswer, body_message
from ridgeline.lab.bench.client.timer import now
from ridgeline.lab.bench.config import RequestDeadlines
from ridgeline.lab.bench.figures.record import RequestRecord, Status
from ridgeline.lab.traffic.request import PlannedRequest
from ridgeline.proxy import http_client

SWEEP_S = 0.05
MAX_ERROR_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Address:
    """The server's address: host for headers and certificate, ip for the socket."""

    host: str
    ip: str
    port: int
    tls: ssl.SSLContext | None

    @property
    def authority(self) -> str:
        """For the host header: without the scheme's default port."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"


class SentRequest:
    """One request and its progress. Timestamps are clock values, not yet relative to the run's start."""

    __slots__ = (
        "answer",
        "cause",
        "connect_s",
        "due",
        "error",
        "held_s",
        "http_status",
        "index",
        "is_retried",
        "last_at",
        "planned",
        "request",
        "started",
        "status",
        "t_end",
        "t_send",
        "warmup",
        "wire",
    )

    def __init__(self, index: int, planned: PlannedRequest, due: float, keep_text: bool = False) -> None:
        self.index, self.planned, self.due = index, planned, due
        self.answer = StreamedAnswer(keep_text)
        self.request = b""
        self.started = due  # when the client started it
        self.t_send: float | None = None
        self.t_end: float | None = None
        self.last_at: float | None = None  # of the answer's last bytes
        self.connect_s = 0.0
        self.held_s = 0.0  # waiting for a slot under the concurrency cap
        self.status: Status | None = None
        self.http_status: int | None = None
        self.cause = self.error = ""
        self.is_retried = self.warmup = False
        self.wire: _Connection | asyncio.Task[None] | None = None

    def record(self, origin: float, count: Callable[[str], int] | None = None) -> RequestRecord:
        """origin: the clock at the run's start. count: counts tokens of answers without usage."""
        answer = self.answer
        answer.settle(count)
        chunk_at = [at - origin for at in answer.chunk_at]
        visible = answer.t_first_visible
        return RequestRecord(
            index=self.index,
            t_sched=self.due - origin,
            t_send=None if self.t_send is None else self.t_send - origin,
            t_first=chunk_at[0] if chunk_at else None,
            t_first_visible=None if visible is None else visible - origin,
            t_last=chunk_at[-1] if chunk_at else None,
            t_end=None if self.t_end is None else self.t_end - origin,
            status=self.status or "cancelled",
            planned_in=self.planned.input_tokens,
            planned_out=self.planned.output_tokens,
            n_in=answer.n_in,
            n_cached=answer.n_cached,
            n_out=answer.n_out,
            counted_by=answer.counted_by,
            n_first=answer.chunk_tokens[0] if answer.chunk_tokens else 0,
            chunk_at=chunk_at,
            chunk_tokens=answer.chunk_tokens,
            split_by=answer.split_by,
            http_status=self.http_status,
            cause=self.cause,
            error=self.error,
            connect_s=self.connect_s,
            held_s=self.held_s,
            warmup=self.warmup,
            conversation=self.planned.conversation,
            turn=self.planned.turn,
            server=answer.server,
        )


class Client:
    """Sends requests to one address. `on_done` is called once per request, with its status set.

    live: the requests in flight. retried: sent again on a new connection.
    """

    def __init__(
        self, address: Address, deadlines: RequestDeadlines, on_done: Callable[[SentRequest], None]
    ) -> None:
        self._address, self._deadlines, self._on_done = address, deadlines, on_done
        self._loop = asyncio.get_running_loop()
        self.live: set[SentRequest] = set()
        self.retried = 0
        self.lags: list[float] = []  # delays of the deadline sweeps, in seconds
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()
        self._ready: list[_Connection] = []  # have stamped bytes that are not parsed yet
        self._sweep_due = now() + SWEEP_S
        self._sweep = self._loop.call_later(SWEEP_S, self._check_deadlines)

    def send(self, sent: SentRequest, request: bytes) -> None:
        """Send on a connection that is open, or on a new one."""
        sent.request = request
        sent.started = now()
        self.live.add(sent)
        if self._idle:
            self._idle.pop().send(sent)
        else:
            sent.wire = self._loop.create_task(self._connect(sent))

    def end(self, sent: SentRequest, status: Status, cause: str, error: str = "") -> None:
        """End a request from the client's side."""
        wire, sent.wire = sent.wire, None
        if isinstance(wire, _Connection):
            wire.drop()
        elif wire is not None:
            wire.cancel()
        self._finish(sent, now(), status, cause, error)

    def end_all(self, status: Status, cause: str, error: str = "") -> None:
        for sent in list(self.live):
            self.end(sent, status, cause, error)

    def close(self) -> None:
        self._sweep.cancel()
        for connection in list(self._open):
            connection.drop()

    async def _connect(self, sent: SentRequest) -> None:
        address = self._address
        try:
            _, connection = await self._loop.create_connection(
                lambda: _Connection(self),
                address.ip,
                address.port,
                ssl=address.tls,
                server_hostname=address.host if address.tls else None,
            )
        except OSError as error:
            sent.wire = None
            self._finish(sent, now(), "failed", connect_cause(error), str(error))
            return
        sent.connect_s += now() - sent.started
        connection.send(sent)

    def _finish(self, sent: SentRequest, at: float, status: Status, cause: str, error: str) -> None:
        if sent not in self.live:
            return
        self.live.discard(sent)
        sent.status, sent.t_end, sent.cause, sent.error = status, at, cause, error
        sent.request = b""
        sent.wire = None
        self._on_done(sent)

    def _take_apart(self) -> None:
        ready, self._ready = self._ready, []
        for connection in ready:
            connection.take_apart()

    def _check_deadlines(self) -> None:
        # Checking 1,000 requests takes 1 ms: more requests are checked less often.
        pause = SWEEP_S * (1 + len(self.live) / 1000)
        self._sweep = self._loop.call_later(pause, self._check_deadlines)
        limits, moment = self._deadlines, now()
        self.lags.append(moment - self._sweep_due)
        self._sweep_due = moment + pause
        for sent in list(self.live):
            if sent.t_send is None:
                if moment - sent.started > limits.connect_s:
                    self.end(sent, "timeout", "connect_timeout", f"no connection in {limits.connect_s:g} s")
            elif moment - sent.t_send > limits.request_s:
                self.end(sent, "timeout", "request_timeout", f"not complete after {limits.request_s:g} s")
            elif sent.last_at is None:
                if moment - sent.t_send > limits.first_byte_s:
                    words = f"no byte in {limits.first_byte_s:g} s"
                    self.end(sent, "timeout", "first_byte_timeout", words)
            elif moment - sent.last_at > limits.between_s:
                words = f"no data for {limits.between_s:g} s"
                self.end(sent, "timeout", "stalled", words)


class _Connection(asyncio.Protocol):
    """A connection with at most one request on it."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._sent: SentRequest | None = None
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._received: list[tuple[float, bytes]] = []
        self._at = 0.0
        self._requests = 0
        self._refusal = b""
        self._is_complete = self._is_kept = False

    def send(self, sent: SentRequest) -> None:
        assert self._transport is not None
        self._requests += 1
        if self._transport.is_closing():
            self._lost(sent, None)
            return
        sent.wire = self
        self._sent = sent
        self._is_complete = False
        self._refusal = b""
        if sent.t_send is None:
            sent.t_send = now()
        self._transport.write(sent.request)

    def drop(self) -> None:
        self._sent = None
        self._forget()
        if self._transport is not None:
            self._transport.abort()

    # ── the loop's calls ──

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class has a different base
        self._client._open.add(self)

    def data_received(self, data: bytes) -> None:
        ready = self._client._ready
        if not ready:
            self._client._loop.call_soon(self._client._take_apart)
        if not self._received:
            ready.append(self)
        self._received.append((now(), data))

    def connection_lost(self, error: Exception | None) -> None:
        self.take_apart()
        self._forget()
        sent, self._sent = self._sent, None
        if sent is not None:
            self._lost(sent, error)

    # ── the answer ──

    def take_apart(self) -> None:
        received, self._received = self._received, []
        for at, data in received:
            sent = self._sent
            if sent is None:
                self.drop()  # unexpected bytes
                return
            self._at = sent.last_at = at
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserError as error:
                # An error raised in a callback is wrapped.
                found = error.__context__ if isinstance(error.__context__, Garbage) else None
                words = str(found or f"not HTTP ({error}): {data[:60]!r}")
                self._fail("failed", "garbage", words)
                return
            if self._is_complete:
                self._end()

    def on_body(self, body: bytes) -> None:
        sent = self._sent
        if sent is None:
            return
        if sent.http_status is None:
            sent.http_status = self._parser.get_status_code()
        if sent.http_status == 200:
            sent.answer.feed(self._at, body)
        elif len(self._refusal) < MAX_ERROR_BYTES:
            self._refusal += body

    def on_message_complete(self) -> None:
        self._is_complete = True
        self._is_kept = self._parser.should_keep_alive()  # the parser resets it after the message

    def _end(self) -> None:
        sent = self._sent
        assert sent is not None
        sent.http_status = self._parser.get_status_code()
        answer = sent.answer
        if sent.http_status != 200:
            words = f"HTTP {sent.http_status}: {body_message(self._refusal)}"
            self._done("failed", f"http_{sent.http_status}", words)
        elif answer.error:
            self._done("failed", "server_error", answer.error)
        elif not answer.has_events and not answer.is_done:
            self._done("failed", "garbage", "the answer has no event")
        elif not (answer.is_done or answer.is_finished):
            self._done("failed", "truncated", "the stream ended without a finish reason or [DONE]")
        elif not answer.chunk_at:
            self._done("failed", "empty", "the answer has no output token")
        else:
            self._done("ok", "", "")

    def _done(self, status: Status, cause: str, words: str) -> None:
        """The answer is complete: the connection can serve the next request."""
        sent, self._sent = self._sent, None
        assert sent is not None
        assert self._transport is not None
        if self._is_kept and not self._transport.is_closing():
            self._client._idle.append(self)
        else:
            self._transport.close()
        self._client._finish(sent, self._at, status, cause, words)

    def _fail(self, status: Status, cause: str, words: str) -> None:
        sent, self._sent = self._sent, None
        self.drop()
        if sent is not None:
            self._client._finish(sent, self._at, status, cause, words)

    def _lost(self, sent: SentRequest, error: Exception | None) -> None:
        if self._requests > 1 and sent.last_at is None and not sent.is_retried:
            # The server closed an idle connection while it was being reused: the request was not received.
            sent.is_retried = True
            self._client.retried += 1
            sent.wire = self._client._loop.create_task(self._client._connect(sent))
            return
        answer, status, cause = sent.answer, sent.http_status, "reset"
        words = "the connection was closed before an answer" if error is None else str(error)
        if status is not None and status != 200:
            cause, words = f"http_{status}", f"HTTP {status}: {body_message(self._refusal)}"
        elif answer.error:
            cause, words = "server_error", answer.error
        elif answer.is_done and answer.chunk_at:  # the answer is complete; some servers end it by closing
            self._client._finish(sent, sent.last_at or now(), "ok", "", "")
            return
        elif error is None and sent.last_at is not None:
            cause, words = "truncated", "the connection was closed in the middle of the answer"
        self._client._finish(sent, now(), "failed", cause, words)

    def _forget(self) -> None:
        self._client._open.discard(self)
        if self in self._client._idle:
            self._client._idle.remove(self)


def connect_cause(error: OSError) -> str:
    """A short cause for a failed connection, in the words of bench's reports."""
    if isinstance(error, ConnectionResetError):
        return "reset"
    cause = http_client.connect_cause(error)
    return "client_out_of_sockets" if cause == "busy" else cause
