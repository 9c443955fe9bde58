"""How much faster than real time is the simulator? An hour of the Azure conversation trace on one core.

19,366 requests with 4.1 M output tokens at the trace's own rate, on an 8B model on an H200 by first
principles (`lab.perfmodel`): the real scheduler, KV pool and prefix index, steps launched ahead.
The claim: at least 200 times real time. CPU seconds are counted, so that others on the machine matter little.

    python benchmarks/simulator_speed.py [--trace conv|code] [--lookahead 1] [--rounds 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path

from ridgeline.engine.schedule.intake import SchedulerLimits
from ridgeline.lab.hardware.find_chip import find_chip
from ridgeline.lab.perfmodel.analytic_times import analytic_times
from ridgeline.lab.perfmodel.step_formula import Deployment
from ridgeline.lab.simulate.loop import simulate
from ridgeline.lab.traffic.traces import read_azure
from ridgeline.models.spec.find_spec import find_spec

CLAIM = 200
LIMITS = SchedulerLimits(
    step_tokens=8192,
    prefill_chunk=8192,
    max_running=256,
    max_waiting=512,
    block_size=16,
    num_blocks=50_000,  # 105 GB of KV at 131 kB a token
    max_context=131_072,
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", choices=["conv", "code"], default="conv")
    parser.add_argument("--lookahead", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--json", type=Path, default=Path("bench-results/simulator_speed.json"))
    args = parser.parse_args()
    shape = find_spec(args.data / "configs/meta-llama--Meta-Llama-3.1-8B_config.json")
    times = analytic_times(Deployment(shape, find_chip("h200")))
    traffic = read_azure(args.data / f"azure-llm-2023/AzureLLMInferenceTrace_{args.trace}.csv")
    rounds = []
    for _ in range(args.rounds):
        begun = time.process_time()
        run = simulate(traffic, LIMITS, times, lookahead=args.lookahead)
        rounds.append(time.process_time() - begun)
    best = min(rounds)
    ratio = run.duration_s / best
    print(f"{len(traffic.requests):,} requests, {traffic.output_tokens:,} output tokens, {run.steps:,} steps")
    print(
        f"{run.duration_s:.0f} s of traffic; the device was busy for {run.busy_s / run.duration_s:.0%} of it"
    )
    print(f"CPU seconds: {', '.join(f'{seconds:.2f}' for seconds in rounds)}")
    print(f"{ratio:.0f} times real time (claim: {CLAIM}) {'ok' if ratio >= CLAIM else 'MISSED'}")
    report = {
        "machine": platform.processor() or platform.machine(),
        "trace": args.trace,
        "lookahead": args.lookahead,
        "requests": len(traffic.requests),
        "steps": run.steps,
        "traffic_s": run.duration_s,
        "cpu_s": rounds,
        "times_real_time": ratio,
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
