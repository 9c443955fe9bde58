"""One subject's evaluation: its tasks, its outcomes and its metrics; saved as summary.json."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ridgeline.lab.errors import BadInput
from ridgeline.lab.evaluate.options import EvaluateOptions
from ridgeline.lab.evaluate.progress import OnProgress
from ridgeline.lab.evaluate.run import RunSettings, run_tasks, sampled
from ridgeline.lab.evaluate.samples import Sample, by_id, samples_of
from ridgeline.lab.evaluate.scoring.metrics import Metric, metrics_of
from ridgeline.lab.evaluate.store import Head, ResultsFolder
from ridgeline.lab.evaluate.subjects.subject import Subject
from ridgeline.lab.evaluate.tasks.read import data_folder
from ridgeline.lab.evaluate.tasks.table import Task, load_task
from ridgeline.version import __version__

SUMMARY = "summary.json"


class TaskResult(msgspec.Struct, frozen=True):
    task: str
    items: int  # asked
    of: int  # in the data
    primary: str
    metrics: list[Metric]
    note: str = ""
    samples: list[Sample] = []

    def metric(self, name: str) -> Metric:
        return next(metric for metric in self.metrics if metric.name == name)


class Evaluation(msgspec.Struct, frozen=True):
    subject: str
    facts: dict[str, Any]
    tasks: list[TaskResult]
    seed: int
    limit: int | None
    version: str = __version__

    def save(self, folder: Path) -> None:
        text = msgspec.json.format(msgspec.json.encode(self), indent=1)
        (folder / SUMMARY).write_bytes(text + b"\n")


def load_tasks(options: EvaluateOptions) -> tuple[list[Task], dict[str, int]]:
    """The tasks with their sampled items, and the size of each data set."""
    folder = data_folder(options.data)
    tasks, sizes = [], {}
    for name in options.task_names:
        task = load_task(name, folder)
        if task.name in sizes:
            raise BadInput(f"two tasks have the name {task.name}; rename one of the files")
        sizes[task.name] = len(task.items)
        items = sampled(task.items, options.limit, options.seed, task.name)
        tasks.append(Task(task.name, items, task.primary, task.note))
    return tasks, sizes


def head_of(name: str, facts: dict[str, Any]) -> Head:
    return Head(name, str(facts.get("engine", "")), str(facts.get("identity", "")))


def evaluate(
    subject: Subject,
    tasks: Sequence[Task],
    sizes: dict[str, int],
    options: EvaluateOptions,
    folder: Path,
    on_progress: OnProgress,
) -> Evaluation:
    with ResultsFolder(folder, head_of(subject.name, subject.facts)) as results:
        settings = RunSettings(options.concurrency)
        outcomes = run_tasks(subject, tasks, results, settings, on_progress)
    found = [
        TaskResult(
            task.name,
            len(task.items),
            sizes[task.name],
            task.primary,
            metrics_of(outcomes[task.name]),
            task.note,
            samples_of(task, {subject.name: by_id(outcomes[task.name])}, options.samples),
        )
        for task in tasks
    ]
    done = Evaluation(subject.name, subject.facts, found, options.seed, options.limit)
    done.save(folder)
    return done
