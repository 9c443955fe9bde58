"""DeviceRows: assigns each sequence a permanent row on the device and tracks which of its blocks were sent.

A row holds a sequence's block table, newest token and sampling parameters while it runs. The host sends
only differences, which are computed here. Pure logic; the runner copies the numbers.
"""

from __future__ import annotations

from ridgeline.engine.schedule.request import Sequence


class DeviceRow:
    """One sequence's row. `sent` blocks of its table are on the device, the last of them is `tail`."""

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
        self.places: list[int] = []  # flat positions in the device's tables …
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
        """Assign a row to a sequence that has none."""
        row = self._rows[seq] = DeviceRow(self._free.pop())
        return row

    def release(self, seq: Sequence) -> None:
        """Free the row of a sequence that finished or was preempted. Unknown sequences are ignored.

        The row may be reused at once, even while a step of the old sequence is on the device: a later launch
        on the same stream writes everything the next sequence needs.
        """
        row = self._rows.pop(seq, None)
        if row is not None:
            self._free.append(row.index)

    def note_blocks(self, row: DeviceRow, table: list[int]) -> None:
        """Record which blocks of this table the device does not have yet.

        Tables grow at their end; of the blocks already sent, only the last is ever replaced (copy on write).
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
        """(places, blocks) recorded since the last call. No place appears twice."""
        found = self.places, self.blocks
        self.places, self.blocks = [], []
        return found
