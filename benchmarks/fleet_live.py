"""A real fleet of SmolLM2 replicas on this machine, held against its bars. One claim per subcommand.

    python benchmarks/fleet_live.py roll      # of 4 replicas under load: 0 failures, TTFT p99 <= 2x steady
    python benchmarks/fleet_live.py ramp      # a replica joins under load: TTFT p99 <= 1.5x its peers'
    python benchmarks/fleet_live.py prefix    # default against round-robin: TTFT p90 and throughput
    python benchmarks/fleet_live.py predict   # two replicas against their simulation: within 15 %

Client, router and replicas share the cores: run it on a machine that does nothing else. The share that others
took is printed. Prints a table beside its bar, and writes bench-results/fleet_live_NAME.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
sys.path.insert(0, str(Path(__file__).parent))

import msgspec
import numpy as np
from versus.live_fleet import LiveFleet, live_fleet
from versus.open_load import Answer, OpenLoad, running
from versus.quiet_machine import Foreign

from ridgeline.engine.schedule.intake import SchedulerLimits
from ridgeline.fleet.config_models import LimitsConfig
from ridgeline.lab.bench.config import BenchConfig, ClosedLoop, OpenLoop
from ridgeline.lab.bench.figures.record import RequestRecord
from ridgeline.lab.bench.run import in_loop, run_bench
from ridgeline.lab.perfmodel.fit_steps import fit_step_times
from ridgeline.lab.simulate.fleet.loop import simulate_fleet
from ridgeline.lab.simulate.fleet.setup import FleetSetup
from ridgeline.lab.simulate.measure import Measured, measure_steps
from ridgeline.lab.traffic.arrivals import parse_arrivals
from ridgeline.lab.traffic.lengths import parse_lengths
from ridgeline.lab.traffic.request import PlannedRequest, Traffic
from ridgeline.lab.traffic.seeds import stream
from ridgeline.lab.traffic.synthetic import synthetic

MODEL = "smollm2-135m"
ROLL_MOST, RAMP_MOST, ENOUGH, ALLOWED = 2.0, 1.5, 0.98, 0.15
BLOCK = 16


def percentile(answers: Sequence[Answer], share: float) -> float:
    """Of the time to first token, in ms."""
    return float(np.percentile([one.ttft_ms for one in answers if not one.error], share))


def row(name: str, value: str, bar: str = "", holds: bool | None = None) -> None:
    verdict = "" if holds is None else "ok" if holds else "MISSED"
    print(f"  {name:44}{value:>16}   {bar:12}{verdict}", flush=True)


# ── roll ─────────────────────────────────────────────────────────────────────────────────────────────────


async def roll(args: argparse.Namespace) -> dict[str, Any]:
    """Steady load, a rollout under it, and steady load again."""
    serve = {"kv_tokens": 8192, "max_context": 1024}
    rollout = f"[models.rollout]\ncanary_s = {args.canary_s}\ncanary_requests = {args.canary_requests}"
    chat = {"chat": {"source": MODEL, "replicas": args.replicas}}
    with live_fleet(chat, serve, rollout) as fleet:
        old = fleet.status()["models"][0]["version"]
        load = OpenLoad(fleet.status()["url"], "chat", args.rate, args.words, args.output, args.seed)
        async with running(load):
            await asyncio.sleep(args.warm_seconds)
            steady = time.monotonic()
            await asyncio.sleep(args.seconds)
            fleet.write(serve | {"kv_tokens": 8192 + BLOCK})
            begin = time.monotonic()
            await asyncio.to_thread(fleet.run, "roll", "--wait")
            end = time.monotonic()
            await asyncio.sleep(args.seconds)
            last = time.monotonic()
        is_new = fleet.status()["models"][0]["version"] != old
    calm = load.between(steady, begin) + load.between(end, last)
    during = load.between(begin, end)
    failed = [one.error for one in load.answers if one.error]
    ratio = percentile(during, 99) / percentile(calm, 99)
    print(f"\nroll of {args.replicas} replicas in {end - begin:.0f} s at {args.rate:g} requests/s")
    row("every replica has the new version", str(is_new), "True", is_new)
    row(f"failed of {len(load.answers)} requests", str(len(failed)), "0", not failed)
    row(f"TTFT p99, steady ({len(calm)} requests)", f"{percentile(calm, 99):.0f} ms")
    row(f"TTFT p99, in the roll ({len(during)} requests)", f"{percentile(during, 99):.0f} ms")
    row("ratio", f"{ratio:.2f}", f"<= {ROLL_MOST:g}", ratio <= ROLL_MOST)
    return {
        "roll_s": end - begin,
        "requests": len(load.answers),
        "failed": failed,
        "steady_ttft_ms": {f"p{share}": percentile(calm, share) for share in (50, 90, 99)},
        "roll_ttft_ms": {f"p{share}": percentile(during, share) for share in (50, 90, 99)},
        "ratio": ratio,
        "holds": is_new and not failed and ratio <= ROLL_MOST,
    }


# ── ramp ─────────────────────────────────────────────────────────────────────────────────────────────────


async def ramp(args: argparse.Namespace) -> dict[str, Any]:
    """In each round a replica joins, stays for a minute, and leaves."""
    serve = {"kv_tokens": 8192, "max_context": 1024}
    with live_fleet({"chat": {"source": MODEL, "replicas": args.replicas}}, serve) as fleet:
        load = OpenLoad(fleet.status()["url"], "chat", args.rate, args.words, args.output, args.seed)
        async with running(load):
            await asyncio.sleep(args.warm_seconds)
            rounds = [await _join(fleet, load, args) for _ in range(args.rounds)]
    print(
        f"\na replica joins {args.replicas} others at {args.rate:g} requests/s: its first {args.minute:g} s"
    )
    for number, one in enumerate(rounds):
        row(f"round {number + 1}: TTFT p99, fresh ({one['fresh']} requests)", f"{one['fresh_p99_ms']:.0f} ms")
        row(f"round {number + 1}: TTFT p99, peers ({one['peers']} requests)", f"{one['peers_p99_ms']:.0f} ms")
    ratio = statistics.median(one["ratio"] for one in rounds)
    row("ratio, median of rounds", f"{ratio:.2f}", f"<= {RAMP_MOST:g}", ratio <= RAMP_MOST)
    failed = [one.error for one in load.answers if one.error]
    row(f"failed of {len(load.answers)} requests", str(len(failed)), "0", not failed)
    return {"rounds": rounds, "ratio": ratio, "failed": failed, "holds": ratio <= RAMP_MOST and not failed}


async def _join(fleet: LiveFleet, load: OpenLoad, args: argparse.Namespace) -> dict[str, Any]:
    before = set(fleet.serving("chat"))
    await asyncio.to_thread(fleet.run, "scale", "chat", str(args.replicas + 1))
    await asyncio.to_thread(fleet.until, lambda: len(fleet.serving("chat")) > args.replicas)
    begin = time.monotonic()
    (fresh,) = set(await asyncio.to_thread(fleet.serving, "chat")) - before
    await asyncio.sleep(args.minute)
    answers = [one for one in load.between(begin, time.monotonic()) if not one.error]
    while any(not one.end for one in answers):
        await asyncio.sleep(0.1)
    await asyncio.to_thread(fleet.run, "scale", "chat", str(args.replicas))
    await asyncio.to_thread(fleet.until, lambda: len(fleet.status()["replicas"]) == args.replicas)
    mine = [one for one in answers if one.replica == fresh]
    peers = [one for one in answers if one.replica != fresh]
    if not mine or not peers:
        raise SystemExit(f"{fresh} served {len(mine)} requests, its peers {len(peers)}: a higher --rate")
    fresh_ms, peers_ms = percentile(mine, 99), percentile(peers, 99)
    return {
        "fresh": len(mine),
        "peers": len(peers),
        "fresh_p99_ms": fresh_ms,
        "peers_p99_ms": peers_ms,
        "ratio": fresh_ms / peers_ms,
    }


# ── prefix ───────────────────────────────────────────────────────────────────────────────────────────────


async def prefix(args: argparse.Namespace) -> dict[str, Any]:
    """Two replicas of each policy. A round is one run of each; the other policy's replicas rest meanwhile."""
    serve = {"kv_tokens": args.kv_tokens, "max_context": 2048}
    policies = {"default": "default", "plain": "round-robin"}
    models = {name: {"source": MODEL, "replicas": 2, "policy": policy} for name, policy in policies.items()}
    found: dict[str, Any] = {}
    with live_fleet(models, serve, "[models.resources]\ncpus = 1") as fleet:
        url = fleet.status()["url"]
        for load, concurrency in (("heavy", args.concurrency), ("light", 1)):
            runs: dict[str, list[dict[str, float]]] = {name: [] for name in models}
            for number in range(args.rounds + 1):
                count = max(args.requests if load == "heavy" else args.requests // 2, 2)
                traffic = shared_prefixes(count, args, args.seed + number)
                for name in models if number % 2 else reversed(models):
                    config = BenchConfig(
                        url, traffic, ClosedLoop(concurrency), model=name, seed=args.seed + number
                    )
                    figures = figures_of((await run_bench(config)).records)
                    if number:  # the first round warms everything
                        runs[name].append(figures)
            found[load] = _judge(load, concurrency, runs)
    return found | {"holds": all(one["holds"] for one in found.values())}


def shared_prefixes(count: int, args: argparse.Namespace, seed: int) -> Traffic:
    """Prompts that begin with one of `groups` system prompts, in random order."""
    groups = stream(seed, "groups").integers(args.groups, size=count).tolist()
    tokens = args.prefix_tokens + args.own_tokens
    requests = tuple(PlannedRequest(0.0, tokens, args.output, prefix=(group,)) for group in groups)
    return Traffic("shared prefixes", requests, prefix_block_tokens=args.prefix_tokens)


def figures_of(records: Sequence[RequestRecord]) -> dict[str, float]:
    bad = [record.error for record in records if record.status != "ok"]
    if bad:
        raise SystemExit(f"{len(bad)} requests failed: {bad[0]}")
    kept = [record for record in records if not record.warmup]
    ttft = [1000 * (record.t_first - record.t_sched) for record in kept if record.t_first is not None]
    seconds = max(record.t_end or 0.0 for record in kept) - min(record.t_sched for record in kept)
    return {
        "ttft_ms.p50": float(np.percentile(ttft, 50)),
        "ttft_ms.p90": float(np.percentile(ttft, 90)),
        "output_tokens_per_s": sum(record.n_out for record in kept) / seconds,
        "cached": sum(r.n_cached or 0 for r in kept) / max(sum(r.n_in or 0 for r in kept), 1),
    }


def _judge(load: str, concurrency: int, runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Ratios above 1: default is better. Each round's two runs had the same prompts."""
    least = 1.0 if load == "heavy" else ENOUGH
    pairs = list(zip(runs["default"], runs["plain"], strict=True))
    speedups = [plain["ttft_ms.p90"] / ours["ttft_ms.p90"] for ours, plain in pairs]
    gains = [ours["output_tokens_per_s"] / plain["output_tokens_per_s"] for ours, plain in pairs]
    print(f"\n{load}: {concurrency} requests at a time, medians of {len(pairs)} rounds")
    print(f"  {'':30}{'default':>14}{'round-robin':>14}")
    for name in runs["default"][0]:
        middle = [statistics.median(one[name] for one in runs[policy]) for policy in ("default", "plain")]
        print(f"  {name:30}{middle[0]:14.2f}{middle[1]:14.2f}")
    speedup, gain = statistics.median(speedups), statistics.median(gains)
    row("TTFT p90, times as fast", f"{speedup:.3f}", f">= {least:g}", speedup >= least)
    row("throughput, times", f"{gain:.3f}", f">= {least:g}", gain >= least)
    return {
        "runs": runs,
        "ttft_p90_speedups": speedups,
        "throughput_ratios": gains,
        "holds": min(speedup, gain) >= least,
    }


# ── predict ──────────────────────────────────────────────────────────────────────────────────────────────


async def predict(args: argparse.Namespace) -> dict[str, Any]:
    """Step times are fitted on this fleet's replicas: on both at once, which share the machine, or on one."""
    limits = SchedulerLimits(
        step_tokens=256 + 32,
        prefill_chunk=256,
        max_running=32,
        max_waiting=512,
        block_size=BLOCK,
        num_blocks=16_384 // BLOCK,
        max_context=2048,
    )
    serve = {
        "step_tokens": limits.step_tokens,
        "prefill_chunk": limits.prefill_chunk,
        "max_running": limits.max_running,
        "kv_tokens": limits.num_blocks * BLOCK,
        "max_context": limits.max_context,
        "step_ring": 65_536,
    }
    cases: list[dict[str, Any]] = []
    with live_fleet({"chat": {"source": MODEL, "replicas": 2}}, serve) as fleet:
        fitted = fit(fleet, limits.max_context, args)
        setup = FleetSetup(limits, fitted.times, replicas=2, front=fitted.front)
        rate = capacity(setup, args)
        print(f"capacity by simulation: {rate:.2f} requests/s")
        for number, load in enumerate(args.loads):
            traffic = traffic_of(max(int(rate * load * args.seconds), 8), rate * load, args, number)
            foreign = Foreign()
            config = BenchConfig(fleet.status()["url"], traffic, OpenLoop(), model="chat", warmup=4)
            result = await run_bench(config)
            share = foreign.share()
            predicted = simulate_fleet(traffic, setup)
            cases.append(_compare(load, result.records, predicted.records, share))
    errors = {
        name: statistics.median(abs(case["error"][name]) for case in cases) for name in cases[0]["error"]
    }
    print("\nmedian of absolute errors over the loads")
    for name, error in errors.items():
        row(name, f"{error:.1%}", f"<= {ALLOWED:.0%}", error <= ALLOWED)
    return {
        "capacity": rate,
        "fit_notes": fitted.notes,
        "fit_errors": [(one.trace, one.median, one.total) for one in fitted.times.errors],
        "front": msgspec.to_builtins(fitted.front),
        "cases": cases,
        "errors": errors,
        "holds": max(errors.values()) <= ALLOWED,
    }


def _compare(
    load: float, measured: Sequence[RequestRecord], predicted: Sequence[RequestRecord], foreign: float
) -> dict[str, Any]:
    shown = ("ttft_ms.p50", "output_tokens_per_s")
    real, expected = figures_of(measured), figures_of(predicted)
    print(f"\nload {load:.0%}, {len(predicted)} requests; others took {foreign:.0%} of the cores")
    print(f"  {'':30}{'measured':>14}{'predicted':>14}{'error':>10}")
    error = {name: expected[name] / real[name] - 1 for name in shown}
    for name in ("ttft_ms.p50", "ttft_ms.p90", "output_tokens_per_s"):
        off = expected[name] / real[name] - 1
        print(f"  {name:30}{real[name]:14.1f}{expected[name]:14.1f}{off:+10.1%}")
    return {"load": load, "measured": real, "predicted": expected, "error": error, "foreign_share": foreign}


def traffic_of(count: int, rate: float, args: argparse.Namespace, number: int) -> Traffic:
    """Not the fitting traffic: other lengths, and random arrivals."""
    return synthetic(
        count,
        input_tokens=parse_lengths("uniform:32,400", "input"),
        output_tokens=parse_lengths("uniform:8,64", "output"),
        arrivals=parse_arrivals("poisson", "arrivals"),
        rate=rate,
        seed=args.seed + number,
    )


def capacity(setup: FleetSetup, args: argparse.Namespace) -> float:
    """Requests per second of replicas that are never without work."""
    patient = replace(setup, waiting=LimitsConfig(max_held=100_000, hold_s=3600.0))
    records = simulate_fleet(traffic_of(600, 1000.0, args, 99), patient).records
    ends = sorted(record.t_end for record in records if record.t_end is not None)
    fifth = len(ends) // 5  # without the beginning and the end, when they are not full
    return (len(ends) - 2 * fifth) / (ends[-fifth] - ends[fifth])


def fit(fleet: LiveFleet, context: int, args: argparse.Namespace) -> Measured:
    urls = [one["url"] for one in fleet.serving("chat").values()][: 1 if args.fit == "one" else None]
    with ProcessPoolExecutor(len(urls), multiprocessing.get_context("spawn")) as pool:
        tasks = [
            pool.submit(_fit_one, url, fleet.key, context, args.fit_seconds, seed)
            for seed, url in enumerate(urls)
        ]
        found = [task.result() for task in tasks]
    steps = {f"{name} {number}": own for number, one in enumerate(found) for name, own in one.steps.items()}
    times = fit_step_times(steps, about={"model": MODEL})
    for error in times.errors:
        print(f"  held out {error.trace!r}: {error.median:.1%} median, {error.total:+.1%} in all")
    print(f"  front: {found[0].front}")
    return Measured(times, found[0].front, steps, tuple(note for one in found for note in one.notes))


def _fit_one(url: str, key: str, context: int, seconds: float, seed: int) -> Measured:
    return in_loop(
        measure_steps(url, context=context, seconds=seconds, model="chat", api_key=key, seed=100 * seed)
    )


# ── the command line ─────────────────────────────────────────────────────────────────────────────────────


def parser_of() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parsers = parser.add_subparsers(dest="what", required=True)
    made = {name: parsers.add_parser(name) for name in ("roll", "ramp", "prefix", "predict")}
    for name, one in made.items():
        one.add_argument("--seed", type=int, default=0)
        one.add_argument("--json", type=Path, default=Path(f"bench-results/fleet_live_{name}.json"))
    for name, replicas in (("roll", 4), ("ramp", 2)):
        made[name].add_argument("--replicas", type=int, default=replicas)
        made[name].add_argument("--rate", type=float, default=2.0, help="requests per second")
        made[name].add_argument("--words", type=int, default=48, help="of a prompt")
        made[name].add_argument("--output", type=int, default=16, help="tokens of an answer")
        made[name].add_argument("--warm-seconds", type=float, default=15.0)
    made["roll"].add_argument("--seconds", type=float, default=60.0, help="steady, before and after")
    made["roll"].add_argument("--canary-s", type=float, default=10.0)
    made["roll"].add_argument("--canary-requests", type=int, default=20)
    made["ramp"].add_argument("--rounds", type=int, default=3)
    made["ramp"].add_argument("--minute", type=float, default=60.0, help="seconds that count as fresh")
    made["prefix"].add_argument("--rounds", type=int, default=5)
    made["prefix"].add_argument("--requests", type=int, default=96, help="of a heavy run; light has half")
    made["prefix"].add_argument("--concurrency", type=int, default=6)
    made["prefix"].add_argument("--groups", type=int, default=12, help="different system prompts")
    made["prefix"].add_argument("--prefix-tokens", type=int, default=512)
    made["prefix"].add_argument("--own-tokens", type=int, default=32)
    made["prefix"].add_argument("--output", type=int, default=16)
    made["prefix"].add_argument(
        "--kv-tokens", type=int, default=6144, help="of a replica: not all prompts fit"
    )
    made["predict"].add_argument(
        "--fit-seconds",
        type=float,
        default=90.0,
        help="below 60, too few requests run alone to fit the front",
    )
    made["predict"].add_argument("--fit", choices=["both", "one"], default="both", help="replicas under load")
    made["predict"].add_argument("--seconds", type=float, default=90.0, help="of each load")
    made["predict"].add_argument("--loads", type=float, nargs="+", default=[0.3, 0.6, 0.8])
    return parser


def main() -> None:
    args = parser_of().parse_args()
    foreign = Foreign()
    found = asyncio.run({"roll": roll, "ramp": ramp, "prefix": prefix, "predict": predict}[args.what](args))
    found["foreign_share"] = foreign.share()
    print(f"others took {found['foreign_share']:.0%} of the cores")
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    report = {"machine": platform.processor() or platform.machine(), "settings": settings, **found}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report, indent=1))
    print(f"written: {args.json}")


if __name__ == "__main__":
    main()
