"""The CPU engine, measured: prefill, decode at batch 1, 8 and 32, and a server under 16 concurrent streams.

Every figure stands beside its limit (bytes over measured read bandwidth, FLOPs over the measured matmul
rate, whichever is slower). Cases are interleaved within one run, medians and spreads reported; the machine's
noise is in the spread. Prints a table and writes JSON.

    python benchmarks/engine_cpu.py [--model smollm2-135m] [--repeats 5] [--json out.json] [--no-server]
    python benchmarks/engine_cpu.py --model qwen2.5-coder-1.5b      # weights that no cache holds: DRAM-bound
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
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

sys.path.insert(0, str(Path(__file__).parent))

import httpx
from ready import await_ready
from rich.console import Console
from rich.table import Table

from ridgeline import LLM, SamplingParams, __version__

PROMPT_TOKENS = 512
DECODE_PROMPT_TOKENS = 128
DECODE_TOKENS = 48
DECODE_CONTEXT = DECODE_PROMPT_TOKENS + DECODE_TOKENS // 2
BATCHES = (1, 8, 32)
STREAMS = 16
ANSWER_TOKENS = 48
SYSTEM_TOKENS = 300
QUESTION_TOKENS = 30  # about: the question and the template around it


@dataclass
class Figure:
    """One measured quantity: repeats, and the limit it cannot exceed."""

    name: str
    unit: str
    limit: float | None = None
    values: list[float] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        median = statistics.median(self.values)
        return {
            "name": self.name,
            "unit": self.unit,
            "median": median,
            "min": min(self.values),
            "max": max(self.values),
            "repeats": len(self.values),
            "limit": self.limit,
            "percent_of_limit": None if self.limit is None else 100 * median / self.limit,
        }


# ---- the engine in this process ----


def measure_engine(
    model: str, repeats: int, threads: int | None
) -> tuple[list[Figure], str, dict[str, float], float]:
    """The figures, what computed them, the limits they stand beside, and the limit of the server's output."""
    llm = LLM(model, prefix_cache=False, threads=threads, kv_tokens=16_384)
    limits = llm.engine.limits
    rng = random.Random(0)
    prefill = Figure(f"prefill, {PROMPT_TOKENS} tokens", "tok/s", prefill_limit(llm))
    decodes = {
        batch: Figure(f"decode, batch {batch}", "tok/s", decode_limit(llm, batch, DECODE_CONTEXT))
        for batch in BATCHES
    }
    for _ in range(repeats):
        prefill.values.append(prefill_rate(llm, rng))
        for batch, figure in decodes.items():
            figure.values.append(decode_rate(llm, rng, batch))
    server_context = SYSTEM_TOKENS + QUESTION_TOKENS + ANSWER_TOKENS // 2
    server_limit = decode_limit(llm, STREAMS, server_context)
    return [prefill, *decodes.values()], llm.engine.summary, limits, server_limit


def random_prompt(llm: LLM, rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(100, llm.engine.spec.vocab_size) for _ in range(length)]


def prefill_rate(llm: LLM, rng: random.Random) -> float:
    before = llm.engine.core.stats().steps
    llm.generate([random_prompt(llm, rng, PROMPT_TOKENS)], SamplingParams(max_tokens=1, temperature=0.0))
    steps = [step for step in llm.engine.core.steps.dump() if step.step_id >= before]
    return sum(step.prefill_tokens for step in steps) / sum(step.wall_s for step in steps)


def decode_rate(llm: LLM, rng: random.Random, batch: int) -> float:
    before = llm.engine.core.stats().steps
    prompts = [random_prompt(llm, rng, DECODE_PROMPT_TOKENS) for _ in range(batch)]
    llm.generate(prompts, SamplingParams(max_tokens=DECODE_TOKENS, temperature=0.0, ignore_eos=True))
    steps = [s for s in llm.engine.core.steps.dump() if s.step_id >= before and s.decode_batch == batch]
    pure = [step for step in steps if not step.prefill_tokens]
    return sum(step.decode_batch for step in pure) / sum(step.wall_s for step in pure)


def decode_limit(llm: LLM, batch: int, context: int) -> float:
    """A step reads all weights and every sequence's KV, and multiplies by every weight for each row."""
    spec, limits, plan = llm.engine.spec, llm.engine.limits, llm.engine.plan
    weights_bytes = limits["read_bytes_per_s"] / limits["decode_tokens_per_s"]
    step_bytes = weights_bytes + batch * context * plan.kv_bytes / plan.kv_tokens
    seconds = max(
        step_bytes / limits["read_bytes_per_s"], batch * spec.decode_flops(context) / limits["flops_per_s"]
    )
    return batch / seconds


def prefill_limit(llm: LLM) -> float:
    flops = llm.engine.spec.prefill_flops(PROMPT_TOKENS)
    return PROMPT_TOKENS / (flops / llm.engine.limits["flops_per_s"])


# ---- a server and 16 clients beside it ----


@dataclass
class Server:
    name: str
    flags: list[str]
    port: int = 0
    process: subprocess.Popen[bytes] | None = None

    def start(self, model: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [
            sys.executable,
            "-m",
            "ridgeline.cli.main",
            "serve",
            model,
            f"--port={self.port}",
            *self.flags,
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        await_ready(self.process, f"http://127.0.0.1:{self.port}")

    def stop(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(60)


@dataclass
class Round:
    """What 16 streams saw: times in ms."""

    ttft_ms: list[float] = field(default_factory=list)
    tpot_ms: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0


async def one_stream(client: httpx.AsyncClient, system: str, question: str, into: Round) -> None:
    body = {
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": question}],
        "max_tokens": ANSWER_TOKENS,
        "ignore_eos": True,
        "temperature": 0.7,
        "stream": True,
    }
    started = time.perf_counter()
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        stamps = [time.perf_counter() async for line in response.aiter_lines() if '"content":"' in line]
    into.ttft_ms.append(1000 * (stamps[0] - started))
    into.tpot_ms.append(1000 * (stamps[-1] - stamps[0]) / (ANSWER_TOKENS - 1))
    into.tokens += ANSWER_TOKENS


async def one_round(server: Server, system: str, number: int) -> Round:
    result = Round()
    limits = httpx.Limits(max_connections=STREAMS)
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{server.port}", limits=limits, timeout=600
    ) as client:
        started = time.perf_counter()
        questions = [
            f"Round {number}, user {user}: tell me about topic {user * 7 + number}."
            for user in range(STREAMS)
        ]
        await asyncio.gather(*(one_stream(client, system, question, result) for question in questions))
        result.seconds = time.perf_counter() - started
    return result


def percentile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def measure_server(model: str, repeats: int) -> list[dict[str, Any]]:
    servers = [Server("prefix cache", []), Server("no prefix cache", ["--no-prefix-cache"])]
    system = (
        "You are a careful assistant of a shipping company. " + "Answer briefly, politely and truly. " * 60
    )
    rows: list[dict[str, Any]] = []
    try:
        for server in servers:
            server.start(model)
        system = cut_to_tokens(servers[0], system)
        rounds: dict[tuple[str, str], list[Round]] = {}
        for number in range(repeats + 1):
            for server in servers:
                kind = "cold" if number == 0 else "warm"
                rounds.setdefault((server.name, kind), []).append(
                    asyncio.run(one_round(server, system, number))
                )
        for (name, kind), of_kind in rounds.items():
            rows.append(summarize(name, kind, of_kind))
    finally:
        for server in servers:
            server.stop()
    return rows


def cut_to_tokens(server: Server, text: str) -> str:
    url = f"http://127.0.0.1:{server.port}"
    ids = httpx.post(f"{url}/tokenize", json={"prompt": text}).json()["tokens"][:SYSTEM_TOKENS]
    assert len(ids) == SYSTEM_TOKENS
    return httpx.post(f"{url}/detokenize", json={"tokens": ids}).json()["prompt"]


def summarize(name: str, kind: str, rounds: list[Round]) -> dict[str, Any]:
    ttft = [value for one in rounds for value in one.ttft_ms]
    tpot = [value for one in rounds for value in one.tpot_ms]
    rates = [one.tokens / one.seconds for one in rounds]
    return {
        "server": name,
        "prompt": kind,
        "streams": STREAMS,
        "rounds": len(rounds),
        "output_tokens_per_s": {"median": statistics.median(rates), "min": min(rates), "max": max(rates)},
        "ttft_ms": {f"p{int(q * 100)}": percentile(ttft, q) for q in (0.5, 0.9, 0.99)},
        "tpot_ms": {f"p{int(q * 100)}": percentile(tpot, q) for q in (0.5, 0.9, 0.99)},
    }


# ---- report ----


def print_report(console: Console, report: dict[str, Any]) -> None:
    table = Table(title=f"engine, {report['model']}, {report['backend']}")
    for column in ("", "median", "min – max", "limit", "% of limit"):
        table.add_column(column, justify="left" if not column else "right")
    for row in report["engine"]:
        table.add_row(
            f"{row['name']} ({row['unit']})",
            f"{row['median']:.1f}",
            f"{row['min']:.1f} – {row['max']:.1f}",
            f"{row['limit']:.0f}",
            f"{row['percent_of_limit']:.0f} %",
        )
    console.print(table)
    if not report["server"]:
        return
    limit = report["server_output_limit"]
    table = Table(
        title=f"server, {STREAMS} streams, {SYSTEM_TOKENS}-token shared prompt; limit {limit:.0f} tok/s"
    )
    for column in ("", "out tok/s", "% of limit", "TTFT p50 / p90 / p99 ms", "TPOT p50 / p90 / p99 ms"):
        table.add_column(column, justify="left" if not column else "right")
    for row in report["server"]:
        table.add_row(
            f"{row['server']}, {row['prompt']}",
            f"{row['output_tokens_per_s']['median']:.0f}",
            f"{100 * row['output_tokens_per_s']['median'] / report['server_output_limit']:.0f} %",
            " / ".join(f"{value:.0f}" for value in row["ttft_ms"].values()),
            " / ".join(f"{value:.0f}" for value in row["tpot_ms"].values()),
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", type=Path, default=Path("bench-results/engine_cpu.json"))
    parser.add_argument("--no-server", action="store_true", help="only the engine, in this process")
    args = parser.parse_args()
    engine, summary, limits, server_limit = measure_engine(args.model, args.repeats, args.threads)
    report = {
        "version": __version__,
        "model": args.model,
        "backend": summary,
        "machine": platform.processor() or platform.machine(),
        "limits": limits,
        "server_output_limit": server_limit,
        "engine": [figure.as_dict() for figure in engine],
        "server": [] if args.no_server else measure_server(args.model, args.repeats),
    }
    print_report(Console(width=110), report)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report, indent=1))
    print(f"written: {args.json}")


if __name__ == "__main__":
    main()
