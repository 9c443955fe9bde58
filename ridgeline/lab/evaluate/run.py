"""Runs tasks on a subject: the items that have no outcome yet, in order, in batches, each batch stored.

The order and the sample depend on the seed and the data alone. Before the first item, tasks that the subject
or this system cannot do are refused by name.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ridgeline.lab.errors import LabError
from ridgeline.lab.evaluate import sandbox
from ridgeline.lab.evaluate.progress import OnProgress
from ridgeline.lab.evaluate.scoring.generated import judged_text, program_of
from ridgeline.lab.evaluate.scoring.likelihood import judged, pairs_of
from ridgeline.lab.evaluate.scoring.outcome import Outcome
from ridgeline.lab.evaluate.store import ResultsFolder
from ridgeline.lab.evaluate.subjects.subject import Prompt, Subject
from ridgeline.lab.evaluate.tasks.items import Item, Passage, Program, Question, digest_of
from ridgeline.lab.evaluate.tasks.table import Task
from ridgeline.machine import usable_cpus

BATCHES = 2  # items of a batch per item in flight: fewer pauses between batches


@dataclass(frozen=True, slots=True)
class RunSettings:
    """top: top tokens to store for each position of a text. backwards: the other order, for a second run."""

    concurrency: int = 8
    top: int = 0
    backwards: bool = False
    label: str = ""  # before the task's name in progress lines


def sampled(items: Sequence[Item], limit: int | None, seed: int, task: str) -> tuple[Item, ...]:
    """At most `limit` items, the same for every subject, in the order of the data."""
    if limit is None or limit >= len(items):
        return tuple(items)
    places = random.Random(f"{seed}:{task}").sample(range(len(items)), limit)
    return tuple(items[place] for place in sorted(places))


def refuse_impossible(subject: Subject, tasks: Sequence[Task]) -> None:
    """LabError for what cannot run, before anything is asked."""
    needing = [task.name for task in tasks if task.needs_logprobs]
    refusal = subject.refuse_scoring() if needing else None
    if refusal:
        raise LabError(f"{', '.join(needing)}: {refusal}")
    programs = [task.name for task in tasks if isinstance(task.items[0], Program)]
    if programs:
        if subject.chat_only:
            raise LabError(
                f"{', '.join(programs)}: {subject.name} has only a chat endpoint, whose answers do not "
                "continue the beginning of a program; use a server with /v1/completions"
            )
        unconfined = sandbox.refusal()
        if unconfined:
            raise LabError(unconfined)


def run_tasks(
    subject: Subject,
    tasks: Sequence[Task],
    results: ResultsFolder,
    settings: RunSettings,
    on_progress: OnProgress,
) -> dict[str, list[Outcome]]:
    """The outcomes by task, in the order of its items."""
    refuse_impossible(subject, tasks)
    return {task.name: _run(subject, task, results, settings, on_progress) for task in tasks}


def _run(
    subject: Subject, task: Task, results: ResultsFolder, settings: RunSettings, on_progress: OnProgress
) -> list[Outcome]:
    top = min(settings.top, subject.most_top) if task.is_text else 0
    keys = [(task.name, item.id, digest_of(item)) for item in task.items]
    open_items = [
        item
        for item, key in zip(task.items, keys, strict=True)
        if results.outcome(key) is None or (top and not results.has_scores(key[2], top))
    ]
    if settings.backwards:
        open_items.reverse()
    total, what = len(task.items), settings.label + task.name
    on_progress(what, total - len(open_items), total)
    size = BATCHES * settings.concurrency
    for start in range(0, len(open_items), size):
        batch = open_items[start : start + size]
        results.add(_answered(subject, task.name, batch, top, settings.concurrency, results))
        on_progress(what, total - len(open_items) + start + len(batch), total)
    found = [results.outcome(key) for key in keys]
    assert all(outcome is not None for outcome in found)
    return [outcome for outcome in found if outcome is not None]


def _answered(
    subject: Subject, task: str, batch: Sequence[Item], top: int, concurrency: int, results: ResultsFolder
) -> list[Outcome]:
    if isinstance(batch[0], Question | Program):
        return _generated(subject, task, batch, concurrency)
    has_prefix = subject.prefix is not None
    pairs = [pairs_of(item, has_prefix) for item in batch]  # type: ignore[arg-type]
    scores = iter(subject.score([pair for group in pairs for pair in group], top, concurrency))
    found = []
    for item, group in zip(batch, pairs, strict=True):
        own = [next(scores) for _ in group]
        if not all(math.isfinite(one.likelihood.logprob) for one in own):
            raise LabError(
                f"{task}, item {item.id}: {subject.name} gives a log-probability that is not finite"
            )
        values, answer = judged(item, [one.likelihood for one in own], has_prefix)  # type: ignore[arg-type]
        digest = digest_of(item)
        if isinstance(item, Passage) and own[0].tokens is not None:
            results.add_scores(digest, own[0].tokens)
        found.append(Outcome(task, item.id, digest, values, answer))
    return found


def _generated(subject: Subject, task: str, batch: Sequence[Item], concurrency: int) -> list[Outcome]:
    asked = [item for item in batch if isinstance(item, Question | Program)]
    prompts = [Prompt(item.prompt, item.max_tokens, item.stops) for item in asked]
    answers = subject.complete(prompts, concurrency)
    with ThreadPoolExecutor(max_workers=max(1, usable_cpus())) as pool:
        return list(
            pool.map(lambda pair: _judged(task, pair[0], pair[1].text), zip(asked, answers, strict=True))
        )


def _judged(task: str, item: Question | Program, text: str) -> Outcome:
    digest = digest_of(item)
    if isinstance(item, Question):
        values, answer = judged_text(item, text)
        return Outcome(task, item.id, digest, values, answer, text if text.strip() != answer else "")
    ran = sandbox.run_program(program_of(item, text))
    return Outcome(task, item.id, digest, {"pass@1": float(ran.passed)}, text, note=ran.reason)
