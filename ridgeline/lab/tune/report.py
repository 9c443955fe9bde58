"""A ledger as text: its trials with their effects, the front, and the winning configuration as TOML."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from ridgeline.lab.errors import BadInput
from ridgeline.lab.tune.effects import more_is_better, percent
from ridgeline.lab.tune.front import Point, front, points
from ridgeline.lab.tune.ledger import NOISE_TRIAL, Effect, Header, Ledger, Settings, Trial, Verdict

CONFIG_FILE = "winner.toml"
SHOWN = ("output_tokens_per_s", "ttft_ms.p90", "tpot_ms.p90", "e2e_ms.p90")
SHOWN_OPEN = ("output_tokens_per_s", "ttft_sched_ms.p90", "tpot_ms.p90", "e2e_sched_ms.p90")
# These change the model's answers, not only the speed.
CHANGE_ANSWERS = ("weights", "kv_dtype", "load_format")


def header_of(ledger: Ledger) -> Header:
    header = ledger.header
    if header is None:
        raise BadInput(f"{ledger.path}: it is empty")
    return header


def winner(ledger: Ledger) -> tuple[Settings, list[tuple[Trial, Verdict]]]:
    """The settings at the end of the longest path of accepted changes, and that path."""
    decided = {trial.number: (trial, ledger.verdict(trial.number)) for trial in ledger.trials}
    ways: dict[int, list[tuple[Trial, Verdict]]] = {NOISE_TRIAL: []}
    for number, (trial, verdict) in decided.items():
        if number and verdict is not None and verdict.decision == "accepted" and trial.parent in ways:
            ways[number] = [*ways[trial.parent], (trial, verdict)]
    way = max(ways.values(), key=lambda steps: _gain(steps, header_of(ledger).objective))
    settings = dict(header_of(ledger).base)
    for trial, _ in way:
        settings[trial.key] = trial.after
    return settings, way


def _gain(way: list[tuple[Trial, Verdict]], objective: str) -> float:
    """The total improvement of the objective along the path, as a factor above 1."""
    gain = 1.0
    for _, verdict in way:
        gain *= verdict.effects[objective].factor  # accepted changes are improvements in either direction
    return gain


def write_winner(ledger: Ledger, path: Path) -> None:
    path.write_text(winner_toml(ledger), encoding="utf-8")


def winner_toml(ledger: Ledger) -> str:
    """Settings for `ridgeline serve --config`; each change with its measured effect."""
    header = header_of(ledger)
    settings, way = winner(ledger)
    lines = [
        f"# Found by `ridgeline tune`: {sum(1 for _ in ledger.runs())} runs, {len(ledger.trials)} trials.",
        f"# Objective {header.objective}; intervals of 95 %, of {header.rounds} interleaved rounds each.",
        "[engine]",
        f"model = {json.dumps(header.model)}",
    ]
    changes: dict[str, list[str]] = {}
    for trial, verdict in way:
        before = "unset" if trial.before is None else json.dumps(trial.before)
        told = [name for name in told_metrics(header) if name in verdict.effects]
        changes.setdefault(trial.key, []).append(f"# trial {trial.number}, was {before}:")
        changes[trial.key] += [f"#   {name} {percent(verdict.effects[name])}" for name in told]
    for key, value in settings.items():
        lines += ["", *changes.get(key, ["# initial setting"]), f"{key} = {json.dumps(value)}"]
    return "\n".join([*lines, ""])


def ledger_lines(ledger: Ledger, latency: str, usd_per_hour: float | None) -> Iterator[str]:
    header = header_of(ledger)
    runs = list(ledger.runs())
    seconds = sum(run.seconds for run in runs)
    yield f"{header.model}: {len(ledger.trials)} trials, {len(runs)} runs, {seconds:.0f} s"
    yield f"objective {header.objective}; {header.rounds} rounds of A and B a trial" + (
        f"; limits {header.slo}" if header.slo else ""
    )
    yield f"started from {settings_text(header.base)}"
    yield ""
    yield f"{'trial':>5} {'parent':>6}  {'change':<34} {'decision':<10} {header.objective} and others"
    for trial in ledger.trials:
        yield from _trial_lines(trial, ledger.verdict(trial.number), header)
    yield ""
    yield from front_lines(points(ledger, latency, usd_per_hour), latency)
    settings, way = winner(ledger)
    yield ""
    yield f"winner: {settings_text(settings)}" + (
        "" if way else " (initial settings: no change was accepted)"
    )
    risky = sorted({trial.key for trial, _ in way} & set(CHANGE_ANSWERS))
    if risky:
        yield f"{', '.join(risky)} also changes the answers: check their quality before serving this"


def front_lines(found: list[Point], latency: str) -> Iterator[str]:
    best = front(found)
    yield f"front of {len(found)} configurations: none is better in throughput, {latency} and cost at once"
    yield f"  {'tok/s':>9} {latency:>16} {'$/Mtok out':>11} {'trial':>5}  settings"
    for point in best:
        cost = "–" if point.usd_per_mtok is None else f"{point.usd_per_mtok:.3f}"
        rate, time = f"{point.tokens_per_s:,.1f}", f"{point.latency_ms:,.1f}"
        yield f"  {rate:>9} {time:>16} {cost:>11} {point.trial:>5}  {settings_text(point.settings)}"


def _trial_lines(trial: Trial, verdict: Verdict | None, header: Header) -> Iterator[str]:
    parent = "" if not trial.key else str(trial.parent)
    decision = "unfinished" if verdict is None else verdict.decision
    head = f"{trial.number:>5} {parent:>6}  {change_text(trial):<34} {decision:<10} "
    if verdict is None or not verdict.effects:
        yield head + ("" if verdict is None else verdict.reason)
        return
    told = [(name, verdict.effects[name]) for name in told_metrics(header) if name in verdict.effects]
    for at, (name, effect) in enumerate(told):
        text = percent(effect) if at == 0 else f"{name} {percent(effect)}"
        meaning = f"  {effect_text(name, effect)}" if trial.key else ""
        yield (head if at == 0 else " " * len(head)) + text + meaning


def told_metrics(header: Header) -> tuple[str, ...]:
    """The objective first, then other metrics of interest."""
    shown = SHOWN_OPEN if header.is_open else SHOWN
    return (header.objective, *(name for name in shown if name != header.objective))


def settings_text(settings: Settings) -> str:
    return ", ".join(f"{key} {_value(value)}" for key, value in settings.items()) or "the defaults"


def effect_text(metric: str, effect: Effect) -> str:
    if not effect.is_beyond_noise:
        return "within the noise"
    return "better" if (effect.change > 0) == more_is_better(metric) else "worse"


def change_text(trial: Trial) -> str:
    return f"{trial.key} {_value(trial.before)} → {_value(trial.after)}" if trial.key else "none: noise"


def _value(value: object) -> str:
    return "unset" if value is None else json.dumps(value).strip('"')
