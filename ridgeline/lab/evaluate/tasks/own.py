"""A user's own JSONL file as a task. The fields of a line say what kind of item it is.

    {"query": "…", "choices": ["…", "…"], "gold": 0}              the most likely choice
    {"context_options": ["…", "…"], "continuation": "…", "gold": 1}  the most likely context
    {"context": "…", "continuation": "…"}                         a greedy continuation
    {"prompt": "…", "answer": "…", "match": "exact", "stop": ["\\n"], "max_tokens": 64}
    {"text": "…"}                                                 perplexity

Optional everywhere: "id". Optional beside "query": "delimiter" (default: a space).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ridgeline.lab.errors import BadInput
from ridgeline.lab.evaluate.tasks.items import (
    MATCHES,
    Choices,
    Contexts,
    Item,
    LastWord,
    Passage,
    Program,
    Question,
)
from ridgeline.lab.evaluate.tasks.read import Line, jsonl

DEFAULT_ANSWER_TOKENS = 64
_COMMON = {"id"}
_FIELDS: dict[str, set[str]] = {
    "choices": {"query", "choices", "gold", "delimiter"},
    "context_options": {"context_options", "continuation", "gold"},
    "context": {"context", "continuation"},
    "prompt": {"prompt", "answer", "match", "stop", "max_tokens"},
    "text": {"text"},
}


def own_items(path: Path) -> list[Item]:
    """Every line as an item. A file has one kind of item: its metrics are one table."""
    found: list[Item] = []
    seen: dict[str, int] = {}
    for line in jsonl(path):
        item = _item(line)
        if item.id in seen:
            raise line.wrong("id", f"{item.id!r} is also in line {seen[item.id]}")
        if found and type(item) is not type(found[0]):
            raise BadInput(
                f"{path}, line {line.number}: a {_KINDS[type(item)]}, but the file began with a "
                f"{_KINDS[type(found[0])]}; put them in separate files"
            )
        seen[item.id] = line.number
        found.append(item)
    if not found:
        raise BadInput(f"{path}: no items in it")
    return found


def _item(line: Line) -> Item:
    for mark, make in _MAKERS.items():
        if mark in line:
            unknown = set(line.fields) - _FIELDS[mark] - _COMMON
            if unknown:
                allowed = ", ".join(sorted(_FIELDS[mark] | _COMMON))
                raise line.wrong(sorted(unknown)[0], f"is unknown here; known are {allowed}")
            return make(line, line.text("id", str(line.number)))
    raise BadInput(
        f"{line.path}, line {line.number}: no kind of item has the fields "
        f"{', '.join(line.fields) or '(none)'}; give query/choices/gold, "
        "context_options/continuation/gold, context/continuation, prompt/answer or text"
    )


def _choices(line: Line, id: str) -> Item:
    choices = line.texts("choices", fewest=2)
    return Choices(
        id, line.text("query"), choices, line.place("gold", len(choices)), line.text("delimiter", " ")
    )


def _contexts(line: Line, id: str) -> Item:
    contexts = line.texts("context_options", fewest=2)
    return Contexts(id, contexts, " " + line.text("continuation"), line.place("gold", len(contexts)))


def _last_word(line: Line, id: str) -> Item:
    return LastWord(id, line.text("context"), " " + line.text("continuation"))


def _question(line: Line, id: str) -> Item:
    most = line.integer("max_tokens", DEFAULT_ANSWER_TOKENS)
    if most < 1:
        raise line.wrong("max_tokens", f"must be at least 1, got {most}")
    stops = line.texts("stop", fewest=0, default=())
    if not all(stops):
        raise line.wrong("stop", "must not contain an empty string")
    match = line.one_of("match", MATCHES, "exact")
    return Question(id, line.text("prompt"), line.text("answer"), match, stops, most)


def _passage(line: Line, id: str) -> Item:
    text = line.text("text")
    if not text.strip():
        raise line.wrong("text", "is empty")
    return Passage(id, text)


_MAKERS: dict[str, Callable[[Line, str], Item]] = {
    "choices": _choices,
    "context_options": _contexts,
    "context": _last_word,
    "prompt": _question,
    "text": _passage,
}
_KINDS: dict[type, str] = {
    Choices: "multiple choice",
    Contexts: "choice of contexts",
    LastWord: "greedy continuation",
    Question: "question with an answer",
    Passage: "text",
    Program: "program",
}
