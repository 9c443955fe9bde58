"""Rows of a trace file and their errors, by line. Made by `traces`, converted to Traffic here.

Nothing is repaired silently: an unreadable or out-of-order row stops the reading with a list of lines, unless
the caller chose to skip such rows; then the traffic's notes count them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from ridgeline.lab.errors import BadInput
from ridgeline.lab.traffic.request import PlannedRequest, Traffic

T = TypeVar("T")

SHOWN = 5  # problems listed in an error
# Steps of coarse timestamps; finer ones count as exact.
STEPS_S = (60.0, 30.0, 15.0, 10.0, 5.0, 3.0, 2.0, 1.0, 0.5, 0.2, 0.1)
JITTER_S, JITTER_SHARE = 0.005, 0.01  # tolerance of a timestamp's step: a timer's delay
ON_GRID = 0.99  # of the gaps must be multiples of the step
SILENCE_S, SILENCE_GAPS = 60.0, 10.0  # gaps longer than this, and than this many mean gaps, are noted


@dataclass(frozen=True, slots=True)
class Row:
    line: int
    at: float  # seconds, from any beginning
    input_tokens: int
    output_tokens: int
    prefix: tuple[int, ...] = ()


@dataclass(slots=True)
class Trace:
    """A file's rows as they are read, with the problems found. `notes` are for non-errors."""

    path: Path
    skip_bad_rows: bool
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _bad: list[tuple[int, str]] = field(default_factory=list)

    def add(self, row: Row) -> None:
        if row.input_tokens < 1 or row.output_tokens < 1:
            name, value = (
                ("input", row.input_tokens) if row.input_tokens < 1 else ("output", row.output_tokens)
            )
            self.bad(row.line, f"{name} tokens are {value}, not at least 1")
        elif not np.isfinite(row.at):
            self.bad(row.line, "the timestamp is not a finite number")
        else:
            self.rows.append(row)

    def bad(self, line: int, reason: str) -> None:
        self._bad.append((line, reason))

    def note_unanswered(self, count: int) -> None:
        if count:
            self.notes.append(f"{count} requests without an output token were left out")

    def lines(self) -> Iterator[tuple[int, str]]:
        """The file's non-empty lines with their numbers."""
        empty: list[int] = []  # since the last non-empty line; trailing ones are ignored
        skipped: list[int] = []
        try:
            with self.path.open(encoding="utf-8-sig", errors="replace", newline=None) as file:
                for number, line in enumerate(file, start=1):
                    if not line.strip():
                        empty.append(number)
                        continue
                    skipped += empty
                    empty.clear()
                    yield number, line.rstrip("\n")
        except OSError as error:
            raise BadInput(f"{self.path}: cannot be read: {error.strerror}") from error
        if skipped:
            self.notes.append(f"{len(skipped)} lines are empty, the first of them line {skipped[0]}")

    def decoded(self, decoder: msgspec.json.Decoder[T]) -> Iterator[tuple[int, T]]:
        """The lines as JSON objects, with their numbers; a line of another form is bad."""
        for number, line in self.lines():
            try:
                yield number, decoder.decode(line)
            except msgspec.ValidationError as error:
                self.bad(number, str(error).replace("$.", "").replace("`", "'"))
            except msgspec.DecodeError:
                self.bad(number, "is not a complete JSON object")

    def traffic(
        self, prefix_block_tokens: int = 0, spread: np.random.Generator | None = None, is_sorted: bool = True
    ) -> Traffic:
        """The requests from time 0 on. spread: for coarse timestamps. is_sorted: the file should be."""
        self._check_order(is_sorted)
        self.refuse_bad(has_rows=bool(self.rows))
        self.rows.sort(key=lambda row: row.at)
        self._note_silences()
        at = np.array([row.at for row in self.rows])
        if spread is not None:
            at = self._spread(at, spread)
        at -= at[0]
        requests = tuple(
            PlannedRequest(moment, row.input_tokens, row.output_tokens, row.prefix)
            for moment, row in zip(at.tolist(), self.rows, strict=True)
        )
        return Traffic(self.path.stem, requests, prefix_block_tokens, tuple(self.notes))

    def refuse_bad(self, has_rows: bool) -> None:
        """BadInput with the unusable lines, or if there are no rows."""
        self._report()
        if not has_rows:
            raise BadInput(f"{self.path}: contains no requests")

    def _check_order(self, is_sorted: bool) -> None:
        if not is_sorted:
            return
        late = 0
        for before, row in zip(self.rows, self.rows[1:], strict=False):
            if row.at < before.at:
                late += 1
                if not self.skip_bad_rows:
                    early_s = before.at - row.at
                    self.bad(row.line, f"comes {early_s:.3f} s before line {before.line}, out of order")
        if late:
            self.notes.append(f"{late} rows were out of order and were sorted")

    def _report(self) -> None:
        if not self._bad:
            return
        self._bad.sort()
        shown = "; ".join(f"line {line}: {reason}" for line, reason in self._bad[:SHOWN])
        more = f"; and {len(self._bad) - SHOWN} more" if len(self._bad) > SHOWN else ""
        if not self.skip_bad_rows:
            raise BadInput(
                f"{self.path}: {len(self._bad)} bad rows: {shown}{more}. Correct them, or skip them "
                "with --skip-bad-rows"
            )
        self.notes.append(f"{len(self._bad)} bad rows were left out ({shown}{more})")

    def _note_silences(self) -> None:
        at = np.array([row.at for row in self.rows])
        gaps = np.diff(at)
        if not gaps.size:
            return
        long = np.flatnonzero(gaps > max(SILENCE_S, SILENCE_GAPS * float(gaps.mean())))
        if long.size:
            longest = int(long[np.argmax(gaps[long])])
            others = f", and {long.size - 1} more such gaps" if long.size > 1 else ""
            line = self.rows[longest + 1].line
            self.notes.append(f"no request for {gaps[longest]:.0f} s before line {line}{others}")

    def _spread(self, at: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """Requests with equal timestamps, uniformly random until the next step, in file order."""
        stamps, counts = np.unique(at, return_counts=True)
        step = _step_s(stamps)
        if step is None or counts.max() < 2:
            return at
        widths = np.minimum(np.append(np.diff(stamps), step), step)
        parts = [
            stamp + np.sort(random.random(count)) * width
            for stamp, count, width in zip(stamps, counts, widths, strict=True)
        ]
        self.notes.append(f"timestamps have steps of {step:g} s: arrivals were spread randomly within each")
        return np.concatenate(parts)


def _step_s(stamps: np.ndarray) -> float | None:
    """The largest step of which all gaps are multiples; None: the timestamps are exact.

    All timestamps are checked: two equal ones are not evidence, since arrivals can coincide.
    """
    gaps = np.diff(stamps)
    if not gaps.size:
        return None
    for step in STEPS_S:
        off = np.abs(gaps - np.round(gaps / step) * step)
        if np.mean(off <= min(JITTER_S, JITTER_SHARE * step)) >= ON_GRID:
            return step
    return None
