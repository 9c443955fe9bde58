"""HttpClient: HTTP/1.1 to upstreams, on asyncio protocols and httptools. For `Upstreams` and the embedder.

Connections are kept and used again, one request on each at a time; deadlines are one sweep over all requests,
not a timer each; giving up closes the socket at once. It follows no redirect, adds no header but the framing,
undoes no compression and retries nothing, but for a kept connection that turns out to be closed already.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from dataclasses import dataclass
from time import monotonic
from typing import cast

import httptools

from ridgeline.gateway.upstreams.answer import Answer, UpstreamBroken
from ridgeline.gateway.upstreams.origin import Origin
from ridgeline.gateway.upstreams.outgoing import Headers
from ridgeline.gateway.upstreams.request_head import HOP_BY_HOP, request_head

__all__ = ["Answer", "ClientLimits", "Deadlines", "HttpClient", "UpstreamBroken"]

SWEEP_S = 0.05
SMALL_BODY = 32 * 1024  # copied behind its head and sent in one write
NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds. `first_byte_s`: from the request's sending to the first byte of the body."""

    connect_s: float = 5.0
    first_byte_s: float = 300.0
    idle_s: float = 60.0  # between two reads of a body


@dataclass(frozen=True, slots=True)
class ClientLimits:
    head_bytes: int = 64 * 1024  # of an answer; also what may come without any byte of a body
    head_lines: int = 200
    body_bytes: int = 1 << 30
    connections: int = 10_000  # in use, all origins together
    idle: int = 512  # kept for later, of one origin
    idle_s: float = 30.0


class HttpClient:
    """One per event loop. `close` gives up what is under way."""

    def __init__(self, limits: ClientLimits | None = None) -> None:
        self.limits = limits or ClientLimits()
        self.live: set[Connection] = set()  # with a request on them
        self.opened = 0  # connections, since the start
        self._connecting = 0
        self._is_closed = False
        self._idle: dict[Origin, list[Connection]] = {}
        self._hosts: dict[Origin, bytes] = {}
        self._sweep: asyncio.TimerHandle | None = None

    async def ask(
        self,
        origin: Origin,
        method: str,
        path: str,
        headers: Headers,
        body: bytes = b"",
        *,
        deadlines: Deadlines,
        until: float = NEVER,
        fixed: bytes = b"",
        wait_for_body: bool = False,
        stream: bool = False,
    ) -> Answer:
        """The answer, once its head is there, or the first of its body too. Else UpstreamBroken.

        until: when the whole answer must be there, by the monotonic clock. fixed: more header lines, made by
        `header_lines`. stream: bytes are to come all the time. A cancelled caller leaves no connection.
        """
        host = self._hosts.get(origin)
        if host is None:
            host = self._hosts[origin] = b"host: %s\r\n" % origin.authority.encode("ascii")
        head = request_head(method, origin.base, path, host + fixed, headers, len(body))
        answer = Answer(deadlines.first_byte_s, deadlines.idle_s, until, wait_for_body, stream)
        kept = self._idle.get(origin)
        connection = kept.pop() if kept else None
        while True:
            if connection is None:
                connection = await self._connect(origin, min(deadlines.connect_s, until - monotonic()))
            connection.send(answer, head, body)
            await answer.begin()
            if not answer.is_lost:
                return answer
            # The server had closed a kept connection before it saw the request: a new one, once.
            answer.is_lost = False
            connection = None

    def close(self) -> None:
        self._is_closed = True
        for connection in list(self.live):
            connection.fail("aborted")
        for kept in self._idle.values():
            for connection in list(kept):
                connection.drop()
        self._idle.clear()
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None

    def idle_connections(self, origin: Origin) -> int:
        return len(self._idle.get(origin, ()))

    # ── for connections ──

    def keep(self, connection: Connection) -> bool:
        kept = self._idle.setdefault(connection.origin, [])
        if self._is_closed or len(kept) >= self.limits.idle:
            return False
        kept.append(connection)
        return True

    def forget(self, connection: Connection) -> None:
        self.live.discard(connection)
        kept = self._idle.get(connection.origin)
        if kept and connection in kept:
            kept.remove(connection)

    def watch(self) -> None:
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(SWEEP_S, self._check_deadlines)

    async def _connect(self, origin: Origin, timeout_s: float) -> Connection:
        if len(self.live) + self._connecting >= self.limits.connections:
            raise UpstreamBroken("busy")
        self._connecting += 1
        try:
            async with asyncio.timeout(max(timeout_s, 0.0)):
                connection = await self._open(origin, timeout_s)
        except TimeoutError:
            raise UpstreamBroken("connect_timeout") from None
        except OSError as error:
            raise UpstreamBroken(connect_cause(error)) from None
        finally:
            self._connecting -= 1
        self.opened += 1
        return connection

    async def _open(self, origin: Origin, timeout_s: float) -> Connection:
        loop = asyncio.get_running_loop()
        if origin.unix:
            _, made = await loop.create_unix_connection(lambda: Connection(self, origin), origin.unix)
            return made
        found = await loop.getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(info[4][0]) for info in found))[:4]
        last: OSError = OSError(errno.EHOSTUNREACH, "no address")
        for number, address in enumerate(addresses):
            # An address that never answers leaves time for the others.
            share_s = timeout_s / (len(addresses) - number) if len(addresses) > 1 else NEVER
            try:
                async with asyncio.timeout(None if share_s == NEVER else share_s):
                    _, made = await loop.create_connection(
                        lambda: Connection(self, origin),
                        address,
                        origin.port,
                        ssl=origin.tls,
                        server_hostname=origin.host if origin.tls else None,
                    )
                    return made
            except TimeoutError:
                last = OSError(errno.ETIMEDOUT, "timed out")
            except OSError as error:
                last = error
        raise last

    def _check_deadlines(self) -> None:
        self._sweep = None
        now = monotonic()
        for connection in list(self.live):
            answer = connection.answer
            if answer is not None and now >= answer.due:
                answer.check(now)
        oldest = now - self.limits.idle_s
        for kept in self._idle.values():
            while kept and kept[0].kept_at < oldest:  # the longest unused come first
                kept[0].drop()
        if self.live or any(self._idle.values()):
            # A thousand requests take some tenths of a millisecond to look at: the more there are, the rarer.
            pause = SWEEP_S * (1 + len(self.live) / 1000)
            self._sweep = asyncio.get_running_loop().call_later(pause, self._check_deadlines)


class Connection(asyncio.Protocol):
    """A connection with at most one request on it."""

    __slots__ = (
        "_client",
        "_has_framing",
        "_headers",
        "_is_complete",
        "_is_interim",
        "_is_kept",
        "_parser",
        "_pieces",
        "_requests",
        "_silent",
        "_transport",
        "answer",
        "kept_at",
        "origin",
    )

    def __init__(self, client: HttpClient, origin: Origin) -> None:
        self.origin = origin
        self.answer: Answer | None = None
        self.kept_at = 0.0
        self._client = client
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._requests = 0
        self._silent = 0  # bytes since the last of a body
        self._headers: Headers = []
        self._pieces: list[bytes] = []
        self._has_framing = self._is_complete = self._is_interim = self._is_kept = False

    def send(self, answer: Answer, head: bytes, body: bytes) -> None:
        transport = self._transport
        assert transport is not None
        self._requests += 1
        self._silent = 0
        self.answer = answer
        answer.attach(self, monotonic())
        if transport.is_closing():
            self._lost(None)
            return
        self._client.live.add(self)
        self._client.watch()
        self._is_complete = self._has_framing = False
        self._headers = []
        if len(body) <= SMALL_BODY:
            transport.write(head + body)
        else:
            transport.writelines((head, body))

    def pause(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def drop(self) -> None:
        """Close the socket now, whatever is still to be read or written."""
        self.answer = None
        self._client.forget(self)
        if self._transport is not None:
            self._transport.abort()

    def fail(self, cause: str) -> None:
        answer, self.answer = self.answer, None
        if answer is not None:
            answer.fail(cause)
        self.drop()

    # ── the loop's calls ──

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own has no such base

    def data_received(self, data: bytes) -> None:
        answer = self.answer
        if answer is None:
            self.drop()  # bytes that nobody asked for
            return
        answer.last_at = monotonic()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            # What a callback raised comes wrapped. Bytes behind a whole answer spoil the connection alone.
            if not self._is_complete:
                found = error.__context__
                self.fail(found.cause if isinstance(found, UpstreamBroken) else "garbage")
                return
            self._is_kept = False
        pieces = self._pieces
        if pieces:
            self._silent = 0
            piece = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            pieces.clear()
            answer.feed(piece)
            if answer.received > self._client.limits.body_bytes:
                self.fail("body_too_large")
                return
        else:
            self._silent += len(data)
            if self._silent > self._client.limits.head_bytes:
                self.fail("garbage" if answer.received else "head_too_large")
                return
        if self._is_complete and self.answer is not None:  # the sink may have given it up
            self._end(answer)

    def connection_lost(self, error: Exception | None) -> None:
        self._client.forget(self)
        if self.answer is not None:
            self._lost(error)

    # ── the parser's calls ──

    def on_message_begin(self) -> None:
        if self._is_complete:
            raise UpstreamBroken("garbage")  # a second answer to one request

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"transfer-encoding":
            self._has_framing = b"chunked" in value.lower()
        elif name not in HOP_BY_HOP:
            headers = self._headers
            headers.append((name, value))
            if len(headers) > self._client.limits.head_lines:
                raise UpstreamBroken("head_too_large")
            if name == b"content-length":
                self._has_framing = True
                if int(value) > self._client.limits.body_bytes:
                    raise UpstreamBroken("body_too_large")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            if status == 101:
                raise UpstreamBroken("garbage")  # never asked for
            self._is_interim, self._has_framing = True, False
            self._headers = []
            return
        answer = self.answer
        if answer is not None:
            if status in (204, 304):
                self._has_framing = True
            answer.feed_head(status, self._headers)
            self._headers = []  # trailers, which nobody reads, are not to change it

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        if self._is_interim:
            self._is_interim = False
            return
        self._is_complete = True
        self._is_kept = self._parser.should_keep_alive()  # the parser forgets it with the message

    # ── the end of an answer ──

    def _end(self, answer: Answer) -> None:
        transport = self._transport
        assert transport is not None
        self.answer = None
        self._client.live.discard(self)
        # Unsent bytes: answered before it was all sent, and the rest would be taken for the next request.
        usable = self._is_kept and not transport.is_closing() and not transport.get_write_buffer_size()
        if usable and self._client.keep(self):
            self.kept_at = answer.last_at
            if answer.is_paused:
                transport.resume_reading()
        else:
            transport.abort()
        answer.complete()

    def _lost(self, error: Exception | None) -> None:
        answer, self.answer = self.answer, None
        assert answer is not None
        self._client.live.discard(self)
        if not self._silent and not answer.status and self._requests > 1:
            answer.lose()
        elif not answer.status:
            answer.fail("reset")
        elif self._has_framing or error is not None:
            answer.fail("truncated")
        else:
            answer.complete()  # a body that ends with its connection


def connect_cause(error: OSError) -> str:
    """A word for why there is no connection."""
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    if isinstance(error, ssl.SSLError):
        return "tls"
    if isinstance(error, socket.gaierror):
        return "unresolved"
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL):
        return "busy"
    return "unreachable"
