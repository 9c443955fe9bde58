"""Progress of a number of things on stderr: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Protocol, TextIO

LINE_EVERY_S = 5.0


class Report(Protocol):
    def __call__(self, done: float, name: str = ..., total: int = ..., detail: str = ...) -> None: ...


@contextlib.contextmanager
def counted(stream: TextIO, what: str, total: int) -> Iterator[Report]:
    """what: the word behind the numbers; a call may name another, with its own total.

    done: what is done of a thing in work counts as a fraction. detail: what is in work.
    """
    if not stream.isatty():
        yield _lines(stream, what, total)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description:<12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[detail]}", markup=False),
    )
    with Progress(*columns, console=Console(file=stream)) as progress:
        tasks = {what: progress.add_task(what, total=total, detail="")} if total else {}

        def report(done: float, name: str = what, total: int = total, detail: str = "") -> None:
            if name not in tasks:
                tasks[name] = progress.add_task(name, total=total, detail="")
            progress.update(tasks[name], completed=done, detail=detail)

        yield report


def _lines(stream: TextIO, what: str, total: int) -> Report:
    next_at = time.monotonic() + LINE_EVERY_S

    def report(done: float, name: str = what, total: int = total, detail: str = "") -> None:
        nonlocal next_at
        if time.monotonic() >= next_at:
            next_at = time.monotonic() + LINE_EVERY_S
            more = f"; {detail}" if detail else ""
            print(f"{int(done)} of {total} {name}{more}", file=stream, flush=True)

    return report
