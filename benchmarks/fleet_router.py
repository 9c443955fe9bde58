"""CPU per request that a fleet upstream adds to the gateway's plain ridgeline upstream: one run, interleaved.

    python benchmarks/fleet_router.py [--rounds 7] [--requests 400]

Two gateways stand before the same mock server: one names it as an upstream of kind ridgeline, the other as
the only replica of a fleet, whose controller's socket this script serves. The fleet's streams have a real
replica's markers: the gateway reads, keeps and removes them. The 64 tokens of a stream come in one write, or
in 64. CPU time is that of the gateway's processes, from the kernel's books. Bar: 0.35 ms added. Prints a
table, writes JSON with --json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
from gateway import spread, start_gateway, start_upstream
from gateway_load import Peer, load, request_bytes

from ridgeline.fleet.messages import ModelEntry, ReplicaEntry
from tests.fleet.router.controller_socket import ControllerSocket

BAR_MS = 0.35
KINDS = {
    "whole": ("mock", False),
    "stream of 64": ("mock_out64", True),
    "stream of 64 writes": ("mock_out64_pace2", True),
}


async def measure(peers: list[Peer], rounds: int, count: int) -> dict[str, dict[str, list[float]]]:
    """CPU in ms per request, whole and streamed, of each peer in turn."""
    found: dict[str, dict[str, list[float]]] = {peer.name: {} for peer in peers}
    for number in range(rounds + 1):
        for peer in peers if number % 2 else reversed(peers):
            for kind, (model, stream) in KINDS.items():
                sample = await load(peer, request_bytes(peer, model, stream), count, 8)
                if number:  # the first round warms everything
                    figures = found[peer.name].setdefault(kind, [])
                    figures.append(sample.cpu_s / len(sample.seconds) * 1e3)
    return found


async def run(arguments: argparse.Namespace) -> None:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        upstream = await asyncio.to_thread(start_upstream, stack, folder)
        url = f"http://127.0.0.1:{upstream.port}"
        model = ModelEntry("mock", aliases=("mock_out64", "mock_out64_pace2"))
        controller = await ControllerSocket(folder / "controller.sock", model).start()
        controller.set(ReplicaEntry("mock-0", "mock", url, "ready", "", "v1"))
        tables = {
            "ridgeline": f'probe_s = 0\nkind = "ridgeline"\nurl = "{url}"',
            "fleet": f'probe_s = 0\nkind = "fleet"\ncontrol = "{controller.path}"',
        }
        peers = [
            await asyncio.to_thread(start_gateway, stack, folder, name, table)
            for name, table in tables.items()
        ]
        await asyncio.sleep(1.5)  # until every worker knows its key and its table
        found = await measure(peers, arguments.rounds, arguments.requests)
        await controller.stop()
    report: dict[str, object] = {"cpu_ms": found, "added_ms": {}, "bar_ms": BAR_MS}
    print(f"{'CPU per request, ms':<22}{'ridgeline':>22}{'fleet':>22}{'added':>22}")
    for kind in found["fleet"]:
        plain, fleet = found["ridgeline"][kind], found["fleet"][kind]
        added = [one - other for one, other in zip(fleet, plain, strict=True)]
        report["added_ms"][kind] = statistics.median(added)  # type: ignore[index]
        print(f"{kind:<22}{spread(plain):>22}{spread(fleet):>22}{spread(added):>22}")
    print(f"bar: {BAR_MS} ms added")
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--json", type=Path)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
