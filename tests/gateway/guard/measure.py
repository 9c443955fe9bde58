"""Recall and precision of findings against a corpus, per kind, with Wilson's 95 % intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tests.gateway.guard.corpus import Sample

Found = Iterable[tuple[int, int, str]]


@dataclass
class Score:
    values: int = 0
    found: int = 0  # values of which no letter or digit is left
    findings: int = 0
    right: int = 0  # findings that touch a value of their kind
    missed: list[tuple[str, str]] = field(default_factory=list)  # format and text
    wrong: list[tuple[str, str]] = field(default_factory=list)

    @property
    def recall(self) -> float:
        return self.found / self.values if self.values else 1.0

    @property
    def precision(self) -> float:
        return self.right / self.findings if self.findings else 1.0


def measure(
    samples: Iterable[Sample], find: Callable[[str], Found], kinds: Iterable[str]
) -> dict[str, Score]:
    scores = {kind: Score() for kind in kinds}
    for sample in samples:
        found = list(find(sample.text))
        for start, end, kind in sample.gold:
            if kind not in scores:
                continue
            scores[kind].values += 1
            covered = {at for low, high, of in found if of == kind for at in range(low, high)}
            if all(at in covered for at in range(start, end) if sample.text[at].isalnum()):
                scores[kind].found += 1
            else:
                scores[kind].missed.append((sample.form, sample.text))
        for low, high, kind in found:
            if kind not in scores:
                continue
            scores[kind].findings += 1
            if any(low < end and start < high and of == kind for start, end, of in sample.gold):
                scores[kind].right += 1
            else:
                scores[kind].wrong.append((sample.text[low:high], sample.text))
    return scores


def interval(part: int, whole: int) -> tuple[float, float]:
    if not whole:
        return 0.0, 1.0
    z, share = 1.96, part / whole
    middle = (share + z * z / (2 * whole)) / (1 + z * z / whole)
    half = z * math.sqrt(share * (1 - share) / whole + z * z / (4 * whole * whole)) / (1 + z * z / whole)
    return max(middle - half, 0.0), min(middle + half, 1.0)
