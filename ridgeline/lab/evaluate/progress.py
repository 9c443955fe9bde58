"""Progress of an evaluation on stderr: a bar per task on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TextIO

LINE_EVERY_S = 5.0
OnProgress = Callable[[str, int, int], None]  # (what, done, total)


@contextlib.contextmanager
def shown(stream: TextIO, clock: Callable[[], float] = time.monotonic) -> Iterator[OnProgress]:
    if not stream.isatty():
        yield _lines(stream, clock)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=stream)) as bars:
        known = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in known:  # items of an earlier run count as done, not as speed
                known[what] = bars.add_task(what, total=total, completed=done)
            bars.update(known[what], completed=done, total=total)

        yield report


def _lines(stream: TextIO, clock: Callable[[], float]) -> OnProgress:
    next_at: dict[str, float] = {}

    def report(what: str, done: int, total: int) -> None:
        if done >= total or clock() >= next_at.get(what, 0.0):
            next_at[what] = clock() + LINE_EVERY_S
            print(f"{what}: {done} of {total}", file=stream, flush=True)

    return report
