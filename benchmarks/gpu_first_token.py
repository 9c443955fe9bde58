"""The first token of one user over HTTP: back to back, after idling, right after `ready`; and load beside it.

    python benchmarks/gpu_first_token.py                                both shapes, random weights, a table
    python benchmarks/gpu_first_token.py --models qwen3-8b --json result.json
    python benchmarks/gpu_first_token.py --models tiny --backend torch     on a CPU: the path alone

`ridgeline serve` runs with random weights of the public shapes and a tokenizer made here; prompts are token
ids. Every shape is started twice: with an empty cache of kernels, and with the one that the first start left.
The client is one socket, read as it comes; a first token is the first event with text. The parts of a first
token come from the engine's step records, whose clock is the client's.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu.workloads import SHAPES, write_config
from benchmarks.ready import await_ready

# For a machine without a GPU: what the path costs beside the model.
TINY = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}
SHAPES.setdefault("tiny", SHAPES["qwen3-0.6b"] | TINY)
GAPS_S = {0.1: 10, 0.5: 8, 2.0: 4, 10.0: 1}  # idle time before a request → requests
KEPT_S = 3.0  # a connection that was idle for longer is replaced: the server closes it after 5
VARIED = 20  # requests right after `ready`
fresh = itertools.count(1).__next__  # seeds: no prompt is found in the prefix cache


class Client:
    """One kept connection; answers are streamed completions."""

    def __init__(self, port: int, vocab: int) -> None:
        self._address = ("127.0.0.1", port)
        self.vocab = vocab
        self._socket, self._used = self._connect(), time.monotonic()

    def _connect(self) -> socket.socket:
        connection = socket.create_connection(self._address, timeout=120)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def stream(self, seed: int, tokens: int, answer: int, **more: Any) -> list[float]:
        """Monotonic seconds: when it was asked for, and when each of the answer's events came."""
        request = http_request(body_of(seed, tokens, answer, self.vocab, **more))
        if time.monotonic() > self._used + KEPT_S:
            self._socket.close()
            self._socket = self._connect()
        stamps = [time.monotonic()]
        self._socket.sendall(request)
        data = b""
        while b"data: [DONE]" not in data[-64:]:
            piece = self._socket.recv(1 << 16)
            now = time.monotonic()
            if not piece:
                raise RuntimeError(f"the answer was cut: {data[-300:]!r}")
            if not data and not piece.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(piece.decode(errors="replace")[:500])
            data += piece
            stamps += [now] * (data.count(b'"text":') - len(stamps) + 1)
        while not data.endswith(b"0\r\n\r\n"):
            data += self._socket.recv(1 << 16)
        self._used = time.monotonic()
        return stamps


def body_of(seed: int, tokens: int, answer: int, vocab: int, **more: Any) -> bytes:
    rng = random.Random(seed)
    prompt = [rng.randrange(100, vocab - 300) for _ in range(tokens)]
    body = {"prompt": prompt, "max_tokens": answer, "temperature": 0.6, "seed": seed, **more}
    return json.dumps({**body, "ignore_eos": True, "stream": True}).encode()


def http_request(body: bytes) -> bytes:
    head = "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


# ── the server ────────────────────────────────────────────────────────────────────────────────────────────


class Server:
    def __init__(
        self, model: str, folder: Path, cache: Path, log: Path, backend: str, more: list[str]
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        environment = {**os.environ, "RIDGELINE_CACHE": str(cache)}
        command = [
            sys.executable,
            "-m",
            "ridgeline.cli.main",
            "serve",
            str(folder / model),
            "--backend",
            backend,
        ]
        command += ["--load-format", "dummy", "--port", str(self.port), *more]
        self._log = log.open("ab")
        started = time.monotonic()
        self._process = subprocess.Popen(
            command, stdout=self._log, stderr=self._log, env=environment, start_new_session=True
        )
        await_ready(self._process, f"http://127.0.0.1:{self.port}")
        self.ready_s = time.monotonic() - started
        self.ready_at = time.monotonic()

    def steps(self) -> list[dict[str, Any]]:
        import urllib.request

        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/debug/steps", timeout=10) as answer:
            return [json.loads(line) for line in answer.read().splitlines() if line.strip()]

    def stop(self) -> None:
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._log.close()


def write_model(shape: str, folder: Path) -> int:
    """A model directory without weights: config.json, and a tokenizer of bytes and words that never occur.
    Returns the vocabulary's size."""
    path = write_config(shape, folder)
    vocab = int(SHAPES[shape]["vocab_size"])
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    letters = [chr(byte) for byte in visible] + [chr(256 + place) for place in range(len(hidden))]
    words = letters + [f"w{number}" for number in range(vocab - len(letters))]
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {word: number for number, word in enumerate(words)}, "merges": []},
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (path / "tokenizer_config.json").write_text("{}")
    return vocab


# ── measurements ──────────────────────────────────────────────────────────────────────────────────────────


def spread(values: list[float]) -> dict[str, Any]:
    """In milliseconds."""
    ordered = sorted(1e3 * value for value in values)
    return {
        "n": len(ordered),
        "p50": statistics.median(ordered),
        "p90": ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))],
        "p99": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
        "max": ordered[-1],
    }


def back_to_back(client: Client, repeats: int, tokens: int = 128) -> dict[str, Any]:
    first, between = [], []
    for _ in range(repeats):
        stamps = client.stream(fresh(), tokens, 8)
        first.append(stamps[1] - stamps[0])
        between.append((stamps[-1] - stamps[1]) / max(1, len(stamps) - 2))
    return {"ttft_ms": spread(first), "tpot_ms": spread(between)}


def after_idling(client: Client, gaps: dict[float, int]) -> dict[str, Any]:
    found, every = {}, []
    for gap_s, count in gaps.items():
        waits = []
        for _ in range(count):
            time.sleep(gap_s)
            stamps = client.stream(fresh(), 128, 4)
            waits.append(stamps[1] - stamps[0])
        found[str(gap_s)] = [round(1e3 * wait, 2) for wait in waits]
        every += waits
    return {"by_gap_ms": found, "all": spread(every)}


def varied(client: Client, longest: int) -> dict[str, Any]:
    """Prompts of 1 to `longest` tokens; half with the sampling parameters that chat clients send."""
    rng = random.Random(7)
    asked = []
    for seed in range(VARIED):
        tokens = min(longest, int(2 ** rng.uniform(0, 10)))
        more = [{}, {"top_p": 0.9}, {"temperature": 0.0}, {"presence_penalty": 0.3}][seed % 4]
        stamps = client.stream(fresh(), tokens, 1 + seed % 8, **more)
        asked.append((tokens, more, round(1e3 * (stamps[1] - stamps[0]), 2)))
    return {
        "requests": asked,
        "max_ms": max(wait for _, _, wait in asked),
        "ttft_ms": [w for _, _, w in asked],
    }


def parts(server: Server, client: Client, repeats: int, tokens: int = 128) -> dict[str, Any]:
    """Where a first token's time goes, by the engine's step records: medians in ms."""
    asked = [client.stream(fresh(), tokens, 2) for _ in range(repeats)]
    records = [record for record in server.steps() if record["prefill_tokens"]]
    rows: list[dict[str, float]] = []
    for stamps in asked:
        inside = [r for r in records if stamps[0] <= r["start"] <= stamps[1]]
        if len(inside) != 1:
            continue
        (record,) = inside
        launched = record["start"] + record["schedule_s"]
        row = {
            "client to plan": record["start"] - stamps[0],
            "plan": record["schedule_s"],
            "step": record["wall_s"],
            "token to client": stamps[1] - launched - record["wall_s"],
        }
        if "launch_s" in record:
            row["of the step: launching"] = record["launch_s"]
        rows.append(row)
    return {name: spread([row[name] for row in rows]) for name in (rows[0] if rows else ())}


async def _many(port: int, vocab: int, streams: int, tokens: int, answer: int) -> dict[str, Any]:
    """One answer for each of `streams` streams, all asked for at once."""

    async def one() -> float:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        asked = time.monotonic()
        writer.write(http_request(body_of(fresh(), tokens, answer, vocab)))
        first, data = 0.0, b""
        while not data.endswith(b"0\r\n\r\n"):
            piece = await reader.read(1 << 16)
            if not piece:
                raise RuntimeError(f"cut: {data[-200:]!r}")
            if not first and b'"text":' in piece:
                first = time.monotonic()
            data = data[-64:] + piece
        writer.close()
        return first - asked

    started = time.monotonic()
    firsts = await asyncio.gather(*(one() for _ in range(streams)))
    seconds = time.monotonic() - started
    return {"tok_s": streams * answer / seconds, "seconds": seconds, "ttft_ms": spread(firsts)}


def measure(model: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    vocab = write_model(model, folder)
    result: dict[str, Any] = {}
    log = args.logs / f"{model}.log"
    for name in ("warm",) if args.skip_cold else ("cold", "warm"):
        server = Server(model, folder, folder / f"cache-{model}", log, args.backend, args.more)
        try:
            client = Client(server.port, vocab)
            result[name] = {"ready_s": round(server.ready_s, 2), "first": varied(client, args.longest)}
            waits = result[name]["first"]["ttft_ms"]
            print(f"{model} {name}: ready after {server.ready_s:.1f} s, first requests {waits}", flush=True)
            if name == "cold":
                await_line(log, "kernels compiled ahead")  # for the next start
            else:
                _measure_warm(server, client, args, result)
        finally:
            server.stop()
    return result


def _measure_warm(server: Server, client: Client, args: argparse.Namespace, result: dict[str, Any]) -> None:
    guarded(result, "settling", lambda: back_to_back(client, args.repeats))
    time.sleep(args.settle_s)
    guarded(result, "back_to_back", lambda: back_to_back(client, args.repeats))
    guarded(result, "parts", lambda: parts(server, client, args.repeats))
    few = max(3, args.repeats // 4)
    for tokens in args.prompts:
        guarded(result, f"prompt_{tokens}", lambda tokens=tokens: back_to_back(client, few, tokens))
    if not args.skip_idle:
        guarded(result, "after_idling", lambda: after_idling(client, args.gaps))
    for streams in args.streams:
        tokens = 512 if streams > 64 else 1024
        for turn in range(args.load_rounds):
            guarded(
                result,
                f"streams_{streams}_{turn}",
                lambda streams=streams, tokens=tokens: asyncio.run(
                    _many(server.port, client.vocab, streams, tokens, 256)
                ),
            )


def await_line(log: Path, words: str, timeout_s: float = 40.0) -> None:
    deadline = time.monotonic() + timeout_s
    while words not in log.read_text() and time.monotonic() < deadline:
        time.sleep(0.2)


def guarded(result: dict[str, Any], name: str, run: Any) -> None:
    """One measurement that fails loses no other."""
    try:
        result[name] = run()
    except Exception as error:
        result[name] = {"failed": f"{type(error).__name__}: {error}"}
    print(f"  {name}: {json.dumps(_rounded(result[name]))}", flush=True)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 2)
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return value


def main() -> int:
    args = _arguments()
    args.logs.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for model in args.models:
            try:
                results[model] = measure(model, args, Path(folder))
            except (Exception, SystemExit) as error:
                print(f"{model}: {type(error).__name__}: {error}", flush=True)
                log = args.logs / f"{model}.log"
                print(log.read_text()[-3000:] if log.exists() else "no log", flush=True)
            if args.json:
                args.json.write_text(json.dumps(results, indent=1))
    for model, found in results.items():
        usual = found.get("back_to_back", {}).get("ttft_ms")
        idle = found.get("after_idling", {}).get("all")
        if usual and idle:
            warm = found["warm"]["first"]["max_ms"] / usual["p50"]
            print(
                f"{model}: TTFT p50 {usual['p50']:.2f} ms; after idling p99 {idle['p99'] / usual['p50']:.2f} "
                f"x p50; first {VARIED} after ready: warm {warm:.1f} x p50, "
                f"cold {found.get('cold', {}).get('first', {}).get('max_ms', float('nan')):.0f} ms"
            )
    return 0 if len(results) == len(args.models) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="qwen3-8b,qwen3-0.6b", help="shapes, by comma")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--repeats", type=int, default=60, help="requests of a measurement (default 60)")
    parser.add_argument(
        "--longest", type=int, default=1000, help="prompt among the varied ones (default 1000)"
    )
    parser.add_argument("--prompts", default="32,256,400", help="further prompt lengths, by comma")
    parser.add_argument("--streams", default="256", help="closed-loop loads, by comma; empty: none")
    parser.add_argument("--load-rounds", type=int, default=2)
    parser.add_argument("--settle-s", type=float, default=6.0, help="for work in the background (default 6)")
    parser.add_argument(
        "--gaps", dest="gaps_text", help="seconds of idling x requests, by comma, such as 0.1x10,2x4"
    )
    parser.add_argument("--skip-cold", action="store_true")
    parser.add_argument("--skip-idle", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--logs", type=Path, default=Path("bench-results/first-token"))
    parser.add_argument("more", nargs="*", help="options of `ridgeline serve`, after --")
    args = parser.parse_args()
    args.models = args.models.split(",")
    args.gaps = GAPS_S
    if args.gaps_text:
        pairs = [each.split("x") for each in args.gaps_text.split(",")]
        args.gaps = {float(gap): int(count) for gap, count in pairs}
    args.prompts = [int(each) for each in args.prompts.split(",") if each]
    args.streams = [int(each) for each in args.streams.split(",") if each]
    return args


if __name__ == "__main__":
    sys.exit(main())
