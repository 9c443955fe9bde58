"""What one GPU must show about the latency of one user, in one run of at most --budget-s seconds.

    python benchmarks/gpu_latency.py --out DIR          about 9 minutes on an H200; a table at the end
    python benchmarks/gpu_latency.py --out DIR --head FOLDER --prompts mt-bench.jsonl     and a draft head
    python benchmarks/gpu_latency.py --dry-run          what would run, in which order

The parts are other scripts of this folder, each in its own process with its own limit of time: first tokens
and 256 streams over HTTP (`gpu_first_token.py`), guesses with synthetic acceptance (`gpu_speculation.py`),
throughput (`gpu_engine.py`). A part that fails or takes too long costs no other. What matters most runs
first. DIR gets one file, `latency.json`: each bar with its figure, what every part reported, and the end of
the logs of parts that failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BUDGET_S = 535.0
LEAST_S = 15.0  # a part that would have less is not begun
MODELS = ("qwen3-8b", "qwen3-0.6b")
Found = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """most_s: its limit of time, in about twice what it is expected to take"""

    name: str
    script: str
    options: tuple[str, ...]
    most_s: float

    def command(self, out: Path) -> list[str]:
        logs = ("--logs", str(out)) if self.script == "gpu_first_token.py" else ()
        result = ("--json", str(self.result(out)))
        return [sys.executable, "-u", str(HERE / self.script), *self.options, *logs, *result]

    def result(self, out: Path) -> Path:
        return out / f"{self.name}.json"


@dataclass(frozen=True)
class Bar:
    name: str
    bar: str
    value: float | None
    met: bool | None  # None: not measured


def parts(args: argparse.Namespace) -> list[Part]:
    few = ("--repeats", "40", "--prompts", "", "--load-rounds", "2", "--settle-s", "5")
    gaps = ("--gaps", "0.1x10,0.5x6,2x3,10x1")
    first = [
        Part(f"first-token-{model}", "gpu_first_token.py", ("--models", model, *few, *gaps), 170)
        for model in MODELS
    ]
    speculation = Part("speculation", "gpu_speculation.py", ("--rounds", "2"), 150)
    cases = ("--cases", "decode-bs64,offline-mix,long,prefill")
    engine = [Part(f"engine-{model}", "gpu_engine.py", ("--models", model, *cases), 130) for model in MODELS]
    found = [first[0], speculation, first[1], engine[1], engine[0]]
    if args.head:
        options = ("--model", args.model, "--head", str(args.head), "--prompts", str(args.prompts))
        found.insert(1, Part("head", "gpu_speculation.py", (*options, "--rounds", "2"), 90))
    return [part for part in found if not args.only or part.name in args.only]


def run(part: Part, out: Path, limit_s: float) -> str:
    """What went wrong; empty if nothing. All processes of the part end with it."""
    with (out / f"{part.name}.log").open("wb") as log:
        process = subprocess.Popen(part.command(out), stdout=log, stderr=log, start_new_session=True)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        # Its servers run in other process sessions: the script that started them ends them.
        if code is None:
            os.killpg(process.pid, signal.SIGINT)
            try:
                process.wait(25)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            return f"stopped after {limit_s:.0f} s"
    return f"ended with {code}" if code else ""


def log_of(part: Part, out: Path) -> str:
    log = out / f"{part.name}.log"
    return log.read_text(errors="replace") if log.is_file() else ""


def read(part: Part, out: Path) -> Any:
    try:
        return json.loads(part.result(out).read_text())
    except (OSError, ValueError):
        return None


# ── the bars ──────────────────────────────────────────────────────────────────────────────────────────────


def bars(found: Found) -> list[Bar]:
    return [*_first_tokens(found), *_speculation(found), *_throughput(found)]


def _bar(name: str, bar: str, value: Callable[[], float], is_met: Callable[[float], bool]) -> Bar:
    """A figure that is not there is not measured, whatever the reason."""
    try:
        number = float(value())
    except (KeyError, IndexError, TypeError, StopIteration, ZeroDivisionError, ValueError):
        return Bar(name, bar, None, None)
    return Bar(name, bar, round(number, 3), is_met(number))


def _first_tokens(found: Found) -> list[Bar]:
    made = []
    for model, most_ms in (("qwen3-8b", 8.0), ("qwen3-0.6b", 4.0)):
        of = (found.get(f"first-token-{model}") or {}).get(model) or {}

        def p50(of: Found = of) -> float:
            return float(of["back_to_back"]["ttft_ms"]["p50"])

        made += [
            _bar(f"{model} TTFT p50, ms", f"<= {most_ms:g}", p50, lambda x, most=most_ms: x <= most),
            _bar(
                f"{model} TTFT p99 after idling / p50",
                "<= 1.3",
                lambda of=of, p50=p50: of["after_idling"]["all"]["p99"] / p50(),
                lambda x: x <= 1.3,
            ),
            _bar(
                f"{model} first 20, warm, longest / p50",
                "<= 3",
                lambda of=of, p50=p50: of["warm"]["first"]["max_ms"] / p50(),
                lambda x: x <= 3,
            ),
            _bar(
                f"{model} first 20, cold, longest, ms",
                "<= 1000",
                lambda of=of: of["cold"]["first"]["max_ms"],
                lambda x: x <= 1000,
            ),
        ]
    of = (found.get("first-token-qwen3-8b") or {}).get("qwen3-8b") or {}
    made.append(
        _bar(
            "qwen3-8b HTTP 256 streams, tok/s",
            ">= 10172",
            lambda: max(
                of[f"streams_256_{turn}"]["tok_s"] for turn in range(2) if f"streams_256_{turn}" in of
            ),
            lambda x: x >= 1.1 * 9247,
        )
    )
    return made


def _speculation(found: Found) -> list[Bar]:
    rows = {row["streams"]: row for row in found.get("speculation") or []}
    head = (found.get("head") or [{}])[0]
    return [
        _bar("1 stream, 2.6 a row, tok/s", ">= 520", lambda: rows[1]["on_tokens_per_s"], lambda x: x >= 520),
        _bar("64 streams, on / off", ">= 1.6", lambda: rows[64]["ratio"], lambda x: x >= 1.6),
        _bar("256 streams, on / off", ">= 0.98", lambda: rows[256]["ratio"], lambda x: x >= 0.98),
        _bar("trained head, 1 stream, on / off", ">= 1.3", lambda: head["ratio"], lambda x: x >= 1.3),
    ]


def _throughput(found: Found) -> list[Bar]:
    wanted = {
        "qwen3-0.6b": {"decode-bs64": 1.4, "offline-mix": 1.5, "prefill": 1.0},
        "qwen3-8b": {"decode-bs64": 1.15, "offline-mix": 1.2, "long": 1.0, "prefill": 1.0},
    }
    made = []
    for model, cases in wanted.items():
        of = ((found.get(f"engine-{model}") or {}).get(model) or {}).get("cases") or {}
        for case, least in cases.items():
            made.append(
                _bar(
                    f"{model} {case} / best peer",
                    f">= {least:g}",
                    lambda of=of, case=case: of[case]["ratio_to_best_peer"],
                    lambda x, least=least: x >= least,
                )
            )
    return made


def table(made: list[Bar], failures: dict[str, str]) -> str:
    words = {True: "met", False: "MISSED", None: "not measured"}
    lines = [f"{'':<42}{'bar':>9}{'figure':>12}"]
    for bar in made:
        value = "–" if bar.value is None else f"{bar.value:,.2f}"
        lines.append(f"{bar.name:<42}{bar.bar:>9}{value:>12}  {words[bar.met]}")
    lines += [f"{name}: {why}" for name, why in failures.items()]
    return "\n".join(lines)


def main() -> int:
    args = _arguments()
    todo = parts(args)
    if args.dry_run:
        print("\n".join(" ".join(part.command(args.out)) for part in todo))
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        failures = run_all(todo, Path(folder), args)
    return 1 if failures else 0


def run_all(todo: list[Part], folder: Path, args: argparse.Namespace) -> dict[str, str]:
    """What went wrong, by part. The file is written after each of them."""
    ends = time.monotonic() + args.budget_s
    found: Found = {}
    failures: dict[str, str] = {}
    logs: dict[str, str] = {}
    for part in todo:
        began = time.monotonic()
        left_s = ends - began
        why = run(part, folder, min(part.most_s, left_s)) if left_s >= LEAST_S else "no time was left"
        found[part.name] = read(part, folder)
        if why:
            failures[part.name] = why
            logs[part.name] = log_of(part, folder)[-3000:]
        print(f"{part.name}: {time.monotonic() - began:.0f} s{', ' + why if why else ''}", flush=True)
        report = {"bars": [asdict(bar) for bar in bars(found)], "failures": failures, "parts": found}
        (args.out / "latency.json").write_text(json.dumps(report | {"logs": logs}, indent=1))
    for name, log in logs.items():
        print(f"── the end of the log of {name}\n{log[-1200:]}")
    print(table(bars(found), failures))
    return failures


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "bench-results/latency")))
    parser.add_argument("--budget-s", type=float, default=BUDGET_S)
    parser.add_argument("--only", action="append", help="a part's name; may be repeated")
    parser.add_argument("--head", type=Path, help="folder of a draft head of --model")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=Path, help="questions for the head")
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    if args.head and not args.prompts:
        parser.error("--head needs --prompts")
    return args


if __name__ == "__main__":
    sys.exit(main())
