"""A run's rates beside the limits of the server's machine, if the server reports them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from ridgeline.lab.bench.figures.metrics import Summary
from ridgeline.lab.bench.figures.rates import prompt_share
from ridgeline.lab.bench.figures.record import RequestRecord


class Share(msgspec.Struct, frozen=True):
    """value: measured. limit: of the machine. share: value / limit, 0 to 1."""

    name: str
    unit: str
    value: float
    limit: float
    share: float
    formula: str


def shares(records: Sequence[RequestRecord], summary: Summary, limits: Mapping[str, float]) -> list[Share]:
    """limits: `decode_tokens_per_s` of one stream (bandwidth) and `prefill_tokens_per_s` (arithmetic)."""
    decode, prefill = limits.get("decode_tokens_per_s"), limits.get("prefill_tokens_per_s")
    metrics, found = summary.metrics, []
    output, together = metrics.get("output_tokens_per_s"), metrics["concurrency_mean"].value
    if decode and output and output.value is not None and together:
        # One stream reads all weights per token; concurrent streams share the reading, until arithmetic
        # is the limit.
        streams = max(together, 1.0)
        limit = min(streams * decode, prefill) if prefill else streams * decode
        found.append(
            _share(
                "output_tokens_per_s",
                "tok/s",
                output.value,
                limit,
                "min(concurrency × decode limit of one stream, arithmetic limit)",
            )
        )
    computed = _computed_per_s(records, summary)
    if prefill and computed is not None:
        found.append(
            _share(
                "computed_tokens_per_s",
                "tok/s",
                computed,
                prefill,
                "(prompt − cached + output tokens) / window, of the arithmetic limit",
            )
        )
    tpot = metrics["tpot_ms"].percentiles["p50"]
    if decode and tpot and tpot.value > 0:
        found.append(
            Share(
                "tpot_ms.p50", "ms", tpot.value, 1000 / decode, 1000 / decode / tpot.value, "1 / decode limit"
            )
        )
    return found


def _computed_per_s(records: Sequence[RequestRecord], summary: Summary) -> float | None:
    window = summary.window
    ok = [record for record in records if record.status == "ok" and not record.warmup]
    if window.seconds <= 0 or any(record.n_in is None for record in ok):
        return None
    prompts = sum(((r.n_in or 0) - (r.n_cached or 0)) * prompt_share(r, window, summary.mode) for r in ok)
    output = summary.metrics["output_tokens_per_s"].value or 0.0
    return prompts / window.seconds + output


def _share(name: str, unit: str, value: float, limit: float, formula: str) -> Share:
    return Share(name, unit, value, limit, value / limit, formula)
