"""How long after a client has gone its upstream is free: streams and whole answers.

    python benchmarks/gateway_abort.py [--aborts 300] [--json FILE]

A real gateway process; the upstream lives in this process, so that both moments are read off one clock: the
client's socket is closed, the upstream's connection is lost. Beside it, the same without a gateway between.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))
from gateway import percentile, start_ours
from gateway_load import Peer, request_bytes

from tests.gateway.mock_upstream import MockUpstream

STREAM, WHOLE = "mock_out100000_pace5", "mock_late60000"
POLL_S = 0.0002


async def freed_s(mock: MockUpstream, peer: Peer, model: str, stream: bool) -> float:
    """From the client's close to the end of the work upstream."""
    reader, writer = await asyncio.open_connection("127.0.0.1", peer.port)
    writer.write(request_bytes(peer, model, stream))
    while mock.running == 0:
        await asyncio.sleep(POLL_S)
    if stream:
        await reader.readuntil(b"river")
    left = time.perf_counter()
    writer.transport.abort()
    while mock.running:
        await asyncio.sleep(POLL_S)
    return time.perf_counter() - left


async def measure(arguments: argparse.Namespace, stack: ExitStack, folder: Path) -> dict[str, Any]:
    mock = await MockUpstream().start()
    upstream = Peer("upstream", mock.port, "none")
    # Started in a thread: it waits for the gateway, and the upstream must answer meanwhile.
    ours = await asyncio.to_thread(start_ours, stack, folder, upstream)
    results: dict[str, Any] = {}
    for name, model, stream in (("streamed", STREAM, True), ("whole", WHOLE, False)):
        for peer in (upstream, ours):
            taken = [await freed_s(mock, peer, model, stream) for _ in range(arguments.aborts)]
            results[f"{name}, {'nothing between' if peer is upstream else 'gateway'}"] = {
                "p50_ms": percentile(taken, 0.5) * 1e3,
                "p99_ms": percentile(taken, 0.99) * 1e3,
                "max_ms": max(taken) * 1e3,
            }
    await mock.stop()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--aborts", type=int, default=300, help="of each kind")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gateway-abort-")))
        results = asyncio.run(measure(arguments, stack, folder))
    print("| client gone → upstream free, ms | p50 | p99 | most |\n|---|---|---|---|")
    for name, one in results.items():
        print(f"| {name} | {one['p50_ms']:.2f} | {one['p99_ms']:.2f} | {one['max_ms']:.2f} |")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
