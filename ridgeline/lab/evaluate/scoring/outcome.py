"""Outcome: what one subject's answer to one item was worth. Stored as one line of a results file."""

from __future__ import annotations

import msgspec


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """values: by metric; sums over tokens, words and bytes for texts. answer: for display and for flips."""

    task: str
    id: str
    digest: str  # of the item
    values: dict[str, float]
    answer: str = ""
    text: str = ""  # as generated, where `answer` is a part of it
    note: str = ""  # why an answer failed, as by its time limit

    @property
    def key(self) -> tuple[str, str, str]:
        return self.task, self.id, self.digest
