"""The server path, measured: CPU time per streamed token in the front, per step in the engine's Python.

The real front (HTTP, SSE, client, socket) and a real engine process run as `ridgeline serve` starts them;
only the engine's runner is replaced by one that computes nothing and paces its steps, so that what is left is
what the path itself costs. Figures are CPU time of all threads of a process, not wall time.

    python benchmarks/server_path.py [--streams 16 32] [--steps-per-s 100] [--tokens 400] [--repeats 5]
    python benchmarks/server_path.py --profile front     where the time goes (engine: the other process)
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import functools
import json
import os
import platform
import pstats
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from ready import await_ready

from ridgeline.engine.run.runner import step_result

LONGEST_S = 120  # of one round; then something is stuck
MARGIN_TOKENS = 20  # of every stream at its beginning and end are not measured
SPECIMEN = (
    "The path of a token from the engine to a socket is short, and every step of it has its price. " * 40
)
SYSTEM = "You are a careful assistant of a shipping company. " + "Answer briefly, politely and truly. " * 42
STAGES = ("schedule", "sample", "apply", "publish")


# ---- the engine: all of it but the forward pass ----


class InstantRunner:
    """Logits that were there before, the real sampler, and steps at a fixed pace."""

    name = "instant"

    def __init__(self, sampler: Any, text_ids: list[int], vocab: int, most_rows: int, steps_per_s: float):
        self._sampler = sampler
        self._text_ids = text_ids
        rng = np.random.default_rng(0)
        self._logits = rng.normal(0, 3, (most_rows, vocab)).astype(np.float32)
        self._raised: list[tuple[int, int, float]] = []
        self._pause_s = 1 / steps_per_s if steps_per_s else 0.0
        self._next_step = 0.0

    def execute(self, plan: Any) -> Any:
        self._wait()
        for row, token, before in self._raised:
            self._logits[row, token] = before
        self._raised = []
        picks = [(number, seq) for number, row in enumerate(plan.rows) for seq in row.samplers]
        for number, seq in picks:
            token = self._text_ids[seq.num_output % len(self._text_ids)]
            self._raised.append((number, token, float(self._logits[number, token])))
            self._logits[number, token] = 40.0
        return self.sample(plan.rows)

    def sample(self, rows: list[Any]) -> Any:
        return step_result(self._sampler, rows, self._logits)

    def _wait(self) -> None:
        now = time.monotonic()
        if now < self._next_step:
            time.sleep(self._next_step - now)
        self._next_step = max(self._next_step, now) + self._pause_s


def engine_process(report: Path, profile: bool, steps_per_s: float) -> None:
    """`ridgeline.engine.run.engine_loop` with its runner replaced, and its stages' CPU time written down."""
    from ridgeline.engine.run import engine_loop
    from ridgeline.engine.run.host_sampler import HostSampler
    from ridgeline.models.text.tokenizer import Tokenizer

    spent = dict.fromkeys(STAGES, 0.0)
    steps = 0

    def timed(stage: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            nonlocal steps
            started = time.thread_time()
            result = work(*args, **options)
            spent[stage] += time.thread_time() - started
            steps += stage == "schedule"
            return result

        return wrapped

    real_build = engine_loop.build_engine

    def build(config: Any, path: Path, *rest: Any) -> Any:
        built = real_build(config, path, *rest)
        text_ids = Tokenizer.load(path).encode(SPECIMEN, add_special=False)
        sampler = HostSampler(built.spec.eos_ids)
        core = built.core
        core.runner = InstantRunner(sampler, text_ids, built.spec.vocab_size, config.max_running, steps_per_s)
        if not profile:
            core.runner.sample = timed("sample", core.runner.sample)
            core.scheduler.schedule = timed("schedule", core.scheduler.schedule)
            core.scheduler.apply = timed("apply", core.scheduler.apply)
        return built

    engine_loop.build_engine = build
    if not profile:
        engine_loop.EngineLoop._publish = timed("publish", engine_loop.EngineLoop._publish)  # type: ignore[method-assign]
    signal.signal(signal.SIGUSR2, lambda *_: report.write_text(json.dumps({"steps": steps, "spent": spent})))
    _run(engine_loop.main, report if profile else None)


def front_process(
    port: int, model: str, report: Path, profile: str, steps_per_s: float, streams: int
) -> None:
    """`ridgeline serve`, with an engine program of ours."""
    from ridgeline.engine.config import EngineConfig
    from ridgeline.server.config import ServerConfig
    from ridgeline.server.process import main

    engine_report = report.with_name("engine.json")
    program = (sys.executable, __file__, "--role=engine", f"--report={engine_report}")
    program += (f"--steps-per-s={steps_per_s}", f"--profile={profile}", "--")
    main.Supervisor = functools.partial(main.Supervisor, program=program)  # type: ignore[misc,assignment]
    engine = EngineConfig(model=model, max_running=streams, kv_tokens=streams * 2048)
    server = ServerConfig(port=port, log_level="warning")
    _run(lambda: main.serve(engine, server), report if profile == "front" else None)


def _run(work: Callable[[], Any], profile_to: Path | None) -> None:
    if profile_to is None:
        sys.exit(work())
    profiler = cProfile.Profile()
    try:
        profiler.runcall(work)
    finally:
        profiler.dump_stats(profile_to)


# ---- the clients: as light as they can be, for they share the machine ----


class StreamReader(asyncio.Protocol):
    """One streaming request on one connection; counts its events."""

    def __init__(self, request: bytes, progress: Progress) -> None:
        self._request = request
        self._progress = progress
        self._tail = b""
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._progress.count(data.count(b'"content":"'), len(data))
        self._tail = (self._tail + data)[-64:]
        if self._tail.endswith(b"0\r\n\r\n"):
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            complete = b"[DONE]" in self._tail
            self.ended.set_result(None) if complete else self.ended.set_exception(
                SystemExit(f"a stream was cut: {self._tail!r}")
            )


class Progress:
    """Tokens and bytes all streams have got; calls `at_start` and `at_end` at their counts."""

    def __init__(
        self, start: int, end: int, at_start: Callable[[], None], at_end: Callable[[], None]
    ) -> None:
        self.tokens = self.bytes = self.reads = 0
        self._marks = [(start, at_start), (end, at_end)]

    def count(self, tokens: int, size: int) -> None:
        self.tokens += tokens
        self.bytes += size
        self.reads += 1
        while self._marks and self.tokens >= self._marks[0][0]:
            self._marks.pop(0)[1]()


def http_request(port: int, max_tokens: int, user: int, temperature: float) -> bytes:
    body = json.dumps(
        {
            "messages": [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": f"User {user} asks: where is my parcel?"},
            ],
            "max_tokens": max_tokens,
            "temperature": temperature,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def run_streams(port: int, streams: int, tokens: int, temperature: float, progress: Progress) -> None:
    loop = asyncio.get_running_loop()
    readers = []
    for user in range(streams):
        request = http_request(port, tokens, user, temperature)
        _, reader = await loop.create_connection(
            functools.partial(StreamReader, request, progress), "127.0.0.1", port
        )
        readers.append(reader.ended)
    async with asyncio.timeout(LONGEST_S):
        await asyncio.gather(*readers)


# ---- measuring ----


def cpu_s(pid: int) -> float:
    """CPU seconds of all threads of a process so far, to the nanosecond where the kernel counts them."""
    total = 0.0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0]) / 1e9
    return total


class Service:
    """A front and its engine, started by this program."""

    def __init__(self, args: argparse.Namespace, streams: int, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.report = folder / "front.json"
        self.engine_report = folder / "engine.json"
        self.process = subprocess.Popen(
            [
                sys.executable,
                __file__,
                "--role=front",
                f"--port={self.port}",
                f"--model={args.model}",
                f"--report={self.report}",
                f"--profile={args.profile}",
                f"--steps-per-s={args.steps_per_s}",
                f"--streams={streams}",
            ],
            stdout=subprocess.DEVNULL,
        )
        try:
            await_ready(self.process, f"http://127.0.0.1:{self.port}")
        except BaseException:
            self.stop()
            raise
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        self.engine_pid = int(children[0])

    def engine_stages(self) -> dict[str, Any]:
        """What the engine has written down so far: steps, and seconds per stage."""
        self.engine_report.unlink(missing_ok=True)
        os.kill(self.engine_pid, signal.SIGUSR2)
        deadline = time.monotonic() + LONGEST_S
        while time.monotonic() < deadline:
            try:
                stages: dict[str, Any] = json.loads(self.engine_report.read_text())
                return stages
            except (FileNotFoundError, json.JSONDecodeError):
                time.sleep(0.005)
        raise SystemExit("the engine does not report its stages")

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()


def measure_streams(
    service: Service, streams: int, tokens: int, temperature: float, staged: bool
) -> dict[str, float]:
    """CPU microseconds per streamed token and per engine step, all streams running."""
    marks: list[dict[str, Any]] = []

    def mark() -> None:
        marks.append(
            {
                "at": time.monotonic(),
                "front": cpu_s(service.process.pid),
                "engine": cpu_s(service.engine_pid),
                "client": time.process_time(),
                "tokens": progress.tokens,
                "bytes": progress.bytes,
                "reads": progress.reads,
            }
        )

    progress = Progress(streams * MARGIN_TOKENS, streams * (tokens - MARGIN_TOKENS), mark, mark)
    before = service.engine_stages() if staged else None
    _loop_runner()(run_streams(service.port, streams, tokens, temperature, progress))
    first, last = marks
    made = last["tokens"] - first["tokens"]
    figures = {
        f"{side} µs/token": 1e6 * (last[side] - first[side]) / made for side in ("front", "engine", "client")
    }
    figures["engine µs/step"] = figures["engine µs/token"] * streams
    figures["tokens/s"] = made / (last["at"] - first["at"])
    figures["bytes/token"] = (last["bytes"] - first["bytes"]) / made
    figures["tokens/read"] = made / (last["reads"] - first["reads"])
    if before is not None:
        after = service.engine_stages()
        steps = after["steps"] - before["steps"]
        for stage in STAGES:
            figures[f"{stage} µs/step"] = 1e6 * (after["spent"][stage] - before["spent"][stage]) / steps
        figures["python µs/step"] = sum(figures[f"{stage} µs/step"] for stage in STAGES)
    return figures


def measure_requests(service: Service, streams: int) -> dict[str, float]:
    """CPU milliseconds per request, answers of one token."""
    progress = Progress(1 << 60, 1 << 60, lambda: None, lambda: None)
    before = cpu_s(service.process.pid)
    rounds = 5
    for _ in range(rounds):
        _loop_runner()(run_streams(service.port, streams, 1, 0.0, progress))
    return {"front µs/request": 1e6 * (cpu_s(service.process.pid) - before) / (rounds * streams)}


def _loop_runner() -> Callable[[Any], None]:
    import uvloop

    return uvloop.run


def measure(args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    results: dict[str, dict[str, list[float]]] = {}
    for streams in args.streams:
        with tempfile.TemporaryDirectory() as folder:
            service = Service(args, streams, Path(folder))
            try:
                for number in range(args.repeats + 1):
                    figures = measure_streams(
                        service, streams, args.tokens, args.temperature, staged=not args.profile
                    )
                    figures |= measure_requests(service, streams)
                    if number == 0 and args.repeats > 1:
                        continue  # caches fill, code warms
                    into = results.setdefault(f"{streams} streams", {})
                    for name, value in figures.items():
                        into.setdefault(name, []).append(value)
            finally:
                service.stop()
            if args.profile:
                report = service.report if args.profile == "front" else service.engine_report
                pstats.Stats(str(report)).sort_stats(args.sort).print_stats(60)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--streams", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--steps-per-s", type=float, default=100.0, help="0: as fast as the path allows")
    parser.add_argument("--tokens", type=int, default=400, help="of each answer")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", default="", choices=["", "front", "engine"])
    parser.add_argument("--sort", default="tottime", help="of the profile: tottime, cumulative, …")
    parser.add_argument("--json", type=Path, default=Path("bench-results/server_path.json"))
    parser.add_argument("--role", default="main", choices=["main", "front", "engine"], help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    own, engine_arguments = sys.argv[1:], []
    if "--" in own:
        own, engine_arguments = own[: own.index("--")], own[own.index("--") + 1 :]
    args = parser.parse_args(own)
    if args.role == "engine":
        sys.argv[1:] = engine_arguments
        return engine_process(args.report, args.profile == "engine", args.steps_per_s)
    if args.role == "front":
        return front_process(
            args.port, args.model, args.report, args.profile, args.steps_per_s, args.streams[0]
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that what was started is stopped too
    results = measure(args)
    report = {"machine": platform.processor() or platform.machine(), "results": results}
    for case, figures in results.items():
        print(f"{case}, {args.steps_per_s:g} steps/s, temperature {args.temperature:g}")
        for name, values in figures.items():
            print(f"  {name:20} {statistics.median(values):9.1f}   {min(values):.1f} – {max(values):.1f}")
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report, indent=1))
    print(f"written: {args.json}")
    return None


if __name__ == "__main__":
    main()
