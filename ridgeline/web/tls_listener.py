"""TlsListener: accepts TLS connections and counts them from their accept on.

The event loop's own server calls `connection_made` after the handshake. Counting a connection only then would
let an address open any number of silent ones. Created by `web.listener` for each socket that serves TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Any

from ridgeline.web.connection import BoundedConnection, ConnectionLimits
from ridgeline.web.tls import Certificate

# Handshakes beyond the limits that are answered with 503; further connections are closed.
REFUSED_AT_ONCE = 64
RETRY_S = 1.0  # after a failed accept: no file descriptor is free


class TlsListener:
    """Replaces an asyncio.Server: uvicorn calls `close` and `wait_closed`."""

    def __init__(
        self,
        listener: socket.socket,
        certificate: Certificate,
        limits: ConnectionLimits,
        connection: Callable[[], BoundedConnection],
        open_connections: set[Any],
        closing_s: float,
        backlog: int,
    ) -> None:
        """closing_s: time for the client to answer the end of the TLS session."""
        self._listener, self._certificate, self._limits = listener, certificate, limits
        self._connection, self._open, self._closing_s = connection, open_connections, closing_s
        self._loop = asyncio.get_running_loop()
        self._handshakes: set[asyncio.Task[None]] = set()
        self._refused = 0  # handshakes beyond the limits
        self._retry: asyncio.TimerHandle | None = None
        listener.listen(backlog)
        listener.setblocking(False)
        self._listen()

    def close(self) -> None:
        """Accept no more connections. Handshakes continue."""
        if self._listener.fileno() >= 0:
            if self._retry is not None:
                self._retry.cancel()
            self._loop.remove_reader(self._listener)
            self._listener.close()

    async def wait_closed(self) -> None:
        """Cancel the handshakes in progress."""
        for task in self._handshakes:
            task.cancel()
        await asyncio.gather(*self._handshakes, return_exceptions=True)

    def _listen(self) -> None:
        self._retry = None
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        try:
            accepted, peer = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError:
            self._loop.remove_reader(self._listener)
            self._retry = self._loop.call_later(RETRY_S, self._listen)
            return
        accepted.setblocking(False)
        end = self._count(peer[0] if isinstance(peer, tuple) else "")
        if end is None:
            accepted.close()
            return
        task = self._loop.create_task(self._shake_hands(accepted, end))
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)

    def _count(self, address: str) -> Callable[[], None] | None:
        """Count a handshake. Returns the function that ends its count; None: close the connection at once."""
        limits = self._limits
        is_over = len(self._open) + limits.handshakes >= limits.connections or (
            limits.per_address is not None and limits.by_address[address] >= limits.per_address
        )
        if is_over and self._refused >= REFUSED_AT_ONCE:
            return None
        if is_over:
            self._refused += 1
        else:
            limits.handshakes += 1
            limits.enter(address)
        is_counted = True

        def end() -> None:
            nonlocal is_counted
            if not is_counted:
                return
            is_counted = False
            if is_over:
                self._refused -= 1
            else:
                limits.handshakes -= 1
                limits.leave(address)

        return end

    async def _shake_hands(self, accepted: socket.socket, end: Callable[[], None]) -> None:
        def connection() -> BoundedConnection:
            made = self._connection()
            made.before_made = end  # from here on it is counted as a connection
            return made

        try:
            with contextlib.suppress(OSError):  # SSLError and timeouts too: the loop has closed it
                await self._loop.connect_accepted_socket(
                    connection,
                    accepted,
                    ssl=self._certificate.context,
                    ssl_handshake_timeout=self._limits.head_s,
                    ssl_shutdown_timeout=self._closing_s,
                )
        finally:
            end()
