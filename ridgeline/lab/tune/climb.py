"""Climb: changes one setting at a time, measures it against its parent, and keeps it if better beyond noise.

`measure` runs a configuration: servers under load in `ridgeline tune`, a formula in tests. Each trial is
rounds of A and B in turn. Everything is in the ledger; a restarted climb reuses its measurements and
continues where the last one stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from ridgeline.lab.errors import BadInput, LabError
from ridgeline.lab.slo import Slo, parse_slo
from ridgeline.lab.tune.effects import Metrics, decide, effects, means, more_is_better
from ridgeline.lab.tune.ledger import (
    NOISE_TRIAL,
    Arm,
    Decision,
    Effect,
    Header,
    Ledger,
    Outcome,
    Run,
    Settings,
    Trial,
    Verdict,
)

LEAST_ROUNDS = 2


class NotMeasured(LabError):
    """A run without figures: its settings were refused, its server died, or the run is invalid."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome: Outcome = outcome


@dataclass(frozen=True, slots=True)
class RunId:
    """Identifies a run of the ledger. All halves of a round have the same traffic, in any trial."""

    trial: int
    round: int
    arm: Arm


Measure = Callable[[Settings, RunId], Metrics]
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Search:
    """The search space and its time budget."""

    space: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    trial_s: float | None = None
    budget_s: float | None = None


@dataclass(slots=True)
class Place:
    """The position of a climb: the trial that led there, its settings, and the settings before."""

    trial: int
    settings: Settings
    path: list[Settings] = field(default_factory=list)


class OutOfTime(Exception):
    """The time budget of the whole search is used up."""


class Climb:
    def __init__(
        self,
        ledger: Ledger,
        measure: Measure,
        search: Search,
        report: Report = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        header = ledger.header
        if header is None:
            raise LabError("a ledger needs its header before the first trial")
        if header.rounds < LEAST_ROUNDS:
            raise BadInput(f"--rounds must be at least {LEAST_ROUNDS}: one round has no interval")
        more_is_better(header.objective)  # raises if it has no direction
        self.ledger, self.header = ledger, header
        self._measure, self._search, self._report, self._clock = measure, search, report, clock
        self._slo = limits_of(header)
        self._started = clock()

    def run(self) -> str:
        """Climb until no single change helps, or time is up. Returns how it ended."""
        try:
            self.noise()
            place = Place(NOISE_TRIAL, dict(self.header.base))
            while True:
                before = place.trial
                for key, values in self._search.space.items():
                    self._along(key, values, place)
                if place.trial == before:
                    return "no single change is better beyond the noise"
        except OutOfTime:
            return "the time budget was used up"

    def noise(self) -> dict[str, Effect]:
        """A against A: differences between runs of the same settings. Measured once, first."""
        trial = self._find(NOISE_TRIAL, self.header.base, "", None) or self._begin(
            NOISE_TRIAL, self.header.base, "", None
        )
        verdict = self.ledger.verdict(trial.number) or self._measured(trial, noise=None)
        if verdict.decision != "noise":
            raise LabError(
                f"the initial settings cannot be measured: {verdict.reason}; a restart tries them again"
            )
        return verdict.effects

    def trial(self, change: Settings, parent: int = NOISE_TRIAL) -> Verdict:
        """Measure one change of one key against the settings of an earlier trial."""
        key, value = only_change(change)
        noise = self.noise()
        settings = self.settings_after(parent)
        if settings.get(key) == value:
            raise BadInput(f"{key} is already {value!r} in the settings of trial {parent}")
        trial = self._find(parent, settings, key, value) or self._begin(parent, settings, key, value)
        return self.ledger.verdict(trial.number) or self._measured(trial, noise)

    def settings_after(self, number: int) -> Settings:
        """The settings that a trial tried; for the noise trial, the initial settings."""
        if number == NOISE_TRIAL:
            return dict(self.header.base)
        trial = next((trial for trial in self.ledger.trials if trial.number == number), None)
        if trial is None:
            raise BadInput(f"there is no trial {number} in {self.ledger.path}")
        return changed(trial)

    # ---- the search ----

    def _along(self, key: str, values: Sequence[Any], place: Place) -> None:
        """Change one key while it improves: up, or else down, one value at a time."""
        directions: tuple[int, ...] = (1, -1)
        if place.settings.get(key) not in values:  # e.g. unset: the first that is better, then on from there
            if not any(self._step(key, value, place) for value in values):
                return
            directions = (1,)  # those below were tried
        for direction in directions:
            before = place.trial
            for value in ahead(values, place.settings.get(key), direction):
                if not self._step(key, value, place):
                    break
            if place.trial != before:
                return

    def _step(self, key: str, value: Any, place: Place) -> bool:
        settings = place.settings | {key: value}
        if settings in place.path:  # a previous position: known to be worse
            return False
        verdict = self.trial({key: value}, place.trial)
        if verdict.decision != "accepted":
            return False
        place.path.append(place.settings)
        place.trial, place.settings = verdict.trial, settings
        return True

    # ---- one trial ----

    def _measured(self, trial: Trial, noise: Mapping[str, Effect] | None) -> Verdict:
        begun = self._clock()
        pairs = self.ledger.rounds(trial.number)
        if noise is None:  # everything depends on it: run it again if not measured
            pairs = [pair for pair in pairs if _failure([pair]) is None]
        failure = _failure(pairs)
        while failure is None and len(pairs) < self.header.rounds:
            now = self._clock()
            if self._search.budget_s is not None and now - self._started >= self._search.budget_s:
                raise OutOfTime
            if self._search.trial_s is not None and pairs and now - begun >= self._search.trial_s:
                break
            pairs.append(self._round(trial, len(pairs)))
            failure = _failure(pairs[-1:])
        verdict = self._verdict(trial, pairs, failure, noise)
        if noise is not None or verdict.decision == "noise":
            self.ledger.append(verdict)
        self._report(f"trial {trial.number}: {verdict.decision}: {verdict.reason}")
        return verdict

    def _round(self, trial: Trial, number: int) -> tuple[Run, Run]:
        """A, then B. If A gives no figures B is not run; the ledger records A's reason."""
        first = self._run(RunId(trial.number, number, "a"), trial.settings)
        if first.outcome != "measured":
            return first, first
        return first, self._run(RunId(trial.number, number, "b"), changed(trial))

    def _run(self, which: RunId, settings: Settings) -> Run:
        begun, at = self._clock(), datetime.now(UTC).isoformat(timespec="seconds")
        outcome: Outcome = "measured"
        metrics: dict[str, float] = {}
        reason = ""
        try:
            metrics = dict(self._measure(settings, which))
        except NotMeasured as error:
            outcome, reason = error.outcome, str(error)
        run = Run(
            which.trial,
            which.round,
            which.arm,
            settings,
            outcome,
            metrics,
            reason,
            round(self._clock() - begun, 3),
            at,
        )
        self.ledger.append(run)
        value = metrics.get(self.header.objective)
        said = reason if value is None else f"{self.header.objective} {value:.4g}"
        self._report(f"trial {which.trial}, round {which.round + 1}{which.arm.upper()}: {said}")
        return run

    def _verdict(
        self,
        trial: Trial,
        pairs: Sequence[tuple[Run, Run]],
        failure: Run | None,
        noise: Mapping[str, Effect] | None,
    ) -> Verdict:
        if failure is not None:
            whose = "" if failure.arm == "b" else "the parent: "
            decision: Decision = "undecided"
            if failure.arm == "b" and failure.outcome != "invalid":
                decision = "refused" if failure.outcome == "refused" else "died"
            return Verdict(trial.number, decision, whose + failure.reason, len(pairs) - 1)
        figures = [(a.metrics, b.metrics) for a, b in pairs]
        found = effects(figures, noise)
        if len(pairs) < LEAST_ROUNDS:
            return Verdict(trial.number, "undecided", "out of time after one round", len(pairs))
        if noise is None:
            own = found.get(self.header.objective)
            if own is None:
                return Verdict(
                    trial.number, "undecided", f"{self.header.objective} was not measured", len(pairs)
                )
            most = own.most_factor - 1
            reason = f"{self.header.objective} differs by up to {most:.1%} between equal settings"
            return Verdict(trial.number, "noise", reason, len(pairs), found)
        before, after = means([a for a, _ in figures]), means([b for _, b in figures])
        failures = after.get("failures", 0.0) - before.get("failures", 0.0)
        decision, reason = decide(found, self.header.objective, after, self._slo, failures)
        return Verdict(trial.number, decision, reason, len(pairs), found)

    def _find(self, parent: int, settings: Settings, key: str, value: Any) -> Trial | None:
        """The trial of this change to these settings, if there was one, whatever its parent."""
        for trial in self.ledger.trials:
            if (trial.key, trial.after) == (key, value) and trial.settings == settings:
                return trial
        return None

    def _begin(self, parent: int, settings: Settings, key: str, value: Any) -> Trial:
        number = max((trial.number for trial in self.ledger.trials), default=NOISE_TRIAL - 1) + 1
        trial = Trial(number, parent, key, settings.get(key), value, dict(settings))
        self.ledger.append(trial)
        what = f"{key} {trial.before!r} → {value!r}" if key else "the same settings twice: noise"
        self._report(f"trial {number} (parent {parent}): {what}")
        return trial


def only_change(change: Settings) -> tuple[str, Any]:
    """The one key that a trial changes. With two, the effect could not be attributed."""
    if len(change) != 1:
        named = ", ".join(change) or "none"
        raise BadInput(f"a trial changes one key, not {len(change)} ({named}): make a trial of each")
    ((key, value),) = change.items()
    return key, value


def changed(trial: Trial) -> Settings:
    return dict(trial.settings) if not trial.key else trial.settings | {trial.key: trial.after}


def ahead(values: Sequence[Any], now: Any, direction: int) -> Iterator[Any]:
    """The values on one side of `now`, nearest first."""
    at = list(values).index(now)
    yield from values[at + 1 :] if direction > 0 else reversed(values[:at])


def limits_of(header: Header) -> Slo | None:
    """In open loops latency counts from the planned time, as in the bench: for ttft and e2e."""
    if not header.slo:
        return None
    slo = parse_slo(header.slo)
    if not header.is_open:
        return slo
    return Slo(
        tuple(
            replace(limit, metric=f"{limit.metric}_sched") if limit.metric in ("ttft", "e2e") else limit
            for limit in slo.limits
        )
    )


def _failure(pairs: Sequence[tuple[Run, Run]]) -> Run | None:
    return next((run for pair in pairs for run in pair if run.outcome != "measured"), None)
