"""What drafting costs the host: microseconds a step for the drafter alone and for all that speculation does.

The drafter alone (`propose`) is the figure of the bar: 50 µs at 64 rows of 8k tokens. `whole` adds the choice
of lengths, the change of the plan and the judgement of the result. No model runs: the texts are made up, and
steps take no time. Texts: `new` never repeats itself, `copy` repeats the prompt, `mixed` does so for half of
its tokens. The least of many steps counts beside the median, since other programs share the cores.

    python benchmarks/drafting_cost.py [--drafter suffix] [--steps 400] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ridgeline.engine.run.core import EngineCore
from ridgeline.engine.schedule.intake import SchedulerLimits
from ridgeline.engine.schedule.request import Request, SamplingParams
from ridgeline.engine.schedule.scheduler import Scheduler
from ridgeline.engine.schedule.step import RowResult, Sampled, StepPlan, StepResult, StepRow
from ridgeline.engine.speculate.ngram import NgramDrafter
from ridgeline.engine.speculate.speculation import Speculation
from ridgeline.engine.speculate.suffix import SuffixDrafter

VOCAB = 50_000
DRAFTERS = {"ngram": NgramDrafter, "suffix": SuffixDrafter}
SIZES = ((1, 1024), (1, 8192), (8, 8192), (64, 8192))
TEXTS = ("new", "mixed", "copy")


class MadeUpText:
    """A runner whose tokens are a formula, and whose steps cost nothing more for drafts."""

    name = "made-up"

    def __init__(self, kind: str) -> None:
        self.now = 0.0
        self._kind = kind

    def execute(self, plan: StepPlan) -> StepResult:
        self.now += 0.004 + 1e-6 * plan.num_tokens
        return StepResult([self._row(row) for row in plan.rows])

    def _row(self, row: StepRow) -> RowResult:
        if not row.samplers:
            return RowResult()
        first = row.start + row.count - len(row.drafts)
        samples = [Sampled(self._token(row, first))]
        for place, draft in enumerate(row.drafts, start=1):
            if samples[-1].token != draft:
                break
            samples.append(Sampled(self._token(row, first + place)))
        return RowResult(samples)

    def _token(self, row: StepRow, position: int) -> int:
        prompt = row.seq.request.prompt_ids
        copies = self._kind == "copy" or (self._kind == "mixed" and position // 40 % 2)
        if copies:
            return prompt[(position + 1) % len(prompt)]
        return hash((row.seq.request.request_id, position)) % VOCAB


def timed(call: Callable[..., Any], times: list[float]) -> Callable[..., Any]:
    def wrapped(*args: Any) -> Any:
        began = time.perf_counter()
        result = call(*args)
        times.append(time.perf_counter() - began)
        return result

    return wrapped


def measure(drafter: str, kind: str, rows: int, length: int, steps: int) -> dict[str, Any]:
    runner = MadeUpText(kind)
    speculation = Speculation(DRAFTERS[drafter](), VOCAB)
    propose_s: list[float] = []
    extend_s: list[float] = []
    land_s: list[float] = []
    speculation.drafter.propose = timed(speculation.drafter.propose, propose_s)  # type: ignore[method-assign]
    speculation.extend = timed(speculation.extend, extend_s)  # type: ignore[method-assign]
    speculation.landed = timed(speculation.landed, land_s)  # type: ignore[method-assign]
    limits = SchedulerLimits(rows * length, length, rows, rows, 16, rows * (length // 16 + 64), 2 * length)
    core = EngineCore(Scheduler(limits), runner, clock=lambda: runner.now, speculation=speculation)
    rng = random.Random(0)
    params = SamplingParams(max_tokens=900, ignore_eos=True, temperature=0.0)
    for number in range(rows):
        core.add(Request(str(number), [rng.randrange(VOCAB) for _ in range(length)], params))
    while core.has_work and len(land_s) < steps:
        core.step()
    # The first steps index the prompts; steps with prompts have no drafts.
    skipped = 2 + length // 4096
    whole = [a + b for a, b in zip(extend_s[-len(land_s) :], land_s, strict=True)][skipped:]
    alone = propose_s[skipped:]
    stats = speculation.stats()
    return {
        "drafter": drafter,
        "text": kind,
        "rows": rows,
        "tokens": length,
        "propose_us": round(1e6 * statistics.median(alone), 1),
        "propose_least_us": round(1e6 * min(alone), 1),
        "whole_us": round(1e6 * statistics.median(whole), 1),
        "whole_least_us": round(1e6 * min(whole), 1),
        "drafted_per_step": round(stats.drafted / max(1, len(land_s)), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--drafter", choices=sorted(DRAFTERS), action="append")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = []
    for drafter in args.drafter or sorted(DRAFTERS):
        for rows, length in SIZES:
            for kind in TEXTS:
                found.append(measure(drafter, kind, rows, length, args.steps))
                print(json.dumps(found[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
