"""Sample items as a part of a page: prompt, expected answer, and each subject's, as they were written."""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.lab.evaluate.samples import Answer, Sample
from ridgeline.lab.page import Cell, Html, heading, preformatted, table


def samples_part(samples: Sequence[Sample], explanation: str) -> list[Html]:
    if not samples:
        return []
    parts = [heading("Sample items", explanation)]
    for sample in samples:
        rows: list[list[str | Cell]] = [["prompt", Cell(preformatted(sample.prompt), look="words")]]
        if sample.expected:
            rows.append(["expected", Cell(preformatted(sample.expected), look="words")])
        rows += [_row(answer) for answer in sample.answers]
        parts.append(table([Cell(sample.item), Cell("", look="words")], rows))
    return parts


def _row(answer: Answer) -> list[str | Cell]:
    verdict = "" if answer.right is None else "right" if answer.right else "wrong"
    return [Cell(answer.subject, small=verdict), Cell(preformatted(answer.text), look="words")]
