"""What the gateway costs, beside LiteLLM's proxy and nothing: one run, same cores, upstream and client.

    python benchmarks/gateway.py [--litellm PATH] [--rounds 7] [--requests 400] [--soak 200000]

CPU time is that of the gateway's own processes, from the kernel's books: children too, so the supervisor, the
ledger's writer and the admin listener are in it. Both gateways check a key; ours also limits requests and
tokens, writes its ledger and counts its metrics. LiteLLM runs as it does by default: one worker, no database.
Latencies are paired by rounds: nothing between, ours, LiteLLM, and again. Prints tables, writes JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KEY = "sk-benchmark-0123456789"
PROMPT = "Tell me about rivers. " * 40  # about a kilobyte of body
START_S = 120.0


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
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{peer.port}\r\nauthorization: Bearer {peer.key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


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
    """So many requests by so many clients, each one after the other."""
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


# ---- those who answer ----


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def wait_for(url: str, key: str, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if process.poll() is not None:
            raise SystemExit(f"{process.args!r} ended with {process.returncode}")
        try:
            asked = urllib.request.Request(url, headers={"authorization": f"Bearer {key}"})
            with urllib.request.urlopen(asked, timeout=2):
                return
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"{url} did not answer within {START_S:g} s")


def start(stack: ExitStack, command: list[str], folder: Path, **environment: str) -> subprocess.Popen[bytes]:
    log = stack.enter_context((folder / f"{Path(command[0]).name}-{len(os.listdir(folder))}.log").open("wb"))
    process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | environment)
    stack.callback(_end, process)
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def start_upstream(stack: ExitStack, folder: Path) -> Peer:
    port = free_port()
    process = start(stack, [sys.executable, "-m", "tests.gateway.mock_upstream", "--port", str(port)], folder)
    wait_for(f"http://127.0.0.1:{port}/v1/models", "none", process)
    return Peer("upstream", port, "none", process)


def start_ours(stack: ExitStack, folder: Path, upstream: Peer) -> Peer:
    """With a key that has limits on requests, tokens, concurrency and money, none of which is reached."""
    port, admin = free_port(), free_port()
    config = folder / "gateway.toml"
    config.write_text(
        f"""
[gateway]
port = {port}
state_dir = "{folder / "state"}"
log_level = "warning"
[admin]
port = {admin}
[[upstreams]]
name = "mock"
kind = "openai"
url = "http://127.0.0.1:{upstream.port}"
[[models]]
name = "*"
targets = ["mock/*"]
price_in = 1.0
price_out = 2.0
"""
    )
    program = Path(sys.executable).parent / "ridgeline"
    process = start(stack, [str(program), "gateway", "--config", str(config)], folder)
    wait_for(f"http://127.0.0.1:{port}/health", "none", process)
    made = subprocess.run(
        [str(program), "keys", "create", "--name", "bench", "--rpm", "100000000", "--tpm", "1000000000000"]
        + ["--concurrent", "10000", "--daily-usd", "1000000", "--admin-url", f"http://127.0.0.1:{admin}"]
        + ["--admin-key-file", str(folder / "state" / "admin-key"), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    peer = Peer("ridgeline", port, json.loads(made.stdout)["secret"], process)
    time.sleep(1.0)  # until every worker knows the key
    return peer


def start_litellm(stack: ExitStack, folder: Path, upstream: Peer, program: str) -> Peer:
    port = free_port()
    config = folder / "litellm.yaml"
    names = ["mock", *STREAMS]
    models = "".join(
        f"""
  - model_name: {name}
    litellm_params: {{model: openai/{name}, api_base: "http://127.0.0.1:{upstream.port}/v1", api_key: none}}"""
        for name in names
    )
    config.write_text(f"model_list:{models}\ngeneral_settings:\n  master_key: {KEY}\n")
    command = [
        program,
        "--config",
        str(config),
        "--port",
        str(port),
        "--host",
        "127.0.0.1",
        "--num_workers",
        "1",
    ]
    process = start(stack, command, folder, LITELLM_LOG="ERROR", PYTHONPATH="")
    wait_for(f"http://127.0.0.1:{port}/health/liveliness", KEY, process)
    return Peer("litellm", port, KEY, process)


# ---- what is measured ----

SHORT, LONG = 64, 1088  # events of two streams: their difference leaves out what a request costs
STREAMS = [f"mock_out{n}{pace}" for n in (SHORT, LONG) for pace in ("", "_pace2")]


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):,.0f} ({min(values):,.0f}–{max(values):,.0f})"


async def per_request(peers: list[Peer], upstream: Peer, rounds: int, count: int) -> dict[str, Any]:
    results: dict[str, Any] = {peer.name: {} for peer in peers}
    direct: dict[str, list[float]] = {"latency": [], "first": []}
    for number in range(rounds + 1):
        whole = await load(upstream, request_bytes(upstream, "mock"), count, 1)
        streamed = await load(upstream, request_bytes(upstream, f"mock_out{SHORT}", True), count // 2, 1)
        base, base_first = statistics.median(whole.seconds), statistics.median(streamed.first_s)
        base99 = percentile(whole.seconds, 0.99)
        if number:
            direct["latency"].append(base * 1e6)
            direct["first"].append(base_first * 1e6)
        for peer in peers:
            share = 1 if peer.name == "ridgeline" else 4
            one = await load(peer, request_bytes(peer, "mock"), max(count // share, 50), 1)
            many = await load(peer, request_bytes(peer, "mock"), max(2 * count // share, 100), 16)
            first = await load(
                peer, request_bytes(peer, f"mock_out{SHORT}", True), max(count // 2 // share, 25), 1
            )
            if number == 0:
                continue  # the first round warms everything
            figures = {
                "added_p50_us": (statistics.median(one.seconds) - base) * 1e6,
                "added_p99_us": (percentile(one.seconds, 0.99) - base99) * 1e6,
                "cpu_us_c1": one.cpu_s / len(one.seconds) * 1e6,
                "cpu_us_c16": many.cpu_s / len(many.seconds) * 1e6,
                "rps_c16": len(many.seconds) / many.wall_s,
                "added_ttft_us": (statistics.median(first.first_s) - base_first) * 1e6,
            }
            for name, value in figures.items():
                results[peer.name].setdefault(name, []).append(value)
    return {"direct": direct, **results}


async def per_event(peers: list[Peer], rounds: int) -> dict[str, Any]:
    """CPU of an event more: two lengths of stream, all at once and 2 ms apart, 8 streams at a time."""
    results: dict[str, Any] = {peer.name: {} for peer in peers}
    for number in range(rounds + 1):
        for peer in peers:
            for name, suffix, count in (("burst", "", 16), ("paced", "_pace2", 8)):
                samples = []
                for length in (SHORT, LONG):
                    model = f"mock_out{length}{suffix}"
                    samples.append(await load(peer, request_bytes(peer, model, True), count, 8))
                short, long = samples
                cost = (long.cpu_s - short.cpu_s) / (long.events - short.events) * 1e6
                if number:
                    results[peer.name].setdefault(name, []).append(cost)
    return results


async def soak(peer: Peer, count: int, report: Callable[[int, float], None]) -> dict[str, Any]:
    """Memory after each fiftieth of many requests; the slope over the second half."""
    points: list[tuple[int, float]] = []
    request = request_bytes(peer, "mock")
    step = max(count // 50, 1)
    for done in range(step, count + 1, step):
        await load(peer, request, step, 16)
        points.append((done, peer.rss_mib()))
        report(*points[-1])
    late = points[len(points) // 2 :]
    slope, _ = statistics.linear_regression([n for n, _ in late], [mib for _, mib in late])
    return {"points": points, "mib_per_100k": slope * 100_000}


def table(results: dict[str, Any]) -> str:
    rows = [
        ("CPU a request, 1 at a time, µs", "cpu_us_c1"),
        ("CPU a request, 16 at a time, µs", "cpu_us_c16"),
        ("added latency p50, µs", "added_p50_us"),
        ("added latency p99, µs", "added_p99_us"),
        ("added time to first byte p50, µs", "added_ttft_us"),
        ("requests/s, 16 at a time", "rps_c16"),
        ("CPU an event, streams at full speed, µs", "burst"),
        ("CPU an event, events 2 ms apart, µs", "paced"),
    ]
    names = [name for name in ("ridgeline", "litellm") if name in results]
    lines = ["| | " + " | ".join(names) + (" | ratio |" if len(names) > 1 else " |")]
    lines.append("|---|" + "---|" * (len(names) + (len(names) > 1)))
    for label, key in rows:
        cells = [spread(results[name][key]) for name in names]
        if len(names) > 1:
            ours, theirs = (statistics.median(results[name][key]) for name in names)
            cells.append(f"{theirs / ours:.1f}×")
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--litellm", help="path of the program `litellm` in an environment of its own")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=400, help="of each kind in a round")
    parser.add_argument("--soak", type=int, default=0, help="requests over which memory is watched")
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gateway-bench-")))
        upstream = start_upstream(stack, folder)
        peers = [start_ours(stack, folder, upstream)]
        if arguments.litellm:
            peers.append(start_litellm(stack, folder, upstream, arguments.litellm))
        results = asyncio.run(per_request(peers, upstream, arguments.rounds, arguments.requests))
        for name, figures in asyncio.run(per_event(peers, max(arguments.rounds // 2, 1))).items():
            results[name] |= figures
        print(
            f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores; Python {platform.python_version()}"
        )
        print(
            f"nothing between: {spread(results['direct']['latency'])} µs, first byte {spread(results['direct']['first'])} µs"
        )
        print(f"medians over {arguments.rounds} rounds (least–most)\n")
        print(table(results))
        for peer in peers:
            results[peer.name]["rss_mib"] = peer.rss_mib()
            print(f"memory of {peer.name}, all its processes: {peer.rss_mib():.0f} MiB")
        if arguments.soak:
            print(f"\nmemory over {arguments.soak:,} requests")
            told = lambda done, mib: print(f"  {done:>9,}  {mib:7.1f} MiB", flush=True)  # noqa: E731
            results["soak"] = asyncio.run(soak(peers[0], arguments.soak, told))
            print(
                f"slope over the second half: {results['soak']['mib_per_100k']:+.2f} MiB per 100,000 requests"
            )
        if arguments.out:
            arguments.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
