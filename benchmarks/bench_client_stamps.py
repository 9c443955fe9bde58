"""The load's client beside the proxy's: how late the last of N sockets that are ready together is stamped.

An engine sends the tokens of one step to all streams at once. The load's client stamps every socket before it
parses any; the proxy's client parses each socket's bytes as they come. No network: both are handed the same
chunk of an event stream.

    python benchmarks/bench_client_stamps.py [--sockets 64 256 1024] [--repeats 40] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ridgeline.lab.bench.client.client import Address, Client, _Connection
from ridgeline.lab.bench.client.streamed_answer import StreamedAnswer as ParsedStream
from ridgeline.lab.bench.config import RequestDeadlines
from ridgeline.proxy.answer import UpstreamAnswer
from ridgeline.proxy.connection import Connection
from ridgeline.proxy.origin import read_url
from ridgeline.proxy.pool import ClientLimits, ConnectionPool

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-type: text/event-stream\r\n\r\n"
EVENT = (
    b'data: {"id":"c-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,'
    b'"delta":{"content":" word"},"finish_reason":null}],'
    b'"usage":{"prompt_tokens":9,"completion_tokens":2}}\n\n'
)
CHUNK = b"%x\r\n%s\r\n" % (len(EVENT), EVENT)


class Wire(asyncio.Transport):
    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def is_closing(self) -> bool:
        return False


def proxy_connections(count: int) -> list[Connection]:
    """With a request on each, whose stream is parsed as the load's client would."""
    pool: ConnectionPool[Connection] = ConnectionPool(ClientLimits())
    origin, found = read_url("http://127.0.0.1:1"), []
    for _ in range(count):
        connection, parsed = Connection(pool, origin), ParsedStream()
        answer = UpstreamAnswer(1e6, 1e6, 1e12, False, True)
        connection.connection_made(Wire())
        connection.send(answer, b"", b"")
        connection.data_received(HEAD)
        answer._sink = lambda data, parsed=parsed: parsed.feed(time.monotonic(), data)
        found.append(connection)
    return found


def last_stamp_ms(connections: Sequence[asyncio.Protocol], repeats: int, reset: Callable[[], None]) -> float:
    """From the first socket's bytes to the end of the last `data_received`; the best of `repeats`."""
    best = float("inf")
    for _ in range(repeats):
        reset()
        begun = time.perf_counter()
        for connection in connections:
            connection.data_received(CHUNK)
        best = min(best, time.perf_counter() - begun)
    return best * 1e3


async def measured(count: int, repeats: int) -> dict[str, float]:
    client = Client(Address("localhost", "127.0.0.1", 1, None), RequestDeadlines(), lambda exchange: None)
    load = [_Connection(client) for _ in range(count)]

    def forget() -> None:
        client._ready.clear()
        for connection in load:
            connection._received.clear()

    own = last_stamp_ms(load, repeats, forget)
    forget()  # nothing is left to be parsed
    proxy = last_stamp_ms(proxy_connections(count), repeats, lambda: None)
    return {"sockets": count, "load_ms": own, "proxy_ms": proxy, "ratio": proxy / own}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--sockets", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(f"{'sockets':>8}{'load client':>14}{'proxy client':>15}{'ratio':>8}")
    rows = []
    for count in args.sockets:
        row = asyncio.run(measured(count, args.repeats))
        rows.append(row)
        print(f"{count:>8}{row['load_ms']:>11.3f} ms{row['proxy_ms']:>12.2f} ms{row['ratio']:>8.0f}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
