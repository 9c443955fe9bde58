"""Passages: the found chunks as the model reads them. Overlapping chunks of a file become one passage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ridgeline.retrieval.chunking.spans import Span, Starts


@dataclass(frozen=True, slots=True)
class Passage:
    """A part of a file: `text` is the file's parsed text from `begin` to `end`."""

    store_id: str
    file_id: str
    filename: str
    begin: int
    end: int
    text: str


def chosen(found: Sequence[Passage], budget_tokens: int, starts_of: Callable[[str], Starts]) -> list[Passage]:
    """The best of `found` (best first) that fit the budget, joined where they overlap, in order of file and
    place: the same passages make the same prompt, whatever the question ranked first.

    starts_of: where the tokens of a text begin. If the best alone does not fit, its beginning is taken.
    """
    parts: list[Passage] = []
    left = budget_tokens
    for passage in found:
        cost = sum(len(starts_of(new.text)) for new in _without(passage, parts))
        if cost > left:
            if parts:
                continue  # a shorter one may fit
            starts = starts_of(passage.text)
            end = starts[budget_tokens] if budget_tokens < len(starts) else len(passage.text)
            return [_part(passage, Span(passage.begin, passage.begin + end))] if end else []
        parts.append(passage)
        left -= cost
    return joined(parts)


def joined(parts: Sequence[Passage]) -> list[Passage]:
    """Parts of a file that overlap or touch as one, in order of file name and place."""
    result: list[Passage] = []
    for part in sorted(parts, key=lambda one: (one.filename, one.store_id, one.file_id, one.begin, one.end)):
        last = result[-1] if result else None
        if (
            last is None
            or (last.store_id, last.file_id) != (part.store_id, part.file_id)
            or part.begin > last.end
        ):
            result.append(part)
        elif part.end > last.end:
            text = last.text + part.text[last.end - part.begin :]
            result[-1] = Passage(last.store_id, last.file_id, last.filename, last.begin, part.end, text)
    return result


def _without(passage: Passage, taken: Sequence[Passage]) -> list[Passage]:
    """What a passage adds to those that are taken."""
    spans = [Span(passage.begin, passage.end)]
    for other in taken:
        if (other.store_id, other.file_id) != (passage.store_id, passage.file_id):
            continue
        spans = [
            part
            for span in spans
            for part in (
                Span(span.begin, min(span.end, other.begin)),
                Span(max(span.begin, other.end), span.end),
            )
            if part.begin < part.end
        ]
    return [_part(passage, span) for span in spans]


def _part(passage: Passage, span: Span) -> Passage:
    text = passage.text[span.begin - passage.begin : span.end - passage.begin]
    return Passage(passage.store_id, passage.file_id, passage.filename, span.begin, span.end, text)
