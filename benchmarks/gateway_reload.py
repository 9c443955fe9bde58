"""What clients notice of reloads and rolls: failures, and the longest time that one of them waits.

    python benchmarks/gateway_reload.py [--reloads 10] [--rate 50] [--streams 20] [--workers 1] [--redis URL]

A real gateway process before a mock upstream, whole requests and streams through kept-alive connections; one
reload after the other, then one roll: SIGTERM to each worker in turn. The same load without either comes
first: its stalls are those of the machine. A stall is the time of a whole request, or the longest pause of a
stream less the upstream's own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))
import httpx
from gateway import free_port, percentile, start, start_upstream, wait_for
from gateway_load import Peer, tree

from tests.gateway.steady_load import PACE_MS, Seen, steady_load

QUIET_S = 10.0  # of load without a reload
PAUSE_S = 1.0  # between two reloads
BAR_S = 0.2


class Gateway:
    def __init__(self, arguments: argparse.Namespace, stack: ExitStack, folder: Path) -> None:
        upstream = start_upstream(stack, folder)
        port, admin = free_port(), free_port()
        config = folder / "gateway.toml"
        lines = ["[gateway]", f"port = {port}", f'state_dir = "{folder / "state"}"', 'log_level = "warning"']
        lines += [f"workers = {arguments.workers}", "[admin]", f"port = {admin}"]
        if arguments.redis:
            lines += ["[redis]", f'url = "{arguments.redis}"', 'prefix = "bench-reload"']
        lines += ["[[upstreams]]", 'name = "mock"', 'kind = "ridgeline"']
        lines += [
            f'url = "http://127.0.0.1:{upstream.port}"',
            "[[models]]",
            'name = "*"',
            'targets = ["mock/*"]',
        ]
        config.write_text("\n".join(lines))
        program = Path(sys.executable).parent / "ridgeline"
        process = start(stack, [str(program), "gateway", "--config", str(config)], folder)
        wait_for(f"http://127.0.0.1:{port}/health", "none", process)
        secret = (folder / "state" / "admin-key").read_text().strip()
        self._http = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{admin}", headers={"authorization": f"Bearer {secret}"}, timeout=120
        )
        self.peer = Peer("gateway", port, "", process)

    async def make_key(self) -> None:
        made = await self._http.post("/admin/keys", json={"name": "load"})
        self.peer.key = made.json()["secret"]

    async def reload(self) -> None:
        answer = await self._http.post("/admin/reload", json={})
        assert answer.status_code == 200, answer.text

    async def roll(self) -> None:
        """SIGTERM to each worker that serves; on when another serves in its place."""
        names = (await self._workers()).keys()
        for name in sorted(name for name in names if "-" not in name):
            before = await self._pid(name)
            os.kill(before, signal.SIGTERM)
            while await self._pid(name) == before:
                await asyncio.sleep(0.05)

    async def _workers(self) -> dict[str, Any]:
        workers: dict[str, Any] = (await self._http.get("/admin/upstreams")).json()["data"]["workers"]
        return workers

    async def _pid(self, name: str) -> int:
        worker = (await self._workers()).get(name)
        return -1 if worker is None else int(worker["pid"])


def summary(seen: Seen) -> dict[str, Any]:
    gaps = [gap - PACE_MS / 1e3 for gap in seen.gaps_s]
    stalls = [*seen.latencies_s, *gaps]
    return {
        "requests": seen.requests,
        "streams": seen.streams,
        "connections_closed": seen.closes,
        "failures": len(seen.failures),
        "request_p50_ms": percentile(seen.latencies_s, 0.5) * 1e3,
        "request_p99_ms": percentile(seen.latencies_s, 0.99) * 1e3,
        "request_max_ms": max(seen.latencies_s) * 1e3,
        "stream_pause_max_ms": max(gaps, default=0.0) * 1e3,
        "longest_stall_ms": max(stalls) * 1e3,
        "first_failures": seen.failures[:5],
    }


async def measure(arguments: argparse.Namespace, gateway: Gateway) -> dict[str, Any]:
    await gateway.make_key()
    peer, results = gateway.peer, {}
    async with steady_load(peer.port, peer.key, arguments.rate, arguments.streams) as seen:
        await asyncio.sleep(QUIET_S)
    results["nothing"] = summary(seen)
    took: list[float] = []
    async with steady_load(peer.port, peer.key, arguments.rate, arguments.streams) as seen:
        await asyncio.sleep(PAUSE_S)
        for _ in range(arguments.reloads):
            began = time.perf_counter()
            await gateway.reload()
            took.append(time.perf_counter() - began)
            await asyncio.sleep(PAUSE_S)
    results[f"{arguments.reloads} reloads"] = {**summary(seen), "reload_s": took}
    async with steady_load(peer.port, peer.key, arguments.rate, arguments.streams) as seen:
        await asyncio.sleep(PAUSE_S)
        await gateway.roll()
        await asyncio.sleep(PAUSE_S)
    results["1 roll"] = summary(seen)
    assert peer.process is not None
    results["processes"] = len(tree(peer.process.pid))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--reloads", type=int, default=10)
    parser.add_argument("--rate", type=float, default=50.0, help="whole requests a second")
    parser.add_argument("--streams", type=int, default=20, help="at once")
    parser.add_argument("--workers", type=int, default=1, help="more than one need --redis")
    parser.add_argument("--redis", default="", help="URL, for limits that workers share")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gateway-reload-")))
        results = asyncio.run(measure(arguments, Gateway(arguments, stack, folder)))
    print("| during | requests | streams | failures | request p50, p99, most, ms | longest stall, ms |")
    print("|---|---|---|---|---|---|")
    for name, one in results.items():
        if isinstance(one, dict):
            times = ", ".join(f"{one[f'request_{part}_ms']:.1f}" for part in ("p50", "p99", "max"))
            cells = (one["requests"], one["streams"], one["failures"], times)
            stall = f"{one['longest_stall_ms']:.0f} (bar {BAR_S * 1e3:g})"
            print(f"| {name} | {' | '.join(map(str, cells))} | {stall} |")
            for failure in one["first_failures"]:
                print(f"  {failure}", file=sys.stderr)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
