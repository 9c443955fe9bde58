"""The metrics of speculation, from the engine's SpeculationStats; under vLLM's names where it has one.

They begin again at 0 with a new engine, as Prometheus expects of counters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ridgeline.telemetry.stats import SpeculationStats

if TYPE_CHECKING:
    from prometheus_client.core import Metric

# name without _total → (help, its value)
COUNTERS: dict[str, tuple[str, Callable[[SpeculationStats], float]]] = {
    "spec_decode_num_drafts": ("Rows of steps that verified guessed tokens", lambda stats: stats.drafts),
    "spec_decode_num_draft_tokens": ("Guessed tokens verified", lambda stats: stats.drafted),
    "spec_decode_num_accepted_tokens": ("Guessed tokens that were right", lambda stats: stats.accepted),
    "spec_decode_steps": ("Steps that verified guessed tokens", lambda stats: stats.steps),
    "spec_decode_draft_seconds": ("Time finding and judging guesses", lambda stats: stats.draft_s),
    "spec_decode_catch_up_seconds": (
        "Time in which the drafter read tokens that it was behind with",
        lambda stats: stats.reading_s,
    ),
    "spec_decode_verify_seconds": ("Time of steps that verified guesses", lambda stats: stats.verify_s),
}
GAUGES: dict[str, tuple[str, Callable[[SpeculationStats], float]]] = {
    "spec_decode_predicted_gain": (
        "Expected tokens per second of steps with guesses, as a multiple of plain steps",
        lambda stats: stats.predicted_gain,
    ),
    "spec_decode_measured_gain": (
        "Measured tokens per second of steps with guesses, as a multiple of plain steps",
        lambda stats: stats.measured_gain,
    ),
}


def speculation_families(prefix: str, model: str, stats: SpeculationStats) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    for name, (doc, read) in COUNTERS.items():
        counter = CounterMetricFamily(prefix + name, doc, labels=["model_name", "drafter"])
        counter.add_metric([model, stats.drafter], read(stats))
        yield counter
    for name, (doc, read) in GAUGES.items():
        gauge = GaugeMetricFamily(prefix + name, doc, labels=["model_name", "drafter"])
        gauge.add_metric([model, stats.drafter], read(stats))
        yield gauge
    by_position = CounterMetricFamily(
        prefix + "spec_decode_num_accepted_tokens_per_pos",
        "Guessed tokens that were right, by their place in the draft",
        labels=["model_name", "drafter", "position"],
    )
    for position, accepted in enumerate(stats.accepted_by_position):
        by_position.add_metric([model, stats.drafter, str(position)], accepted)
    yield by_position
    off = CounterMetricFamily(
        prefix + "spec_decode_off",
        "Decodes without verified guesses, by reason",
        labels=["model_name", "drafter", "reason"],
    )
    for reason, rows in stats.off.items():
        off.add_metric([model, stats.drafter, reason], rows)
    yield off
