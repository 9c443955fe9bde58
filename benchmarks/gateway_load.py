"""A gateway measurement's two sides: a peer's CPU time and memory, read from the kernel, and a lean client.

Shared by the gateway's benchmarks. The client prepares its bytes once, and reads of an answer only where it
begins and ends: it must not be what is measured.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROMPT = "Tell me about rivers. " * 40  # about a kilobyte of body


@dataclass
class Peer:
    """Something that answers: a gateway, or the upstream itself."""

    name: str
    port: int
    key: str
    process: subprocess.Popen[bytes] | None = None

    def cpu_s(self) -> float:
        """Of the process and all below it."""
        assert self.process is not None
        return sum(_cpu_ns(pid) for pid in tree(self.process.pid)) / 1e9

    def rss_mib(self) -> float:
        assert self.process is not None
        return sum(_rss_kib(pid) for pid in tree(self.process.pid)) / 1024


def tree(pid: int) -> list[int]:
    found = [pid]
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [child for text in path.read_text().split() for child in tree(int(text))]
    return found


def _cpu_ns(pid: int) -> int:
    """Of its living threads; a tick of /proc/PID/stat is as long as twenty requests."""
    paths = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(path.read_text().split()[0]) for path in paths)


def _rss_kib(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    return 0


# ---- the client ----


class Connection(asyncio.Protocol):
    """Sends prepared bytes, tells of the first byte of the body's first event and of the end."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._data = bytearray()
        self._done: asyncio.Future[tuple[float, int]] | None = None
        self._first = 0.0
        self._events = 0
        self._left: int | None = None  # bytes of body still to come; None: not known yet; -1: chunked

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def connection_lost(self, error: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionError("closed before the answer was whole"))

    def ask(self, request: bytes) -> asyncio.Future[tuple[float, int]]:
        """When the first byte of the body came, and how many events."""
        assert self._transport is not None
        self._data.clear()
        self._first, self._events, self._left = 0.0, 0, None
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._done

    def data_received(self, data: bytes) -> None:
        if self._left is None:
            self._data += data
            end = self._data.find(b"\r\n\r\n")
            if end < 0:
                return
            head, data = bytes(self._data[:end]).lower(), bytes(self._data[end + 4 :])
            if not head.startswith(b"http/1.1 200"):
                assert self._done is not None
                self._done.set_exception(RuntimeError(bytes(self._data[:600]).decode("latin-1")))
                return
            at = head.find(b"content-length:")
            self._left = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else -1
            self._data.clear()
        if data and not self._first:
            self._first = time.perf_counter()
        if self._left == -1:
            self._events += data.count(b"data: ")
            self._data += data[-8:]
            if self._data.endswith(b"0\r\n\r\n"):
                self._end()
            del self._data[:-8]
        else:
            self._left -= len(data)  # type: ignore[operator]
            if self._left == 0:
                self._end()

    def _end(self) -> None:
        assert self._done is not None
        self._done.set_result((self._first, self._events))


def request_bytes(peer: Peer, model: str, stream: bool = False) -> bytes:
    body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": PROMPT}]}
    if stream:
        body |= {"stream": True}
    data = json.dumps(body).encode()
    lines = [
        "POST /v1/chat/completions HTTP/1.1",
        f"host: 127.0.0.1:{peer.port}",
        f"authorization: Bearer {peer.key}",
        "content-type: application/json",
        f"content-length: {len(data)}",
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


async def connect(peer: Peer) -> Connection:
    _, connection = await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", peer.port)
    return connection


@dataclass
class Sample:
    seconds: list[float] = field(default_factory=list)  # whole answers
    first_s: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    events: int = 0
    wall_s: float = 0.0


async def load(peer: Peer, request: bytes, count: int, concurrency: int) -> Sample:
    """`count` requests by `concurrency` clients; each client sends one after the other."""
    sample = Sample()
    connections = [await connect(peer) for _ in range(concurrency)]
    left = iter(range(count))

    async def one(connection: Connection) -> None:
        for _ in left:
            began = time.perf_counter()
            first, events = await connection.ask(request)
            sample.seconds.append(time.perf_counter() - began)
            sample.first_s.append(first - began)
            sample.events += events

    # Warm: connections of the gateway's own too.
    await asyncio.gather(*(connection.ask(request_bytes(peer, "mock")) for connection in connections))
    cpu = peer.cpu_s() if peer.process is not None else 0.0
    began = time.perf_counter()
    await asyncio.gather(*(one(connection) for connection in connections))
    sample.wall_s = time.perf_counter() - began
    if peer.process is not None:
        await asyncio.sleep(0.6)  # the ledger's rows are on their way: theirs is part of the cost
        sample.cpu_s = peer.cpu_s() - cpu
    for connection in connections:
        connection._transport.close()  # type: ignore[union-attr]
    return sample
