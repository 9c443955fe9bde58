"""DeviceRows: which permanent row of the device each sequence has, and what the device knows of its blocks.

A row holds a sequence's block table, its newest token and its sampling parameters for as long as it runs. The
host sends differences: here they are found. Pure logic; the runner moves the numbers.
"""

from __future__ import annotations

from ridgeline.engine.plan.request import Sequence


class DeviceRow:
    """One sequence's row. `sent` blocks of its table are on the device, the last of them `tail`."""

    __slots__ = ("index", "sent", "tail")

    def __init__(self, index: int) -> None:
        self.index = index
        self.sent = 0
        self.tail = -1


class DeviceRows:
    def __init__(self, num_rows: int, table_width: int) -> None:
        self.table_width = table_width
        self._free = list(range(num_rows - 1, -1, -1))
        self._rows: dict[Sequence, DeviceRow] = {}
        self.places: list[int] = []  # flat places in the device's tables …
        self.blocks: list[int] = []  # … and the blocks to write there before the next step

    def __len__(self) -> int:
        return len(self._rows)

    def of(self, seq: Sequence) -> DeviceRow | None:
        return self._rows.get(seq)

    def sequences(self) -> list[Sequence]:
        return list(self._rows)

    def index_of(self, seq: Sequence) -> int:
        return self._rows[seq].index

    def take(self, seq: Sequence) -> DeviceRow:
        """A row for a sequence that has none."""
        row = self._rows[seq] = DeviceRow(self._free.pop())
        return row

    def release(self, seq: Sequence) -> None:
        """The sequence has ended or lost its blocks. Unknown ones are ignored: it may never have run.

        The row may be given away at once, even with a step of the old owner still on the device: whatever the
        next owner needs is written by a later launch on the same stream.
        """
        row = self._rows.pop(seq, None)
        if row is not None:
            self._free.append(row.index)

    def note_blocks(self, row: DeviceRow, table: list[int]) -> None:
        """Collect what the device does not know yet of this table.

        Tables grow at their end; before that end only their last block is ever exchanged (copy on write).
        """
        length, sent = len(table), row.sent
        if sent and (sent > length or table[sent - 1] != row.tail):
            sent = min(sent, length) - 1
        if sent == length:
            return
        base = row.index * self.table_width
        self.places += range(base + sent, base + length)
        self.blocks += table[sent:]
        row.sent, row.tail = length, table[-1]

    def take_differences(self) -> tuple[list[int], list[int]]:
        """(places, blocks) noted since the last call. No place is named twice."""
        found = self.places, self.blocks
        self.places, self.blocks = [], []
        return found
