"""Validity: whether a run measured the server or its own client. Judged after the run.

A client that could not send in time or ran out of CPU makes figures worse than the server is, or hides how
bad it was: such a run is INVALID.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ridgeline.lab.bench.figures.metrics import Summary
from ridgeline.lab.bench.figures.record import RequestRecord
from ridgeline.lab.bench.figures.statistics import percentile, sorted_samples

DELAY_LIMIT_MS = 10.0  # of the client's own delay …
DELAY_SHARE = 0.05  # … or this share of the median TTFT, where that is more
LATE_SHARE, LATE_FEWEST = 0.01, 2  # share of requests that may be later; or this many in short runs
CPU_LIMIT = 0.85  # of one core: the client is one thread
LEAST_LAGS = 100  # samples of the loop's delay needed to judge it


class Validity(msgspec.Struct, frozen=True, omit_defaults=True):
    """reasons: why it is not valid. warnings: notes on a valid run."""

    valid: bool
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    client_delay_p99_ms: float | None = None  # dispatch_delay without connecting
    client_delay_limit_ms: float | None = None
    client_lag_p99_ms: float | None = None  # delay of the loop's own 1 ms timers
    client_cpu: float | None = None


def judge(
    records: Sequence[RequestRecord],
    summary: Summary,
    client_cpu: float | None,
    selftest: str = "",
    retried: int = 0,
    lags: Sequence[float] = (),
) -> Validity:
    """selftest: why the self-test failed; "" if it passed or was skipped.

    lags: sampled delays of the client's loop in seconds: answers were stamped this late.
    """
    reasons: list[str] = []
    warnings: list[str] = []
    delays = [
        (record.t_send - record.t_sched - record.connect_s - record.held_s) * 1000
        for record in records
        if record.t_send is not None and not record.warmup
    ]
    delay = percentile(sorted_samples(delays), 0.99) if delays else None
    typical = summary.metrics["ttft_ms"].percentiles["p50"]
    limit = max(DELAY_LIMIT_MS, DELAY_SHARE * typical.value) if typical else DELAY_LIMIT_MS
    late = sum(one > limit for one in delays)
    if late > max(LATE_SHARE * len(delays), LATE_FEWEST):
        reasons.append(
            f"the client sent {late} of {len(delays)} requests more than {limit:.1f} ms late, connecting not "
            f"counted (P99 {delay:.1f} ms)"
        )
    lag = percentile(sorted_samples(lags), 0.99) * 1000 if len(lags) >= LEAST_LAGS else None
    if lag is not None and lag > limit:
        typical_lag = percentile(sorted_samples(lags), 0.9) * 1000
        words = f"the client's loop was delayed: P90 {typical_lag:.1f} ms, P99 {lag:.1f} ms"
        (reasons if typical_lag > limit else warnings).append(words)
    if client_cpu is not None and client_cpu > CPU_LIMIT:
        reasons.append(f"the client used {client_cpu:.2f} of the one core it runs on (limit {CPU_LIMIT})")
    if summary.causes.get("client_out_of_sockets"):
        count = summary.causes["client_out_of_sockets"]
        reasons.append(f"{count} requests found no free socket on the client: raise `ulimit -n`")
    if selftest:
        reasons.append(f"the self-test failed: {selftest}")
    if not summary.ok:
        reasons.append("no request succeeded: there is nothing to measure")
    elif summary.failed:
        share = 100 * summary.failed / summary.offered
        warnings.append(f"{summary.failed} of {summary.offered} requests failed ({share:.1f} %): read adj_")
    if summary.cancelled:
        warnings.append(
            f"stopped early: {summary.cancelled} requests were in flight; the slow ones are missing"
        )
    warmups = [record for record in records if record.warmup]
    cold = sum(record.status != "ok" for record in warmups)
    if cold:
        warnings.append(
            f"{cold} of {len(warmups)} warm-up requests failed: the server may not have been warm"
        )
    if retried:
        warnings.append(f"{retried} requests were sent again: the server had closed their kept connections")
    return Validity(not reasons, tuple(reasons), tuple(warnings), delay, limit, lag, client_cpu)
