"""Does `bench compare` see differences that are not there, and miss those that are?

Pairs of runs of a small queueing model (Poisson arrivals, eight slots, noise in every step) are compared:
equal servers with the same and with different traffic, and a server that is 5 % slower. Prints the share of
comparisons in which each metric differs at 95 %: about 5 % is right for equal servers, less is cautious.

    python benchmarks/compare_coverage.py --pairs 120 --out coverage.json
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from ridgeline.lab.bench.compare.compare import compare
from ridgeline.lab.bench.compare.difference import Side
from ridgeline.lab.bench.figures.metrics import summarize
from ridgeline.lab.bench.figures.record import RequestRecord

RATE, SLOTS, STEP_S = 6.0, 8, 0.018
CASES = {
    "equal, same traffic": (True, 1.0),
    "equal, other traffic": (False, 1.0),
    "5 % slower, same traffic": (True, 1.05),
    "5 % slower, other traffic": (False, 1.05),
}


def main() -> None:
    kept = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=kept)
    parser.add_argument("--pairs", type=int, default=120)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = {name: _share_seen(args.pairs, args.requests, *case) for name, case in CASES.items()}
    names = list(next(iter(found.values())))
    print(f"{'':24}" + "".join(f"{case:>28}" for case in found))
    for name in names:
        print(f"{name:24}" + "".join(f"{100 * seen[name]:26.1f} %" for seen in found.values()))
    if args.out:
        args.out.write_text(
            json.dumps({"pairs": args.pairs, "requests": args.requests, "seen": found}, indent=1)
        )


def _share_seen(pairs: int, requests: int, same: bool, slower: float) -> dict[str, float]:
    seen: Counter[str] = Counter()
    for number in range(pairs):
        a = _run(requests, plan=number, luck=10_000 + number, slower=1.0)
        b = _run(requests, plan=number if same else 20_000 + number, luck=30_000 + number, slower=slower)
        rows = compare(_side("a", a), _side("b", b), resamples=300).headline
        seen.update({row.name: row.seen for row in rows})
        seen["all rows"] += sum(row.seen for row in rows) / len(rows)
    return {name: count / pairs for name, count in seen.items()}


def _side(name: str, records: list[RequestRecord]) -> Side:
    return Side(name, records, summarize(records, "open"))


def _run(requests: int, plan: int, luck: int, slower: float) -> list[RequestRecord]:
    drawn, chance = np.random.default_rng(plan), np.random.default_rng(luck)
    due = np.cumsum(drawn.exponential(1 / RATE, requests))
    prompts = drawn.integers(50, 2000, requests)
    outputs = np.maximum(1, drawn.lognormal(3.0, 0.8, requests).astype(int))
    free = np.zeros(SLOTS)
    records = []
    for index in range(requests):
        n_in, n_out, at = int(prompts[index]), int(outputs[index]), float(due[index])
        slot = int(free.argmin())
        first = max(at, float(free[slot])) + (0.02 + 6e-5 * n_in) * slower + chance.exponential(0.004)
        gaps = np.maximum(0.002, chance.normal(STEP_S * slower, 0.002, n_out - 1))
        chunks = (first + np.concatenate(([0.0], np.cumsum(gaps)))).tolist()
        free[slot] = chunks[-1]
        first, last = chunks[0], chunks[-1]
        record = RequestRecord(
            index, at, at, first, first, last, last, "ok", n_in, n_out, n_in=n_in, n_out=n_out
        )
        records.append(replace(record, n_first=1, chunk_at=chunks, chunk_tokens=[1] * n_out))
    return records


if __name__ == "__main__":
    main()
