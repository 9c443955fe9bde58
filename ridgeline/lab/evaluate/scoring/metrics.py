"""Metrics of a task from its outcomes, each with its standard error. Pure.

Accuracies are means with the error of a mean. Perplexities are exp(-Σ logprob / Σ weight) over all items
together, as in lm-eval; their error follows from the items' residuals (delta method): items differ in length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from ridgeline.lab.evaluate.scoring.outcome import Outcome

SUMS = ("logprob", "tokens", "words", "bytes")


class Metric(msgspec.Struct, frozen=True):
    """more: whether more is better."""

    name: str
    value: float
    error: float
    more: bool = True


def metrics_of(outcomes: Sequence[Outcome]) -> list[Metric]:
    """In the order in which they are shown; [] without outcomes."""
    if not outcomes:
        return []
    found = [
        _mean(name, [outcome.values[name] for outcome in outcomes])
        for name in outcomes[0].values
        if name not in SUMS
    ]
    if "words" in outcomes[0].values:
        found += _text_metrics(outcomes)
    elif "logprob" in outcomes[0].values:  # a last word: per item, whatever its tokens
        found.append(_perplexity("perplexity", outcomes, [1.0] * len(outcomes)))
    return found


def _text_metrics(outcomes: Sequence[Outcome]) -> list[Metric]:
    found = [
        _perplexity(f"{unit}_perplexity", outcomes, [outcome.values[f"{unit}s"] for outcome in outcomes])
        for unit in ("word", "byte", "token")
    ]
    bytes_metric = found[1]
    bits = Metric(
        "bits_per_byte",
        math.log2(bytes_metric.value),
        bytes_metric.error / bytes_metric.value / math.log(2),
        more=False,
    )
    return [*found, bits]


def _mean(name: str, values: Sequence[float]) -> Metric:
    n = len(values)
    mean = math.fsum(values) / n
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1) if n > 1 else 0.0
    return Metric(name, mean, math.sqrt(variance / n))


def _perplexity(name: str, outcomes: Sequence[Outcome], weights: Sequence[float]) -> Metric:
    losses = [-outcome.values["logprob"] for outcome in outcomes]
    total = math.fsum(weights)
    ratio = math.fsum(losses) / total if total else math.inf
    n = len(losses)
    residuals = math.fsum((loss - ratio * weight) ** 2 for loss, weight in zip(losses, weights, strict=True))
    error = math.sqrt(residuals * n / max(n - 1, 1)) / total if n > 1 and total else 0.0
    value = math.exp(min(ratio, 700.0))
    return Metric(name, value, value * error, more=False)
