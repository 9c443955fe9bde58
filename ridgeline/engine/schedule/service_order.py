"""ServiceOrder: sequences sorted by priority, then arrival, then sample.

The scheduler has one for waiting and one for running sequences. A preempted sequence that is queued again
keeps the position of its arrival. Background sequences come last because of their priority.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from ridgeline.engine.schedule.request import BACKGROUND_PRIORITY, Sequence

_order = attrgetter("order")


class ServiceOrder:
    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def add(self, seq: Sequence) -> None:
        insort(self._sequences, seq, key=_order)

    def remove(self, seq: Sequence) -> None:
        if seq not in self:
            raise ValueError(f"sequence {seq.name} is not in this order")
        del self._sequences[bisect_left(self._sequences, seq.order, key=_order)]

    @property
    def first(self) -> Sequence:
        return self._sequences[0]

    @property
    def last(self) -> Sequence:
        """The one to preempt first: lowest priority, latest arrival."""
        return self._sequences[-1]

    @property
    def all(self) -> list[Sequence]:
        return self._sequences[:]

    @property
    def num_interactive(self) -> int:
        return bisect_left(self._sequences, (BACKGROUND_PRIORITY,), key=_order)

    @property
    def interactive(self) -> list[Sequence]:
        return self._sequences[: self.num_interactive]

    @property
    def has_background(self) -> bool:
        return bool(self._sequences) and self._sequences[-1].background

    @property
    def background(self) -> list[Sequence]:
        return self._sequences[self.num_interactive :]

    def __contains__(self, seq: Sequence) -> bool:
        place = bisect_left(self._sequences, seq.order, key=_order)
        return place < len(self._sequences) and self._sequences[place] is seq

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __len__(self) -> int:
        return len(self._sequences)
