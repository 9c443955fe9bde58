"""Ledger: every run and verdict of a tuning, one JSON line each, on disk before anything else happens.

Appended and synced as each run ends, so that a crash loses only the current run. The search reads its history
here and continues where it stopped. One writer at a time.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from ridgeline.lab.errors import BadInput, LabError

FILE, VERSION = "ledger.jsonl", 1
NOISE_TRIAL = 0  # the first trial changes nothing: it measures noise

Settings = dict[str, Any]  # of EngineConfig, those that differ from its defaults
Arm = Literal["a", "b"]  # the parent's settings, or the changed ones
Outcome = Literal["measured", "refused", "died", "invalid"]
Decision = Literal["noise", "accepted", "rejected", "refused", "died", "undecided"]


class Header(msgspec.Struct, frozen=True, tag="header", tag_field="kind"):
    """The tuned model and the measurement: the same for all runs of a ledger."""

    model: str
    base: Settings
    objective: str  # a metric of a run's summary
    workload: dict[str, Any]
    rounds: int
    seed: int = 0
    slo: str = ""
    space: dict[str, list[Any]] = {}  # the search space, for resuming
    version: int = VERSION

    @property
    def is_open(self) -> bool:
        """Requests have planned times: there is no concurrency."""
        return self.workload.get("concurrency", 0) is None


class Trial(msgspec.Struct, frozen=True, tag="trial", tag_field="kind"):
    """A started trial. It starts from the settings of its parent, another trial, and changes one key."""

    number: int
    parent: int
    key: str  # "" for the noise
    before: Any
    after: Any
    settings: Settings  # of the parent


class Run(msgspec.Struct, frozen=True, tag="run", tag_field="kind"):
    trial: int
    round: int
    arm: Arm
    settings: Settings
    outcome: Outcome
    metrics: dict[str, float] = {}
    reason: str = ""  # if nothing was measured
    seconds: float = 0.0
    at: str = ""  # ISO 8601, UTC


class Effect(msgspec.Struct, frozen=True):
    """The relative change of a metric with its 95 % interval: 0.05 is 5 % more.

    noise: the difference between two runs of the same settings; 0.05: up to 1.05 times, or down to 1/1.05.
    """

    change: float
    low: float
    high: float
    noise: float | None = None

    @property
    def is_beyond_noise(self) -> bool:
        return not self.low <= 0 <= self.high and self.factor > 1 + (self.noise or 0.0)

    @property
    def factor(self) -> float:
        """The ratio, always at least 1: halving is as large as doubling."""
        return max(1 + self.change, 1 / (1 + self.change))

    @property
    def most_factor(self) -> float:
        """The same for the further end of the interval."""
        return max(1 + self.high, 1 / (1 + self.low))


class Verdict(msgspec.Struct, frozen=True, tag="verdict", tag_field="kind"):
    trial: int
    decision: Decision
    reason: str
    rounds: int  # that were complete
    effects: dict[str, Effect] = {}


Entry = Header | Trial | Run | Verdict


class Ledger:
    """Entries in memory and in the file. A line truncated by a crash is removed when it is opened."""

    def __init__(self, folder: Path, *, write: bool = True) -> None:
        self.folder = folder
        self.path = folder / FILE
        self._file = None
        if write:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab")
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                self._file.close()
                raise LabError(
                    f"{self.path}: in use by another tuning; wait, or use another --ledger"
                ) from None
        elif not self.path.exists():
            raise BadInput(f"{self.path}: there is no ledger")
        self.entries: list[Entry] = []
        try:
            whole = self._read()
            if self._file is not None and whole < self.path.stat().st_size:
                self._file.truncate(whole)
        except BaseException:
            self.close()
            raise

    def append(self, entry: Entry) -> None:
        """On disk when this returns."""
        assert self._file is not None, "opened for reading"
        self._file.write(msgspec.json.encode(entry) + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.entries.append(entry)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---- what it says ----

    @property
    def header(self) -> Header | None:
        return next((entry for entry in self.entries if isinstance(entry, Header)), None)

    @property
    def trials(self) -> list[Trial]:
        return [entry for entry in self.entries if isinstance(entry, Trial)]

    def verdict(self, trial: int) -> Verdict | None:
        return next((e for e in self.entries if isinstance(e, Verdict) and e.trial == trial), None)

    def runs(self, trial: int | None = None) -> Iterator[Run]:
        """In order; of one trial, or of all."""
        for entry in self.entries:
            if isinstance(entry, Run) and trial in (None, entry.trial):
                yield entry

    def rounds(self, trial: int) -> list[tuple[Run, Run]]:
        """Complete rounds: an "a" and the "b" run right after it. A round that lost one half to a crash is
        run again completely, so that both halves are close in time.
        """
        pairs: dict[int, tuple[Run, Run]] = {}
        before: Run | None = None
        for run in self.runs(trial):
            if run.arm == "b" and before is not None and before.arm == "a" and before.round == run.round:
                pairs[run.round] = (before, run)
            before = run
        return [pairs[number] for number in sorted(pairs)]

    def _read(self) -> int:
        """Entries of the file; returns the number of bytes in complete lines."""
        decoder: msgspec.json.Decoder[Entry] = msgspec.json.Decoder(Entry)
        whole = 0
        lines = self.path.read_bytes().splitlines(keepends=True)
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                break  # the last line is incomplete
            try:
                self.entries.append(decoder.decode(line))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise BadInput(f"{self.path}, line {number}: {error}") from error
            whole += len(line)
        header = self.header
        if self.entries and header is None:
            raise BadInput(f"{self.path}: its first line is not a header: not a ledger")
        if header is not None and header.version != VERSION:
            raise BadInput(f"{self.path}: written as version {header.version}, this is version {VERSION}")
        return whole
