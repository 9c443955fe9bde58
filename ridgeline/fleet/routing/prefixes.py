"""PrefixMap: which replica holds which prompt blocks, by the replicas' feeds and by what was just routed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ridgeline.replica.messages import FeedLine, Removed, Snapshot, Started, Stored


class PrefixMap:
    """Methods that take an event return whether a snapshot is needed: an event was missed.

    Until the snapshot comes, later events are ignored and the blocks known so far stay: a wrong match costs
    time, never correctness.
    """

    def __init__(self, guess_s: float = 5.0) -> None:
        self._guess_s = guess_s
        self._held: dict[str, set[int]] = {}
        self._guessed: dict[str, dict[int, float]] = {}
        self._seq: dict[str, int] = {}
        self._epoch: dict[str, str] = {}

    def hear(self, replica_id: str, line: FeedLine) -> bool:
        """Any line of a feed. True: the reader must reconnect for a snapshot."""
        if isinstance(line, Stored):
            return self.stored(replica_id, line.seq, line.blocks)
        if isinstance(line, Removed):
            return self.removed(replica_id, line.seq, line.blocks)
        if isinstance(line, Snapshot):
            self.snapshot(replica_id, line.seq, line.blocks)
        elif isinstance(line, Started):
            self.started(replica_id, line.epoch)
        return False

    def started(self, replica_id: str, epoch: str) -> None:
        """Another epoch is another process, whose cache is empty."""
        if self._epoch.get(replica_id) != epoch:
            self.forget(replica_id)
            self._epoch[replica_id] = epoch

    def position(self, replica_id: str) -> tuple[str, int]:
        """epoch and seq to reconnect with: ?epoch=…&after=…"""
        return self._epoch.get(replica_id, ""), self._seq.get(replica_id, 0)

    def snapshot(self, replica_id: str, seq: int, blocks: Iterable[int]) -> None:
        self._held[replica_id], self._seq[replica_id] = set(blocks), seq

    def stored(self, replica_id: str, seq: int, blocks: Sequence[int]) -> bool:
        if not self._in_order(replica_id, seq):
            return seq > self._seq.get(replica_id, 0)
        self._held.setdefault(replica_id, set()).update(blocks)
        return False

    def removed(self, replica_id: str, seq: int, blocks: Sequence[int]) -> bool:
        if not self._in_order(replica_id, seq):
            return seq > self._seq.get(replica_id, 0)
        self._held.setdefault(replica_id, set()).difference_update(blocks)
        return False

    def routed(self, replica_id: str, blocks: Sequence[int], now: float) -> None:
        """These blocks will soon be there: a guess that ends after guess_s to 2 × guess_s."""
        guessed = self._guessed.setdefault(replica_id, {})
        guessed.update(dict.fromkeys(blocks, now + self._guess_s))

    def forget(self, replica_id: str) -> None:
        for known in (self._held, self._guessed, self._seq, self._epoch):
            known.pop(replica_id, None)

    def matches(self, blocks: Sequence[int], now: float = 0.0) -> dict[str, int]:
        """Blocks from the beginning that each replica holds; replicas without any are left out."""
        found = {}
        for replica in {*self._held, *self._guessed}:
            held, guessed = self._held.get(replica, set()), self._guessed.get(replica, {})
            count = 0
            while count < len(blocks) and (
                blocks[count] in held or guessed.get(blocks[count], float("-inf")) > now
            ):
                count += 1
            if count:
                found[replica] = count
        return found

    def _in_order(self, replica_id: str, seq: int) -> bool:
        if seq != self._seq.get(replica_id, 0) + 1:
            return False
        self._seq[replica_id] = seq
        return True
