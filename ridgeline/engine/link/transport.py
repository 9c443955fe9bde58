"""The engine's end of the local socket: sends frames at once; a thread reads incoming frames into a queue.

The engine loop never waits for a client: the thread later writes what the kernel does not accept at once, and
a slow client only grows its own buffer. Connections are numbered; `arrivals` reports closed ones too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ridgeline.engine.link.messages import (
    FRAME_HEADER,
    MAX_FRAME_BYTES,
    Beat,
    Beating,
    ToEngine,
    ToFront,
    decode_to_engine,
    frame,
)

log = logging.getLogger(__name__)

ACCEPT_PAUSE_S = 0.5  # after a failed accept(): causes such as too many open files rarely go away at once


@dataclass(frozen=True)
class Opened:
    """A client connected."""


@dataclass(frozen=True)
class Closed:
    """A client disconnected; its requests are aborted."""


@dataclass(frozen=True)
class Woken:
    """Wakes the loop because something inside the engine is ready. Not a message."""


Arrival = tuple[int, ToEngine | Opened | Closed | Woken]


@dataclass
class _Connection:
    socket: socket.socket
    received: bytearray = field(default_factory=bytearray)
    to_send: bytearray = field(default_factory=bytearray)


class EngineSocket:
    """Listens on a Unix socket. `arrivals` yields (connection number, message).

    The thread answers a Beat itself: it also runs while the loop is in a step.
    """

    def __init__(self, path: Path) -> None:
        self.step_began = 0.0  # monotonic; set by the loop; 0: no step is under way
        self.arrivals: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        os.chmod(path, 0o600)
        self._listener.listen()
        self._listener.setblocking(False)
        self._connections: dict[int, _Connection] = {}
        self._next_number = 0
        self._lock = threading.Lock()  # guards to_send buffers: the loop appends, the thread writes
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, "listener")
        self._accept_again_at: float | None = None  # monotonic; None: the listener is watched
        self._selector.register(self._wake_read, selectors.EVENT_READ, "wake")
        threading.Thread(target=self._run, name="engine-socket", daemon=True).start()

    def arrived(self, timeout_s: float | None) -> Iterator[Arrival]:
        """Everything that has arrived. Waits up to `timeout_s` for the first; None: does not wait."""
        try:
            if timeout_s is not None:
                yield self.arrivals.get(timeout=timeout_s)
            while True:
                yield self.arrivals.get_nowait()
        except queue.Empty:
            return

    def send(self, number: int, message: ToFront) -> None:
        """Write a message to the socket, or queue what the kernel does not accept at once.

        Dropped silently if the client has disconnected (Closed has arrived by then).
        """
        data = frame(message)
        with self._lock:
            connection = self._connections.get(number)
            if connection is None:
                return
            if connection.to_send:  # the thread is writing, and the order must be kept
                connection.to_send += data
                return
            # Not in the thread: waking it costs more than the write itself.
            try:
                sent = connection.socket.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:
                return  # disconnected: the thread reads that and reports it
            if sent == len(data):
                return
            connection.to_send += data[sent:]
        os.write(self._wake_write, b"w")

    def flush(self, timeout_s: float) -> None:
        """Wait until everything queued was written, at most `timeout_s`."""
        pause = threading.Event()
        for _ in range(int(timeout_s / 0.005)):
            with self._lock:
                if not any(connection.to_send for connection in self._connections.values()):
                    return
            pause.wait(0.005)

    # ---- the thread ----

    def _run(self) -> None:
        while True:
            self._watch_writable()
            for key, events in self._selector.select(self._watch_listener()):
                if key.data == "listener":
                    self._accept()
                elif key.data == "wake":
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
                else:
                    self._serve(key.data, events)

    def _watch_writable(self) -> None:
        """Watch for writability only where data is queued."""
        for number, connection in self._connections.items():
            with self._lock:
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.to_send else 0)
            if self._selector.get_key(connection.socket).events != wanted:
                self._selector.modify(connection.socket, wanted, number)

    def _watch_listener(self) -> float | None:
        """Watch the listener again once its pause is over. Returns the seconds left of the pause."""
        if self._accept_again_at is None:
            return None
        left_s = self._accept_again_at - time.monotonic()
        if left_s > 0:
            return left_s
        self._accept_again_at = None
        self._selector.register(self._listener, selectors.EVENT_READ, "listener")
        return None

    def _accept(self) -> None:
        number = self._next_number
        try:
            connected, _ = self._listener.accept()
            connected.setblocking(False)
            self._selector.register(connected, selectors.EVENT_READ, number)
        except OSError as error:  # EMFILE, ENFILE, ENOMEM, or a client that left the backlog
            log.error("cannot accept a connection: %s; retrying in %.1f s", error, ACCEPT_PAUSE_S)
            # The client stays in the backlog and the listener readable: watching it would spin.
            self._selector.unregister(self._listener)
            self._accept_again_at = time.monotonic() + ACCEPT_PAUSE_S
            return
        self._next_number += 1
        with self._lock:
            self._connections[number] = _Connection(connected)
        self.arrivals.put((number, Opened()))

    def _serve(self, number: int, events: int) -> None:
        connection = self._connections[number]
        try:
            if events & selectors.EVENT_WRITE:
                with self._lock:
                    sent = connection.socket.send(connection.to_send)
                    del connection.to_send[:sent]
            if events & selectors.EVENT_READ:
                data = connection.socket.recv(1 << 18)
                if not data:
                    raise ConnectionError("closed by the client")
                connection.received += data
                self._deliver(number, connection.received)
        except BlockingIOError:
            pass
        # Disconnected, or sent an invalid message; the thread continues for the others.
        except Exception as error:
            log.info("dropped connection %d: %s", number, error)
            self._drop(number)

    def _deliver(self, number: int, received: bytearray) -> None:
        while len(received) >= FRAME_HEADER.size:
            (size,) = FRAME_HEADER.unpack_from(received)
            if size > MAX_FRAME_BYTES:
                raise ValueError(f"frame of {size} bytes")
            end = FRAME_HEADER.size + size
            if len(received) < end:
                return
            body = bytes(received[FRAME_HEADER.size : end])
            del received[:end]
            message = decode_to_engine(body)
            if isinstance(message, Beat):
                began = self.step_began
                self.send(number, Beating(message.id, time.monotonic() - began if began else 0.0))
            else:
                self.arrivals.put((number, message))

    def _drop(self, number: int) -> None:
        with self._lock:
            connection = self._connections.pop(number)
        self._selector.unregister(connection.socket)
        connection.socket.close()
        self.arrivals.put((number, Closed()))
