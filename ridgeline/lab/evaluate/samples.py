"""Sample: an item as it was asked, the expected answer, and what the subjects answered; for reports.

Chosen from stored outcomes: nothing is asked for them. In a gate, items that flipped come first, then those
whose answer changed. Long prompts keep their end, where the question is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from ridgeline.lab.evaluate.scoring.outcome import Outcome
from ridgeline.lab.evaluate.tasks.items import (
    Choices,
    Contexts,
    Item,
    LastWord,
    Passage,
    Program,
    Question,
)
from ridgeline.lab.evaluate.tasks.table import Task

MOST_CHARACTERS = 1200


class Answer(msgspec.Struct, frozen=True):
    """One subject's. right: by the task's tested metric; None for a text, which has no right answer."""

    subject: str
    text: str
    right: bool | None = None


class Sample(msgspec.Struct, frozen=True):
    task: str
    item: str
    prompt: str
    expected: str
    answers: list[Answer]


Outcomes = Mapping[str, Outcome]  # by item id


def by_id(outcomes: Sequence[Outcome]) -> Outcomes:
    return {outcome.id: outcome for outcome in outcomes}


def samples_of(task: Task, subjects: Mapping[str, Outcomes], count: int) -> list[Sample]:
    """At most `count` items. subjects: the outcomes by the name that the report gives each subject."""
    order = _order(task, list(subjects.values()))
    return [
        Sample(
            task.name,
            item.id,
            _end(_prompt(item)),
            _beginning(_expected(item)),
            [_answer(task, item, name, outcomes[item.id]) for name, outcomes in subjects.items()],
        )
        for item in order[:count]
    ]


def _order(task: Task, subjects: Sequence[Outcomes]) -> list[Item]:
    """Items on which subjects differ first; the others spread evenly over the task."""

    def rank(item: Item) -> int:
        outcomes = [one[item.id] for one in subjects]
        if task.primary and len({one.values[task.primary] for one in outcomes}) > 1:
            return 0
        return 1 if len({one.answer for one in outcomes}) > 1 else 2

    ranked = [(rank(item), item) for item in task.items]
    differing = sorted((pair for pair in ranked if pair[0] < 2), key=lambda pair: pair[0])
    return [item for _, item in differing] + _spread([item for at, item in ranked if at == 2])


def _spread(items: Sequence[Item]) -> list[Item]:
    """The first, the one in the middle, those at the quarters, and so on."""
    found: list[int] = []
    parts = 1
    while len(found) < len(items):
        places = (at * len(items) // parts for at in range(parts))
        found += [place for place in dict.fromkeys(places) if place not in found]
        parts *= 2
    return [items[place] for place in found]


def _prompt(item: Item) -> str:
    if isinstance(item, Choices):
        return item.prompt + "".join(f"\n  ({at}) {choice}" for at, choice in enumerate(item.choices))
    if isinstance(item, Contexts):
        shown = "".join(f"  ({at}) {context}\n" for at, context in enumerate(item.contexts))
        return f"{shown}  …{item.continuation}"
    if isinstance(item, LastWord):
        return item.context
    return item.text if isinstance(item, Passage) else item.prompt


def _expected(item: Item) -> str:
    if isinstance(item, Choices | Contexts):
        return _of_choices(item, item.gold)
    if isinstance(item, LastWord):
        return item.word.strip()
    if isinstance(item, Program):
        return f"a program that passes the tests of {item.entry_point}"
    return item.answer if isinstance(item, Question) else ""


def _answer(task: Task, item: Item, subject: str, outcome: Outcome) -> Answer:
    if isinstance(item, Passage):
        loss = -outcome.values["logprob"] / max(outcome.values["tokens"], 1.0)
        return Answer(subject, f"{loss:.4f} nats per token")
    right = outcome.values[task.primary] > 0
    if isinstance(item, Choices | Contexts):
        return Answer(subject, _of_choices(item, int(outcome.answer)), right)
    if isinstance(item, LastWord):
        logprob = outcome.values["logprob"]
        text = item.word.strip() if right else f"another word (log-probability of this one: {logprob:.2f})"
        return Answer(subject, text, right)
    text = outcome.text or outcome.answer
    return Answer(subject, _beginning(text) + (f"\n[{outcome.note}]" if outcome.note else ""), right)


def _of_choices(item: Choices | Contexts, place: int) -> str:
    choices = item.choices if isinstance(item, Choices) else item.contexts
    return f"({place}) {choices[place]}"


def _beginning(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else text[:MOST_CHARACTERS] + " …"


def _end(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else "… " + text[-MOST_CHARACTERS:]
