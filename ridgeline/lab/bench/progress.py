"""Progress: the state of a run, reported a few times a second, and its display on a terminal."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TextIO

from ridgeline.lab.bench.client.client import SentRequest

RECENT = 200  # answers, whose median TTFT is shown
LINE_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class Progress:
    """phase: "warm-up" or "run". ttft_ms: median of the latest answers; None before the first."""

    phase: str
    done: int
    total: int
    failed: int
    in_flight: int
    elapsed_s: float
    output_tokens: int
    ttft_ms: float | None = None

    @property
    def line(self) -> str:
        rate = self.output_tokens / self.elapsed_s if self.elapsed_s > 0 else 0.0
        parts = [
            f"{self.done} of {self.total}",
            f"{self.in_flight} under way",
            f"{self.failed} failed" if self.failed else "",
            f"{rate:.0f} tok/s",
            "" if self.ttft_ms is None else f"TTFT {self.ttft_ms:.0f} ms",
        ]
        return f"{self.phase}: " + " · ".join(part for part in parts if part)


OnProgress = Callable[[Progress], None]


class Tally:
    """Counts requests as they end; the source of `Progress`."""

    def __init__(self, phase: str, total: int) -> None:
        self._phase, self._total = phase, total
        self._done = self._failed = self._tokens = 0
        self._ttft: deque[float] = deque(maxlen=RECENT)

    def ended(self, sent: SentRequest) -> None:
        self._done += 1
        answer = sent.answer
        if sent.status != "ok":
            self._failed += 1
            return
        self._tokens += sum(answer.chunk_tokens)
        if sent.t_send is not None and answer.chunk_at:
            self._ttft.append(answer.chunk_at[0] - sent.t_send)

    def progress(self, elapsed_s: float, in_flight: int) -> Progress:
        ttft = statistics.median(self._ttft) * 1000 if self._ttft else None
        return Progress(
            self._phase, self._done, self._total, self._failed, in_flight, elapsed_s, self._tokens, ttft
        )


@contextlib.contextmanager
def shown(stream: TextIO, clock: Callable[[], float] = time.monotonic) -> Iterator[OnProgress]:
    """A function that displays progress: a bar on a terminal, otherwise a line every few seconds."""
    if not stream.isatty():
        yield _lines(stream, clock)
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    # The bar's own thread would take CPU time from the load, so it is drawn only on updates.
    columns = (BarColumn(bar_width=24), TextColumn("{task.description}"), TimeElapsedColumn())
    with Bar(*columns, console=Console(file=stream), transient=True, auto_refresh=False) as bar:
        task = bar.add_task("", total=None)

        def report(progress: Progress) -> None:
            bar.update(task, completed=progress.done, total=progress.total, description=progress.line)
            bar.refresh()

        yield report


def _lines(stream: TextIO, clock: Callable[[], float]) -> OnProgress:
    next_at = clock() + LINE_EVERY_S

    def report(progress: Progress) -> None:
        nonlocal next_at
        if clock() >= next_at:
            next_at = clock() + LINE_EVERY_S
            print(progress.line, file=stream, flush=True)

    return report
