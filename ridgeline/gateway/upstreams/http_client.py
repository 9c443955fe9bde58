"""HttpClient: HTTP/1.1 to upstreams, on asyncio protocols and httptools. For `Upstreams` and the embedder.

Connections are kept and used again, one request on each at a time; deadlines are one sweep over all requests,
not a timer each; giving up closes the socket at once. It follows no redirect, adds no header but the framing,
undoes no compression. A request goes out once; only a GET, or a request of which no byte was written, goes
out again when a kept-alive connection turns out to be closed.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from dataclasses import dataclass
from time import monotonic

from ridgeline.gateway.upstreams.answer import Answer, UpstreamBroken
from ridgeline.gateway.upstreams.connection import Connection
from ridgeline.gateway.upstreams.origin import Origin
from ridgeline.gateway.upstreams.outgoing import Headers, StoredBody
from ridgeline.gateway.upstreams.request_head import request_head

__all__ = ["Answer", "ClientLimits", "Deadlines", "HttpClient", "UpstreamBroken"]

SWEEP_S = 0.05
MAX_ADDRESSES = 4  # of one name, tried in turn
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
        body: bytes | StoredBody = b"",
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
        connection = self._kept(origin)
        while True:
            if connection is None:
                connection = await self._connect(origin, deadlines.connect_s, until)
            connection.send(answer, head, body)
            await answer.begin()
            if not answer.is_lost:
                return answer
            # A kept-alive connection was closed. Whether its server had read the request is not known.
            self._drop_idle(origin)
            if connection.has_written and method != "GET":
                raise UpstreamBroken("stale")
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

    def _kept(self, origin: Origin) -> Connection | None:
        """The connection that was used last and is still open."""
        kept, now = self._idle.get(origin), monotonic()
        while kept:
            connection = kept.pop()
            if connection.is_usable(now):
                return connection
            connection.drop()
        return None

    def _drop_idle(self, origin: Origin) -> None:
        for connection in list(self._idle.get(origin, ())):
            connection.drop()

    async def _connect(self, origin: Origin, connect_s: float, until: float) -> Connection:
        if len(self.live) + self._connecting >= self.limits.connections:
            raise UpstreamBroken("busy")
        left_s = until - monotonic()
        timeout_s = max(min(connect_s, left_s), 0.0)
        self._connecting += 1
        try:
            async with asyncio.timeout(timeout_s):
                connection = await self._open(origin, timeout_s)
        except TimeoutError:
            raise UpstreamBroken("connect_timeout" if left_s > connect_s else "total_timeout") from None
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
        addresses = [origin.host]
        if not origin.is_address:
            found = await loop.getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM)
            addresses = list(dict.fromkeys(str(info[4][0]) for info in found))[:MAX_ADDRESSES]
        failure: OSError = OSError(errno.EHOSTUNREACH, "no address")
        until = monotonic() + timeout_s
        for number, address in enumerate(addresses):
            # One that never answers leaves time for the others.
            share_s = (until - monotonic()) / (len(addresses) - number)
            try:
                async with asyncio.timeout(share_s if number + 1 < len(addresses) else None):
                    _, made = await loop.create_connection(
                        lambda: Connection(self, origin),
                        address,
                        origin.port,
                        ssl=origin.tls,
                        server_hostname=origin.host if origin.tls else None,
                    )
                    return made
            except TimeoutError:
                failure = OSError(errno.ETIMEDOUT, "timed out")
            except OSError as error:
                failure = error
        raise failure

    def _check_deadlines(self) -> None:
        self._sweep = None
        now = monotonic()
        for connection in list(self.live):
            answer = connection.answer
            if answer is not None and now >= answer.due:
                answer.check(now)
        for kept in self._idle.values():
            while kept and kept[0].kept_until <= now:  # the longest unused come first
                kept[0].drop()
        if self.live or any(self._idle.values()):
            # A thousand requests take some tenths of a millisecond to look at: the more there are, the rarer.
            pause = SWEEP_S * (1 + len(self.live) / 1000)
            self._sweep = asyncio.get_running_loop().call_later(pause, self._check_deadlines)


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
