"""Outcomes of generated answers: exact text, contained text, numbers as GSM8K extracts them, programs.

GSM8K, by lm-eval: the strict answer follows `####`; the flexible one is the last number of the text. Both are
compared after `,`, `$`, everything up to `#### ` and a final full stop are removed. Pure.
"""

from __future__ import annotations

import re

from ridgeline.lab.evaluate.tasks.items import Program, Question

_STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
_FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
_IGNORED = tuple(re.compile(pattern) for pattern in (r",", r"\$", r"(?s).*#### ", r"\.$"))
NO_ANSWER = "[invalid]"


def judged_text(item: Question, text: str) -> tuple[dict[str, float], str]:
    """(values, answer); `exact_match` is the task's primary metric."""
    if item.match == "contains":
        answer = text.strip()
        return {"exact_match": float(item.answer.strip() in text)}, answer
    if item.match == "exact":
        answer = text.strip()
        return {"exact_match": float(answer == item.answer.strip())}, answer
    strict, flexible = strict_number(text), flexible_number(text)
    expected = _plain(item.answer)
    by_way = {
        "strict_match": float(_plain(strict) == expected),
        "flexible_extract": float(_plain(flexible) == expected),
    }
    is_strict = item.match == "strict_number"
    chosen = "strict_match" if is_strict else "flexible_extract"
    return {"exact_match": by_way[chosen], **by_way}, strict if is_strict else flexible


def strict_number(text: str) -> str:
    found = _STRICT.search(text)
    return found[1] if found else NO_ANSWER


def flexible_number(text: str) -> str:
    found = _FLEXIBLE.findall(text)
    return next((part for part in found[-1] if part), NO_ANSWER) if found else NO_ANSWER


def _plain(text: str) -> str:
    for pattern in _IGNORED:
        text = pattern.sub("", text)
    return text.strip().lower()


def program_of(item: Program, completion: str) -> str:
    """What is run: prompt, completion, test, and the call of the test."""
    return f"{item.prompt}{completion}\n{item.test}\ncheck({item.entry_point})\n"


def cut_at_stops(text: str, stops: tuple[str, ...]) -> str:
    """The text before the first stop: some servers include it, or ignore a long list."""
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(places)] if places else text
