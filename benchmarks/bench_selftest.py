"""The bench's own client, measured: at which rates it finds known latencies here, and what it costs.

The client and a mock server of known TTFT and TPOT share this machine's cores. Every rate is tried several
times; the error is the worst of P50, P90 and mean of TTFT, TPOT and E2E, as a share of what is allowed (2 ms
or 2 %): below 1 is found.

    python benchmarks/bench_selftest.py [--rates 100 500 1000 2000] [--seconds 10] [--repeats 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

from ridgeline.lab.bench.config import OpenLoop
from ridgeline.lab.bench.run import in_loop
from ridgeline.lab.bench.selftest import SelfTest, self_test


def worst(test: SelfTest) -> float:
    """The largest error, as a share of its tolerance."""
    return max(abs(check.measured - check.known) / check.tolerance for check in test.checks)


def row(rate: float, tests: list[SelfTest]) -> dict[str, Any]:
    return {
        "rate": rate,
        "passed": sum(not test.failure for test in tests),
        "of": len(tests),
        "error_of_tolerance": statistics.median(worst(test) for test in tests),
        "dispatch_p99_ms": statistics.median(test.dispatch_p99_ms or 0.0 for test in tests),
        "client_cpu": statistics.median(test.client_cpu for test in tests),
        "client_us_per_request": statistics.median(test.client_us_per_request for test in tests),
        "client_us_per_chunk": statistics.median(test.client_us_per_chunk for test in tests),
        "mock_late_p99_ms": statistics.median(test.mock.late_p99_ms for test in tests),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rates", type=float, nargs="+", default=[100.0, 500.0, 1000.0, 2000.0])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}")
    print(f"{'req/s':>7}{'found':>8}{'error/allowed':>15}{'dispatch P99':>14}{'client cores':>14}"
          f"{'µs/request':>12}{'µs/chunk':>10}{'mock late P99':>15}")  # fmt: skip
    rows = []
    for rate in args.rates:
        tests = [in_loop(self_test(OpenLoop(), rate, args.seconds)) for _ in range(args.repeats)]
        found = row(rate, tests)
        rows.append(found)
        print(
            f"{rate:>7.0f}{found['passed']:>6}/{found['of']}{found['error_of_tolerance']:>15.2f}"
            f"{found['dispatch_p99_ms']:>11.2f} ms{found['client_cpu']:>14.2f}"
            f"{found['client_us_per_request']:>12.0f}{found['client_us_per_chunk']:>10.1f}"
            f"{found['mock_late_p99_ms']:>12.2f} ms",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
