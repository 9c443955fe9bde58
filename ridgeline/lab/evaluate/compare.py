"""Several subjects on the same tasks: quality, tokens per second, memory and price, and the Pareto front."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from ridgeline.lab.evaluate.evaluation import Evaluation, TaskResult, evaluate, load_tasks
from ridgeline.lab.evaluate.options import EvaluateOptions
from ridgeline.lab.evaluate.progress import OnProgress
from ridgeline.lab.evaluate.speed import tokens_per_s, usd_per_mtok
from ridgeline.lab.evaluate.subjects.open import opened
from ridgeline.version import __version__

RESULT = "compare.json"


class Entry(msgspec.Struct, frozen=True):
    """quality: the mean of the tasks' primary metrics, 0 to 1; a text counts as 1 − bits per byte / 8.
    error: its standard error. memory_bytes: weights and KV cache as planned; None for a server.
    """

    subject: str
    evaluation: Evaluation
    quality: float
    error: float
    tokens_per_s: float | None
    memory_bytes: int | None
    usd_per_mtok: float | None

    def beats(self, other: Entry) -> bool:
        """At least as good in all that the other has a figure for, and better in one."""
        pairs: list[tuple[float, float]] = [(self.quality, other.quality)]
        for own, theirs, sign in (
            (self.tokens_per_s, other.tokens_per_s, 1),
            (self.memory_bytes, other.memory_bytes, -1),
            (self.usd_per_mtok, other.usd_per_mtok, -1),
        ):
            if theirs is not None:
                if own is None:
                    return False
                pairs.append((sign * own, sign * theirs))
        return all(own >= theirs for own, theirs in pairs) and any(own > theirs for own, theirs in pairs)


class Comparison(msgspec.Struct, frozen=True):
    entries: list[Entry]
    settings: dict[str, str | int | float | None]
    version: str = __version__

    @property
    def front(self) -> list[Entry]:
        """Those that no other beats, the best quality first."""
        best = [one for one in self.entries if not any(other.beats(one) for other in self.entries)]
        return sorted(best, key=lambda entry: -entry.quality)

    def save(self, folder: Path) -> None:
        text = msgspec.json.format(msgspec.json.encode(self), indent=1)
        (folder / RESULT).write_bytes(text + b"\n")


def compare(
    subjects: Sequence[str],
    options: EvaluateOptions,
    folder: Path,
    on_progress: OnProgress,
    *,
    usd_per_hour: float | None = None,
    api_key: str = "",
) -> Comparison:
    """One after the other; each keeps its results in its own folder, and a rerun continues."""
    tasks, sizes = load_tasks(options)
    entries = []
    for number, text in enumerate(subjects, start=1):
        with opened(text, api_key) as subject:
            own = folder / f"{number}-{plain_name(text)}"

            def report(what: str, done: int, total: int, number: int = number) -> None:
                on_progress(f"{number}/{len(subjects)} · {what}", done, total)

            found = evaluate(subject, tasks, sizes, options, own, report)
            speed = tokens_per_s(subject, options.concurrency)
        quality, error = quality_of(found.tasks)
        memory = None
        if "weights_bytes" in found.facts:
            memory = int(found.facts["weights_bytes"]) + int(found.facts["kv_bytes"])
        entries.append(Entry(text, found, quality, error, speed, memory, usd_per_mtok(usd_per_hour, speed)))
    settings: dict[str, str | int | float | None] = {
        "tasks": ",".join(options.task_names),
        "limit": options.limit,
        "seed": options.seed,
        "concurrency": options.concurrency,
        "usd_per_hour": usd_per_hour,
    }
    return Comparison(entries, settings)


def quality_of(tasks: Sequence[TaskResult]) -> tuple[float, float]:
    """The mean over tasks of the primary metric, and its error (tasks are independent)."""
    values, errors = [], []
    for task in tasks:
        if task.primary:
            metric = task.metric(task.primary)
            values.append(metric.value)
            errors.append(metric.error)
        else:  # fewer bits per byte are better: the share that a byte is compressed by
            metric = task.metric("bits_per_byte")
            values.append(1.0 - metric.value / 8.0)
            errors.append(metric.error / 8.0)
    n = len(values)
    return sum(values) / n, sum(error**2 for error in errors) ** 0.5 / n


def plain_name(text: str) -> str:
    """For a folder: letters, digits, and a few marks."""
    words = "".join(mark if mark.isalnum() or mark in "-_." else "-" for mark in text.lower())
    return words.strip("-.")[:60] or "subject"
