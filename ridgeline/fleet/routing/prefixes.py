"""PrefixMap: which replica holds which prompt blocks, by the replicas' feeds and by what was just routed.

A block's holders are the bits of one integer, so a walk over a prompt's blocks is one lookup and one AND
for each. Every replica has a slot, its bit. A replica that is forgotten or sends a snapshot leaves its slot
behind; the bits there are cleared little by little, a shard with each event, and the slot is then used
again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from ridgeline.replica.messages import FeedLine, Load, Removed, Snapshot, Started, Stored

_SHARDS = 1024  # a power of two
_MOST_LAYERS = 32
_FEW = 8  # slots that are cheaper to count one by one
_MOST_GUESSES = 65_536
Counts = npt.NDArray[np.float32]


class _Known:
    """What is known of one replica's feed."""

    __slots__ = ("bit", "epoch", "seq", "slot")

    def __init__(self, slot: int) -> None:
        self.slot, self.bit = slot, 1 << slot
        self.seq, self.epoch = 0, ""


class PrefixMap:
    """Methods that take an event return whether a snapshot is needed: an event was missed.

    Until the snapshot comes, later events are ignored and the blocks known so far stay: a wrong match costs
    time, never correctness. At most about `max_blocks` blocks are kept; then the oldest block with one
    holder goes.
    """

    def __init__(self, guess_s: float = 5.0, max_blocks: int = 1_000_000) -> None:
        self.version = 0  # changes with the slots
        self._guess_s = guess_s
        self._shards: list[dict[int, int]] = [{} for _ in range(_SHARDS)]
        self._most_in_shard = max(max_blocks // _SHARDS, 1)
        self._known: dict[str, _Known] = {}
        self._live = 0  # slots in use
        self._slots = 0  # slots ever made
        self._free: list[int] = []
        self._retired: deque[tuple[int, int]] = deque()  # slot, sweeps after which it is free
        self._dead = 0  # the bits of the retired slots
        self._sweeps = 0
        # What was just routed: bits of the shards that no replica has confirmed, and when they end.
        self._guessed: dict[int, int] = {}
        self._guesses: deque[tuple[float, int, list[int]]] = deque()

    def __len__(self) -> int:
        return sum(map(len, self._shards))

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
        elif isinstance(line, Load):
            known = self._known.get(replica_id)
            return line.seq > (known.seq if known is not None else 0)
        return False

    def started(self, replica_id: str, epoch: str) -> None:
        """Another epoch is another process, whose cache is empty."""
        known = self._known.get(replica_id)
        if known is None or known.epoch != epoch:
            self._renew(replica_id).epoch = epoch

    def position(self, replica_id: str) -> tuple[str, int]:
        """epoch and seq to reconnect with: ?epoch=…&after=…"""
        known = self._known.get(replica_id)
        return ("", 0) if known is None else (known.epoch, known.seq)

    def snapshot(self, replica_id: str, seq: int, blocks: Iterable[int]) -> None:
        """Replaces what is known of the replica's cache."""
        before = self._known.get(replica_id)
        known = self._renew(replica_id)
        known.epoch, known.seq = before.epoch if before is not None else "", seq
        self._store(known.bit, blocks)

    def stored(self, replica_id: str, seq: int, blocks: Sequence[int]) -> bool:
        known = self._known.get(replica_id) or self._renew(replica_id)
        if seq != known.seq + 1:
            return seq > known.seq
        known.seq = seq
        self._store(known.bit, blocks)
        return False

    def removed(self, replica_id: str, seq: int, blocks: Sequence[int]) -> bool:
        known = self._known.get(replica_id) or self._renew(replica_id)
        if seq != known.seq + 1:
            return seq > known.seq
        known.seq = seq
        bit, shards = known.bit, self._shards
        for block in blocks:
            shard = shards[block & (_SHARDS - 1)]
            held = shard.get(block, 0)
            if held & bit:
                if held == bit:
                    del shard[block]
                else:
                    shard[block] = held ^ bit
        if self._retired:
            self._sweep()
        return False

    def routed(self, replica_id: str, blocks: Sequence[int], now: float) -> None:
        """These blocks will soon be there: a guess that ends after guess_s unless the replica confirms it."""
        self._end_guesses(now)
        bit, shards = (self._known.get(replica_id) or self._renew(replica_id)).bit, self._shards
        guessed, new = self._guessed, []
        for block in blocks:
            shard = shards[block & (_SHARDS - 1)]
            held = shard.get(block, 0)
            if not held & bit:
                shard[block] = held | bit
                guessed[block] = guessed.get(block, 0) | bit
                new.append(block)
        if new:
            self._guesses.append((now + self._guess_s, bit, new))
        while len(guessed) > _MOST_GUESSES:
            self._end_guess()

    def forget(self, replica_id: str) -> None:
        """The replica is gone."""
        known = self._known.pop(replica_id, None)
        if known is not None:
            self._retire(known.slot)
            self._sweep()

    def matches(self, blocks: Sequence[int], now: float = 0.0) -> dict[str, int]:
        """Blocks from the beginning that each replica holds; replicas without any are left out."""
        counts = self.counts(blocks, now)
        if counts is None:
            return {}
        return {name: int(counts[known.slot]) for name, known in self._known.items() if counts[known.slot]}

    def counts(self, blocks: Sequence[int], now: float) -> Counts | None:
        """Blocks from the beginning held in each slot, and a 0 after the last; None: no replica has any."""
        layers = self._layers(blocks, now)
        if not layers:
            return None
        if len(layers) > _MOST_LAYERS:  # counts a replica with a short match too low, at a bounded cost
            layers = [layers[0], *layers[1 - _MOST_LAYERS :]]
        counts = np.zeros(self._slots + 1, np.float32)
        for depth, held in layers:  # a deeper layer has fewer slots, and overwrites
            if held.bit_count() <= _FEW:
                while held:
                    low = held & -held
                    counts[low.bit_length() - 1] = depth
                    held ^= low
            else:
                raw = np.frombuffer(held.to_bytes(self._slots // 8 + 1, "little"), np.uint8)
                bits = np.unpackbits(raw, count=self._slots + 1, bitorder="little")
                np.putmask(counts, bits.view(np.bool_), depth)
        return counts

    def slots_of(self, replica_ids: Iterable[str]) -> npt.NDArray[np.intp]:
        """Where replicas are in `counts`, until `version` changes; -1, the 0 at its end: unknown there."""
        known = self._known
        return np.array([known[name].slot if name in known else -1 for name in replica_ids], np.intp)

    def _layers(self, blocks: Sequence[int], now: float) -> list[tuple[int, int]]:
        """(depth, slots that hold all blocks up to there), at every depth where the slots become fewer."""
        self._end_guesses(now)
        shards, alive = self._shards, self._live
        layers: list[tuple[int, int]] = []
        last = -1
        for depth, block in enumerate(blocks):
            held = shards[block & (_SHARDS - 1)].get(block, 0)
            if held is last:  # blocks that were stored together share one integer
                continue
            last = held
            kept = alive & held
            if kept != alive:
                if depth:
                    layers.append((depth, alive))
                if not kept:
                    return layers
                alive = kept
        if blocks and alive:
            layers.append((len(blocks), alive))
        return layers

    def _store(self, bit: int, blocks: Iterable[int]) -> None:
        shards, most, guessed = self._shards, self._most_in_shard, self._guessed
        last, joined = -1, -1
        for block in blocks:
            shard = shards[block & (_SHARDS - 1)]
            held = shard.get(block, 0)
            if held is not last:
                last, joined = held, held | bit
            shard[block] = joined
            if not held:
                if len(shard) > most:
                    self._evict(shard)
            elif block in guessed:
                guessed[block] &= ~bit  # confirmed
        if self._retired:
            self._sweep()

    def _evict(self, shard: dict[int, int]) -> None:
        """Drops the oldest block with one holder; blocks with several are spared, up to four of them."""
        for _ in range(4):
            block = next(iter(shard))
            held = shard.pop(block)
            if (held & self._live).bit_count() < 2:
                return
            shard[block] = held
        del shard[next(iter(shard))]

    def _renew(self, replica_id: str) -> _Known:
        """A new slot, without blocks."""
        known = self._known.get(replica_id)
        if known is not None:
            self._retire(known.slot)
        if self._free:
            slot = self._free.pop()
        else:
            slot, self._slots = self._slots, self._slots + 1
        known = self._known[replica_id] = _Known(slot)
        self._live |= known.bit
        self.version += 1
        return known

    def _retire(self, slot: int) -> None:
        bit = 1 << slot
        self._live &= ~bit
        self._dead |= bit
        self._retired.append((slot, self._sweeps + _SHARDS))
        self.version += 1

    def _sweep(self) -> None:
        """Clears the bits of retired slots in one shard; frees slots that were cleared in all."""
        dead, shard = self._dead, self._shards[self._sweeps & (_SHARDS - 1)]
        for block in [block for block, held in shard.items() if held & dead]:
            left = shard[block] & ~dead
            if left:
                shard[block] = left
            else:
                del shard[block]
        self._sweeps += 1
        while self._retired and self._retired[0][1] <= self._sweeps:
            slot, _ = self._retired.popleft()
            self._dead &= ~(1 << slot)
            self._free.append(slot)

    def _end_guesses(self, now: float) -> None:
        guesses = self._guesses
        while guesses and guesses[0][0] <= now:
            self._end_guess()

    def _end_guess(self) -> None:
        """Clears the bits of the oldest guess that were not confirmed."""
        _, bit, blocks = self._guesses.popleft()
        guessed, shards = self._guessed, self._shards
        for block in blocks:
            mask = guessed.get(block)
            if mask is None:
                continue
            left = mask & ~bit
            if left:
                guessed[block] = left
            else:
                del guessed[block]
            if mask & bit:
                shard = shards[block & (_SHARDS - 1)]
                held = shard.get(block, 0) & ~bit
                if held:
                    shard[block] = held
                else:
                    shard.pop(block, None)
