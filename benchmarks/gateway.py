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
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from gateway_load import Peer, load, request_bytes

KEY = "sk-benchmark-0123456789"
START_S = 120.0


# ---- upstream and gateways ----


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
    table = f'kind = "openai"\nurl = "http://127.0.0.1:{upstream.port}"'
    limits = "--rpm 100000000 --tpm 1000000000000 --concurrent 10000 --daily-usd 1000000"
    peer = start_gateway(stack, folder, "ridgeline", table, limits.split())
    time.sleep(1.0)  # until every worker knows the key
    return peer


def start_gateway(
    stack: ExitStack, folder: Path, name: str, upstream: str, limits: Sequence[str] = ()
) -> Peer:
    """A gateway with one upstream, given by the keys of its table, and a key with these limits."""
    port, admin = free_port(), free_port()
    home = folder / name
    home.mkdir()
    config = home / "gateway.toml"
    config.write_text(
        f"""
[gateway]
port = {port}
state_dir = "{home / "state"}"
log_level = "warning"
[admin]
port = {admin}
[[upstreams]]
name = "up"
{upstream}
[[models]]
name = "*"
targets = ["up/*"]
price_in = 1.0
price_out = 2.0
"""
    )
    program = Path(sys.executable).parent / "ridgeline"
    process = start(stack, [str(program), "gateway", "--config", str(config)], folder)
    wait_for(f"http://127.0.0.1:{port}/health", "none", process)
    where = ["--admin-url", f"http://127.0.0.1:{admin}", "--admin-key-file", str(home / "state/admin-key")]
    command = [str(program), "keys", "create", "--name", "bench", *limits, *where, "--json"]
    made = subprocess.run(command, capture_output=True, text=True, check=True)
    return Peer(name, port, json.loads(made.stdout)["secret"], process)


def start_litellm(stack: ExitStack, folder: Path, upstream: Peer, program: str) -> Peer:
    port = free_port()
    config = folder / "litellm.yaml"
    base = f"http://127.0.0.1:{upstream.port}/v1"
    models = "".join(
        f"""
  - model_name: {name}
    litellm_params: {{model: openai/{name}, api_base: "{base}", api_key: none}}"""
        for name in ("mock", *STREAMS)
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
    digits = 2 if statistics.median(values) < 10 else 0
    middle, least, most = (
        f"{one:,.{digits}f}" for one in (statistics.median(values), min(values), max(values))
    )
    return f"{middle} ({least}–{most})"


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


def bare_relay_us(count: int = 20_000) -> float:
    """What the kernel takes for an event that comes alone: wait, read and write, and nothing else."""
    pairs = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as server:
            near = socket.create_connection(server.getsockname())
            pairs.append((near, server.accept()[0]))
    (source, read_end), (write_end, sink) = pairs
    event, selector = b"x" * 160, selectors.DefaultSelector()
    selector.register(read_end, selectors.EVENT_READ)
    spent = 0.0
    for _ in range(count):
        source.send(event)
        began = time.thread_time()
        selector.select()
        write_end.send(read_end.recv(1 << 16))
        spent += time.thread_time() - began
        sink.recv(1 << 16)
    for one in (*pairs[0], *pairs[1]):
        one.close()
    return spent / count * 1e6


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
            cells.append(f"{ours / theirs if key == 'rps_c16' else theirs / ours:.1f}×")
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--litellm", help="path of the program `litellm` in its own environment")
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
        results["floor_us"] = bare_relay_us()
        for name, figures in asyncio.run(per_event(peers, max(arguments.rounds // 2, 1))).items():
            results[name] |= figures
        print(f"{platform.machine()}, {os.cpu_count()} cores; Python {platform.python_version()}")
        direct = results["direct"]
        print(f"nothing between: {spread(direct['latency'])} µs, first byte {spread(direct['first'])} µs")
        print(f"limit of an event alone: {results['floor_us']:.1f} µs, to read it from a socket and write it")
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
