"""Tuning: combines a ledger, the servers and the search, for `ridgeline tune`.

An existing ledger is continued; what it measures must not change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from msgspec import structs

from ridgeline.engine.config import EngineConfig
from ridgeline.lab.errors import BadInput
from ridgeline.lab.slo import parse_slo
from ridgeline.lab.tune.climb import Climb, Report, Search
from ridgeline.lab.tune.effects import more_is_better
from ridgeline.lab.tune.ledger import Header, Ledger, Settings, Verdict
from ridgeline.lab.tune.measure import ServerMeasure, Workload
from ridgeline.lab.tune.report import CONFIG_FILE, write_winner

FEWEST_ROUNDS = 3  # Student's t of 95 % is 12.7 for two, 4.3 for three, 3.2 for four
RUNS = "runs"  # the folder of the bench runs, beside the ledger


@dataclass(frozen=True, slots=True)
class TuneRequest:
    """The goal of a new ledger."""

    model: str
    base: Settings
    workload: Workload
    objective: str
    rounds: int
    slo: str = ""
    space: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def header(self) -> Header:
        more_is_better(self.objective)
        if self.slo:
            parse_slo(self.slo)
        EngineConfig(**self.base)  # validates the initial settings
        if self.rounds < FEWEST_ROUNDS:
            raise BadInput(
                f"--rounds must be at least {FEWEST_ROUNDS}, got {self.rounds}: of two rounds the interval "
                "of 95 % is 12.7 standard errors each way, and hardly any change would be found"
            )
        return Header(
            model=self.model,
            base=self.base,
            objective=self.objective,
            workload=self.workload.as_dict(),
            rounds=self.rounds,
            seed=self.workload.traffic.seed,
            slo=self.slo,
            space={key: list(values) for key, values in self.space.items()},
        )


@contextmanager
def opened(folder: Path, request: TuneRequest | None) -> Iterator[Ledger]:
    """The ledger of this folder, created with `request` if it is new. None: it must exist."""
    if request is None and not (folder / "ledger.jsonl").exists():
        raise BadInput(f"{folder}: there is no ledger; name a MODEL to create one")
    wanted = None if request is None else request.header()
    with Ledger(folder) as ledger:
        if ledger.header is None:
            if wanted is None:
                raise BadInput(f"{ledger.path} is empty: name a MODEL to start it")
            ledger.append(wanted)
        elif wanted is not None and ledger.header != structs.replace(wanted, space=ledger.header.space):
            different = ", ".join(_differences(ledger.header, wanted))
            raise BadInput(
                f"{ledger.path} measures something else ({different}): omit those options to continue it, "
                "or name another --ledger"
            )
        yield ledger


def climb(ledger: Ledger, search: Search, report: Report, stream: TextIO | None = None) -> str:
    """Search for better settings; returns how it ended. The winner's file is always up to date."""
    try:
        return _climb(ledger, search, report, stream).run()
    finally:
        write_winner(ledger, ledger.folder / CONFIG_FILE)


def try_one(
    ledger: Ledger, change: Settings, parent: int, report: Report, stream: TextIO | None = None
) -> Verdict:
    """A single trial, by hand."""
    try:
        return _climb(ledger, Search(), report, stream).trial(change, parent)
    finally:
        write_winner(ledger, ledger.folder / CONFIG_FILE)


def _climb(ledger: Ledger, search: Search, report: Report, stream: TextIO | None) -> Climb:
    header = ledger.header
    assert header is not None
    workload = Workload.from_dict(header.workload)
    slo = parse_slo(header.slo) if header.slo else None
    measure = ServerMeasure(header.model, workload, ledger.folder / RUNS, slo, report, stream)
    return Climb(ledger, measure, search, report)


def _differences(old: Header, new: Header) -> Sequence[str]:
    def flat(header: Header) -> dict[str, Any]:
        traffic: dict[str, Any] = header.workload.get("traffic", {})
        rest = {key: value for key, value in header.workload.items() if key != "traffic"}
        own = {name: getattr(header, name) for name in ("model", "base", "objective", "rounds", "slo")}
        return own | rest | traffic

    before, after = flat(old), flat(new)
    return [
        f"{name} {before.get(name)!r}, not {after.get(name)!r}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]
