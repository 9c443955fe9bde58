"""The cost of a batch for others: time to first token of interactive requests, with a batch and without.

A real `ridgeline serve`; interactive requests come at random (Poisson), streamed, each with a prompt of its
own. The same arrivals are played alone and beside a batch, in turn, round after round; the ratio of the two
is the claim (p99 within 1.3). Machines are noisy: one round says little, all rounds together say it.

    python benchmarks/batch_interference.py [MODEL] [--rate 3] [--seconds 30] [--rounds 4] [--json FILE]
    python benchmarks/batch_interference.py --whole [--lines 10000]     a whole batch to its end
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

CHAT = "/v1/chat/completions"
ALLOWED = 1.3
START_S = 120
WORDS = """river mountain engine harbour winter letter garden window market island copper silver bridge forest
lantern thunder meadow pepper castle violin feather compass orchard marble anchor velvet""".split()  # noqa: SIM905


@dataclass(slots=True)
class Arm:
    """Interactive requests of one kind of round."""

    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    failed: int = 0


class Server:
    def __init__(self, model: str, flags: list[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._folder = tempfile.TemporaryDirectory(prefix="ridgeline-bench-")
        command = [sys.executable, "-m", "ridgeline.cli.main", "serve", model, "--port", str(self.port)]
        command += ["--state-dir", f"{self._folder.name}/state", "--log-level", "error", *flags]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        self._await_ready()

    def _await_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            try:
                self.get("/ready")
                return
            except OSError:
                time.sleep(0.2)
        raise SystemExit(f"the server was not ready in {START_S} s")

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as answer:
            body = answer.read()
        return json.loads(body) if answer.headers.get_content_type() == "application/json" else body

    def post(self, path: str, body: bytes, kind: str = "application/json") -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data=body, headers={"content-type": kind}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)

    def batch(self, lines: int, max_tokens: int, seed: int) -> str:
        """A batch of that many lines, begun."""
        content = b"".join(line(i, max_tokens, seed) for i in range(lines))
        parts = [
            b'--B\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n',
            b'--B\r\ncontent-disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n',
            content,
            b"\r\n--B--\r\n",
        ]
        file = self.post("/v1/files", b"".join(parts), "multipart/form-data; boundary=B")
        body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
        batch_id: str = self.post("/v1/batches", json.dumps(body).encode())["id"]
        while self.show(batch_id)["status"] == "validating":
            time.sleep(0.05)
        return batch_id

    def show(self, batch_id: str) -> Any:
        return self.get(f"/v1/batches/{batch_id}")

    def cancel(self, batch_id: str) -> None:
        self.post(f"/v1/batches/{batch_id}/cancel", b"")
        while self.show(batch_id)["status"] not in ("cancelled", "completed"):
            time.sleep(0.05)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)
        self._folder.cleanup()


def line(number: int, max_tokens: int, seed: int) -> bytes:
    dice = random.Random(f"{seed}/{number}")
    question = " ".join(dice.choices(WORDS, k=dice.randint(5, 60)))
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": max_tokens, "ignore_eos": True}
    return (
        json.dumps({"custom_id": f"c{number}", "method": "POST", "url": CHAT, "body": body}).encode() + b"\n"
    )


def done(batch: dict[str, Any]) -> int:
    return int(batch["request_counts"]["completed"] + batch["request_counts"]["failed"])


# ---- interactive traffic ----


async def traffic(port: int, rate: float, seconds: float, seed: int, arm: Arm, max_tokens: int) -> None:
    """Requests at random moments, whether or not those before are answered."""
    dice = random.Random(seed)
    asked, begun, at = [], time.monotonic(), 0.0
    while (at := at + dice.expovariate(rate)) < seconds:
        prompt = " ".join(dice.choices(WORDS, k=dice.randint(20, 200)))
        await asyncio.sleep(max(0.0, begun + at - time.monotonic()))
        asked.append(asyncio.create_task(ask(port, prompt, max_tokens, arm)))
    await asyncio.gather(*asked)


async def ask(port: int, prompt: str, max_tokens: int, arm: Arm) -> None:
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    started = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    first = last = None
    events = 0
    async for raw in reader:
        if raw.startswith(b"data: {") and b'"content":"' in raw and b'"content":""' not in raw:
            last = time.monotonic()
            first = first or last
            events += 1
    writer.close()
    if first is None or last is None:
        arm.failed += 1
        return
    arm.ttft_s.append(first - started)
    if events > 1:
        arm.tpot_s.append((last - first) / (events - 1))


# ---- what is claimed ----


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def figures(arm: Arm) -> dict[str, float]:
    return {
        "requests": len(arm.ttft_s),
        "failed": arm.failed,
        "ttft_p50_ms": 1e3 * statistics.median(arm.ttft_s),
        "ttft_p99_ms": 1e3 * quantile(arm.ttft_s, 0.99),
        "tpot_p50_ms": 1e3 * statistics.median(arm.tpot_s) if arm.tpot_s else 0.0,
    }


def show(alone: Arm, beside: Arm, batch: dict[str, float]) -> dict[str, Any]:
    rows = {"alone": figures(alone), "beside a batch": figures(beside)}
    names = list(rows["alone"])
    print(f"\n{'':16}" + "".join(f"{name:>14}" for name in names))
    for name, row in rows.items():
        print(f"{name:16}" + "".join(f"{row[key]:14.1f}" for key in names))
    ratios = {
        key: rows["beside a batch"][key] / rows["alone"][key] for key in names[2:] if rows["alone"][key]
    }
    print(f"{'ratio':16}" + " " * 28 + "".join(f"{ratios.get(key, 0):14.2f}" for key in names[2:]))
    print(" · ".join(f"{key} {value:.1f}" for key, value in batch.items()))
    verdict = "within" if ratios["ttft_p99_ms"] <= ALLOWED else "NOT within"
    print(f"p99 TTFT beside a batch: {ratios['ttft_p99_ms']:.2f} times alone, {verdict} {ALLOWED}")
    return {"arms": rows, "ratios": ratios, "batch": batch}


def in_turn(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    """Rounds alone and beside a batch, the same arrivals in both of a pair, the order turned each time."""
    alone, beside, answered, spent_s = Arm(), Arm(), 0, 0.0
    for number in range(args.rounds):
        for with_batch in (False, True) if number % 2 == 0 else (True, False):
            arm = beside if with_batch else alone
            batch_id = server.batch(args.lines, args.batch_tokens, number) if with_batch else None
            before = done(server.show(batch_id)) if batch_id else 0
            begun = time.monotonic()
            asyncio.run(traffic(server.port, args.rate, args.seconds, number, arm, args.max_tokens))
            if batch_id:
                answered += done(server.show(batch_id)) - before
                spent_s += time.monotonic() - begun
                server.cancel(batch_id)
            print(
                f"round {number + 1} {'beside' if with_batch else 'alone '}: {figures_line(arm)}", flush=True
            )
    return show(alone, beside, {"batch lines/s": answered / spent_s, "lines answered": answered})


def figures_line(arm: Arm) -> str:
    middle, tail = statistics.median(arm.ttft_s), quantile(arm.ttft_s, 0.99)
    return f"so far p50 {1e3 * middle:.0f} ms, p99 {1e3 * tail:.0f} ms"


def whole(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    """One batch from its beginning to its end, traffic beside it all the time; alone before and after."""
    alone, beside = Arm(), Arm()
    asyncio.run(traffic(server.port, args.rate, args.seconds, 0, alone, args.max_tokens))
    begun, number = time.monotonic(), 1
    batch_id = server.batch(args.lines, args.batch_tokens, 0)
    while server.show(batch_id)["status"] != "completed":
        asyncio.run(traffic(server.port, args.rate, 15.0, number, beside, args.max_tokens))
        number += 1
        print(f"{done(server.show(batch_id))} of {args.lines} lines, {figures_line(beside)}", flush=True)
    took_s = time.monotonic() - begun
    asyncio.run(traffic(server.port, args.rate, args.seconds, 999, alone, args.max_tokens))
    batch = server.show(batch_id)
    ids = [
        json.loads(raw)["custom_id"]
        for raw in server.get(f"/v1/files/{batch['output_file_id']}/content").splitlines()
    ]
    assert sorted(ids) == sorted(f"c{i}" for i in range(args.lines)), "lines are missing or there twice"
    return show(
        alone, beside, {"batch lines": len(ids), "in seconds": took_s, "batch lines/s": len(ids) / took_s}
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--rate", type=float, default=3.0, help="interactive requests a second")
    parser.add_argument("--seconds", type=float, default=30.0, help="of a round")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=16, help="of an interactive answer")
    parser.add_argument("--lines", type=int, default=10_000, help="of a batch")
    parser.add_argument("--batch-tokens", type=int, default=4, help="of a batch's answer")
    parser.add_argument("--whole", action="store_true", help="one batch to its end")
    parser.add_argument("--json", type=Path, help="write the figures there")
    args, flags = parser.parse_known_args()
    server = Server(args.model, flags)
    try:
        asyncio.run(traffic(server.port, args.rate, 3.0, 12345, Arm(), args.max_tokens))  # warm
        result = whole(server, args) if args.whole else in_turn(server, args)
    finally:
        server.stop()
    result |= {
        "machine": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg(),
    }
    result["settings"] = {key: str(value) for key, value in vars(args).items()}
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
