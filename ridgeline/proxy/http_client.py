"""HttpClient: HTTP/1.1 to upstreams, on asyncio protocols and httptools.

Connections are reused, one request on each at a time (`pool`); aborting a request closes its socket at once.
The client follows no redirect, adds only framing headers and does not decompress. A request is sent once;
only a GET, or a request without a written byte, is sent again if a kept-alive connection is found closed.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from ridgeline.proxy.answer import UpstreamAnswer
from ridgeline.proxy.body import StoredBody
from ridgeline.proxy.connection import Connection
from ridgeline.proxy.errors import Cause, RequestBroken
from ridgeline.proxy.origin import Origin
from ridgeline.proxy.pool import ClientLimits, ConnectionPool
from ridgeline.proxy.request_head import Headers, request_head

MAX_ADDRESSES = 4  # of one host name, tried in turn
NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds. `first_byte_s`: from sending the request to the first byte of the body."""

    connect_s: float = 5.0
    first_byte_s: float = 300.0
    idle_s: float = 60.0  # between two reads of a body


class HttpClient:
    """One per event loop. `close` aborts running requests."""

    def __init__(self, limits: ClientLimits | None = None) -> None:
        self.pool: ConnectionPool[Connection] = ConnectionPool(limits or ClientLimits())
        self.opened = 0  # connections, since the start
        self._connecting = 0
        self._hosts: dict[Origin, bytes] = {}

    async def ask(
        self,
        origin: Origin,
        method: str,
        path: str,
        headers: Headers,
        body: bytes | StoredBody = b"",
        *,
        timeouts: Timeouts,
        until: float = NEVER,
        fixed: bytes = b"",
        wait_for_body: bool = False,
        stream: bool = False,
        on_made: Callable[[UpstreamAnswer], None] | None = None,
    ) -> UpstreamAnswer:
        """The answer, once its head or its first body bytes have arrived. Raises RequestBroken.

        until: deadline of the whole answer, by the monotonic clock. fixed: more header lines, made by
        `header_lines`. stream: bytes should arrive all the time. A cancelled caller leaves no connection.
        on_made: called at once with the answer, so that it can be failed while nothing has arrived.
        """
        host = self._hosts.get(origin)
        if host is None:
            host = self._hosts[origin] = b"host: %s\r\n" % origin.authority.encode("ascii")
        head = request_head(method, origin.base, path, host + fixed, headers, len(body))
        answer = UpstreamAnswer(timeouts.first_byte_s, timeouts.idle_s, until, wait_for_body, stream)
        if on_made is not None:
            on_made(answer)
        connection = self.pool.take(origin)
        while True:
            if connection is None:
                connection = await self._connect(origin, timeouts.connect_s, until)
            if answer.has_failed:  # it was given up while the connection was made
                connection.drop()
            else:
                connection.send(answer, head, body)
            await answer.begin()
            if not answer.is_lost:
                return answer
            # A kept-alive connection was closed. It is unknown whether its server had read the request.
            self.pool.drop_idle(origin)
            if connection.has_written and method != "GET":
                raise RequestBroken("stale")
            answer.is_lost = False
            connection = None

    def close(self) -> None:
        self.pool.close()

    async def _connect(self, origin: Origin, connect_s: float, until: float) -> Connection:
        if len(self.pool.live) + self._connecting >= self.pool.limits.connections:
            raise RequestBroken("busy")
        left_s = until - monotonic()
        timeout_s = max(min(connect_s, left_s), 0.0)
        self._connecting += 1
        try:
            async with asyncio.timeout(timeout_s):
                connection = await self._open(origin, timeout_s)
        except TimeoutError:
            raise RequestBroken("connect_timeout" if left_s > connect_s else "total_timeout") from None
        except OSError as error:
            raise RequestBroken(connect_cause(error)) from None
        finally:
            self._connecting -= 1
        self.opened += 1
        return connection

    async def _open(self, origin: Origin, timeout_s: float) -> Connection:
        loop = asyncio.get_running_loop()
        if origin.unix:
            _, made = await loop.create_unix_connection(lambda: Connection(self.pool, origin), origin.unix)
            return made
        addresses = [origin.host]
        if not origin.is_address:
            found = await loop.getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM)
            addresses = list(dict.fromkeys(str(info[4][0]) for info in found))[:MAX_ADDRESSES]
        failure: OSError = OSError(errno.EHOSTUNREACH, "no address")
        until = monotonic() + timeout_s
        for number, address in enumerate(addresses):
            # An address that never answers leaves time for the others.
            share_s = (until - monotonic()) / (len(addresses) - number)
            try:
                async with asyncio.timeout(share_s if number + 1 < len(addresses) else None):
                    _, made = await loop.create_connection(
                        lambda: Connection(self.pool, origin),
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


def connect_cause(error: OSError) -> Cause:
    """The cause of a failed connection, as a word."""
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    if isinstance(error, ssl.SSLError):
        return "tls"
    if isinstance(error, socket.gaierror):
        return "unresolved"
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL):
        return "busy"
    return "unreachable"
