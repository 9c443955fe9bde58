"""Compares a prediction with a measured run: the error of each metric and its interval; then residuals.

Called by `cli.lab.plan`. An invalid run, or one with other traffic than planned, is refused: it does not test
the prediction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ridgeline.lab.errors import BadInput
from ridgeline.lab.plan.residuals import Residual, append_residuals
from ridgeline.lab.prediction import Interval, Prediction

# Traffic counts as the same if these facts of `traffic.describe` are within this share of the plan.
_SAME_WITHIN = {
    "requests": 0.0,
    "rps": 0.01,
    "gap_cv": 0.05,
    "input.mean": 0.01,
    "input.p90": 0.01,
    "output.mean": 0.01,
    "output.p90": 0.01,
    "conversations": 0.0,
    "ideal_hit": 0.02,
}
FAILED_SHARE = 0.01  # of a run's requests; above, its percentiles cover other requests than the plan's


@dataclass(frozen=True, slots=True)
class Run:
    """The parts of a bench result that `verify` needs, independent of its format."""

    name: str  # folder and time: identifies this run
    model: str
    mode: str  # "open" or "closed"
    traffic: Mapping[str, Any]  # its description as facts; empty: unknown
    measured: Mapping[str, float]
    invalid: tuple[str, ...] = ()  # why the run does not count


@dataclass(frozen=True, slots=True)
class Score:
    metric: str
    predicted: Interval
    measured: float

    @property
    def error(self) -> float:
        """Relative to the measured value: +0.1 means 10 % too high."""
        return self.predicted.mid / self.measured - 1

    @property
    def is_inside(self) -> bool:
        return self.measured in self.predicted


@dataclass(frozen=True, slots=True)
class Verdict:
    """All scores of one run. `missing`: predicted but not measured."""

    run: Run
    scores: tuple[Score, ...]
    missing: tuple[str, ...]
    caveats: tuple[str, ...]

    @property
    def median_error(self) -> float:
        errors = sorted(abs(score.error) for score in self.scores)
        middle = len(errors) // 2
        return errors[middle] if len(errors) % 2 else (errors[middle - 1] + errors[middle]) / 2

    @property
    def inside(self) -> int:
        return sum(score.is_inside for score in self.scores)


def read_run(folder: Path) -> Run:
    """A folder written by `ridgeline bench`."""
    from ridgeline.lab.bench.figures.metrics import flat
    from ridgeline.lab.bench.figures.result import BenchResult

    result = BenchResult.load(folder)
    invalid = () if result.validity.valid else result.validity.reasons or ("its client was the bottleneck",)
    if result.interrupted:
        invalid = (*invalid, "it was interrupted")
    return Run(
        name=f"{folder.name} of {result.started_at}",
        model=str(result.settings.get("model", "")),
        mode=result.summary.mode,
        traffic=result.settings.get("traffic_facts", {}),
        measured=flat(result.summary),
        invalid=invalid,
    )


def verify(prediction: Prediction, run: Run, *, force: bool = False) -> Verdict:
    """Score one run. BadInput if it does not test this prediction; with `force` that is a caveat."""
    against = differences(prediction, run)
    if against and not force:
        raise BadInput(
            f"{run.name} does not test this prediction: {'; '.join(against)} (--force scores it anyway)"
        )
    scores = tuple(
        Score(metric, interval, run.measured[metric])
        for metric, interval in prediction.metrics.items()
        if run.measured.get(metric, 0.0) > 0 and interval.mid > 0
    )
    if not scores:
        raise BadInput(f"{run.name} measured none of {', '.join(prediction.metrics)}")
    scored = {score.metric for score in scores}
    missing = tuple(metric for metric in prediction.metrics if metric not in scored)
    return Verdict(run, scores, missing, tuple(against))


def differences(prediction: Prediction, run: Run) -> list[str]:
    """Why the run does not test the prediction; empty if it does."""
    found = [f"the run is invalid: {reason}" for reason in run.invalid]
    if run.model and not _is_same_model(prediction.model, run.model):
        found.append(f"it ran {run.model}, the plan is for {prediction.model}")
    if (failed := run.measured.get("failures", 0.0)) > FAILED_SHARE:
        found.append(f"{failed:.1%} of its requests failed, so the others are a biased sample")
    planned_mode = prediction.traffic.get("mode", "open")
    if run.mode != planned_mode:
        found.append(f"it was a {run.mode} loop, the plan is for an {planned_mode} one")
    if not run.traffic:
        found.append("it has no description of its traffic")
        return found
    for name, share in _SAME_WITHIN.items():
        wanted, sent = _fact(prediction.traffic.get("facts", {}), name), _fact(run.traffic, name)
        if abs(wanted - sent) > share * max(abs(wanted), abs(sent)):
            found.append(f"its traffic's {name} was {sent:.4g}, planned {wanted:.4g}")
    return found


def residuals_of(prediction: Prediction, verdict: Verdict) -> list[Residual]:
    """Against the uncorrected prediction. None for a forced score."""
    if verdict.caveats:
        return []
    now = datetime.now(tz=UTC).isoformat(timespec="seconds")
    found = []
    for score in verdict.scores:
        computed = prediction.uncorrected.get(score.metric, score.predicted)
        found.append(
            Residual(
                hardware=prediction.hardware,
                model=prediction.model,
                method=prediction.method,
                metric=score.metric,
                predicted=computed.mid,
                low=computed.low,
                high=computed.high,
                measured=score.measured,
                run=verdict.run.name,
                at=now,
            )
        )
    return found


def store(prediction: Prediction, verdict: Verdict, path: Path | None = None) -> Path | None:
    """Store the residuals; None if there are none."""
    residuals = residuals_of(prediction, verdict)
    return append_residuals(residuals, path) if residuals else None


def verdict_facts(verdict: Verdict) -> dict[str, Any]:
    """For JSON."""
    return {
        "run": verdict.run.name,
        "median_error": verdict.median_error,
        "inside": verdict.inside,
        "scores": [
            {
                "metric": score.metric,
                "predicted": score.predicted.mid,
                "low": score.predicted.low,
                "high": score.predicted.high,
                "measured": score.measured,
                "error": score.error,
                "inside": score.is_inside,
            }
            for score in verdict.scores
        ],
        "missing": list(verdict.missing),
        "caveats": list(verdict.caveats),
    }


def _is_same_model(planned: str, ran: str) -> bool:
    """A server may use a model's bare name."""
    names = [name.rstrip("/").rpartition("/")[2].lower().removesuffix(".gguf") for name in (planned, ran)]
    return names[0] == names[1]


def _fact(facts: Mapping[str, Any], name: str) -> float:
    """A figure by its dotted name; missing or None counts as 0."""
    value: Any = facts
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return float(value or 0.0)
