"""PrefixMap: which replica holds which prompt blocks, from the replicas' feeds and the latest choices.

A block's holders are the bits of one integer, so a walk over a prompt's blocks is one lookup and one AND
for each. Every replica has a slot, its bit. A replica that is forgotten or sends a snapshot gives up its
slot; the bits there are cleared in parts, a shard with each event, and then the slot is used again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from ridgeline.replica.messages import FeedLine, Load, Removed, Snapshot, Started, Stored

# Caches evict the ends of prompts first: beyond the first blocks, one block in each stride stands for all.
_EXACT, _STRIDE = 16, 8
_SWEEP = 256  # blocks, with each event
_MOST_LAYERS = 32
_FEW = 8  # slots that are cheaper to count one by one
_MOST_GUESSES = 65_536
Counts = npt.NDArray[np.float32]


class _Known:
    """The state of one replica's feed."""

    __slots__ = ("bit", "epoch", "seq", "slot")

    def __init__(self, slot: int) -> None:
        self.slot, self.bit = slot, 1 << slot
        self.seq, self.epoch = 0, ""


class PrefixMap:
    """Methods that take an event return whether a snapshot is needed: an event was missed.

    Until the snapshot comes, later events are ignored and the blocks known so far stay: a wrong match costs
    time, never correctness. About `max_blocks` blocks are kept; beyond that, the oldest block with one
    holder is dropped.
    """

    def __init__(self, guess_s: float = 15.0, max_blocks: int = 1_000_000) -> None:
        self.version = 0  # changes with the slots
        self._guess_s = guess_s
        self._holders: dict[int, int] = {}  # holders of each block, in order of arrival
        self._max_blocks = max_blocks
        self._known: dict[str, _Known] = {}
        self._live = 0  # slots in use
        self._slots = 0  # slots ever made
        self._free: list[int] = []
        self._retired = 0  # slots given up that wait for the next sweep
        self._swept = 0  # slots that the sweep in progress clears
        self._to_sweep: list[int] = []
        # The latest choices: bits of the shards that no replica has confirmed, and when they expire.
        self._guessed: dict[int, int] = {}
        self._guesses: deque[tuple[float, int, list[int]]] = deque()

    def __len__(self) -> int:
        return len(self._holders)

    def hear(self, replica_id: str, line: FeedLine) -> bool:
        """Apply any line of a feed. Returns True if the reader must reconnect for a snapshot."""
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
        """A new epoch means a new process with an empty cache."""
        known = self._known.get(replica_id)
        if known is None or known.epoch != epoch:
            self._renew(replica_id).epoch = epoch

    def position(self, replica_id: str) -> tuple[str, int]:
        """epoch and seq to reconnect with: ?epoch=…&after=…"""
        known = self._known.get(replica_id)
        return ("", 0) if known is None else (known.epoch, known.seq)

    def snapshot(self, replica_id: str, seq: int, blocks: Iterable[int]) -> None:
        """Replace the known blocks of the replica's cache."""
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
        bit, holders = known.bit, self._holders
        for block in blocks:
            held = holders.get(block, 0)
            if held == bit:
                del holders[block]
            elif held & bit:
                holders[block] = held ^ bit
        if self._retired or self._swept:
            self._sweep()
        return False

    def routed(self, replica_id: str, blocks: Sequence[int], now: float) -> None:
        """Guess that the blocks will soon be there. Expires after guess_s unless the replica confirms it."""
        self._end_guesses(now)
        bit, holders = (self._known.get(replica_id) or self._renew(replica_id)).bit, self._holders
        guessed, new = self._guessed, []
        last, joined = -1, -1
        first = bisect_left(blocks, True, key=lambda block: not holders.get(block, 0) & bit)
        for block in blocks[first:]:
            held = holders.get(block, 0)
            if held is last or not held & bit:
                if held is not last:
                    last, joined = held, held | bit
                holders[block] = joined
                guessed[block] = guessed.get(block, 0) | bit
                new.append(block)
        if new:
            self._guesses.append((now + self._guess_s, bit, new))
        while len(guessed) > _MOST_GUESSES:
            self._end_guess()
        if len(holders) > self._max_blocks:
            self._evict()

    def forget(self, replica_id: str) -> None:
        """Forget a replica."""
        known = self._known.pop(replica_id, None)
        if known is not None:
            self._retire(known)

    def matches(self, blocks: Sequence[int], now: float = 0.0) -> dict[str, int]:
        """The number of leading blocks that each replica holds; replicas without any are left out."""
        counts = self.counts(blocks, now)
        if counts is None:
            return {}
        return {name: int(counts[known.slot]) for name, known in self._known.items() if counts[known.slot]}

    def counts(self, blocks: Sequence[int], now: float) -> Counts | None:
        """The number of leading blocks in each slot, and a 0 after the last; None if no replica has any."""
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
        """The replicas' positions in `counts`, until `version` changes; -1, the 0 at its end, if unknown."""
        known = self._known
        return np.array([known[name].slot if name in known else -1 for name in replica_ids], np.intp)

    def _layers(self, blocks: Sequence[int], now: float) -> list[tuple[int, int]]:
        """(depth, slots that hold all blocks up to there), at every depth where slots drop out."""
        self._end_guesses(now)
        find, alive = self._holders.get, self._live
        layers: list[tuple[int, int]] = []
        last = -1
        for start in range(0, len(blocks), _STRIDE):
            window = blocks[start : start + _STRIDE]
            if start >= _EXACT:
                held = find(window[-1], 0)
                if held is last or alive & held == alive:
                    last = held
                    continue
            for depth, block in enumerate(window, start):
                held = find(block, 0)
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
        holders, guessed = self._holders, self._guessed
        last, joined = -1, -1
        for block in blocks:
            held = holders.get(block, 0)
            if held is not last:
                last, joined = held, held | bit
            holders[block] = joined
            if held and block in guessed:
                guessed[block] &= ~bit  # confirmed
        if len(holders) > self._max_blocks:
            self._evict()
        if self._retired or self._swept:
            self._sweep()

    def _evict(self) -> None:
        """Drop the oldest blocks with one holder. Of those with several, which prompts share, half stay."""
        holders, live = self._holders, self._live
        while (over := len(holders) - self._max_blocks) > 0:
            oldest = list(islice(holders, 2 * over + self._max_blocks // 64))
            spared = len(oldest) // 2
            for block in oldest:
                held = holders.pop(block)
                if spared and (held & live).bit_count() > 1:
                    holders[block] = held
                    spared -= 1

    def _renew(self, replica_id: str) -> _Known:
        """A new slot, without blocks."""
        known = self._known.get(replica_id)
        if known is not None:
            self._retire(known)
        if self._free:
            slot = self._free.pop()
        else:
            slot, self._slots = self._slots, self._slots + 1
        known = self._known[replica_id] = _Known(slot)
        self._live |= known.bit
        self.version += 1
        return known

    def _retire(self, known: _Known) -> None:
        self._live &= ~known.bit
        self._retired |= known.bit
        self.version += 1
        self._sweep()

    def _sweep(self) -> None:
        """Clear the bits of given-up slots in some blocks; after the last block the slots are free."""
        if not self._swept:
            self._swept, self._retired = self._retired, 0
            self._to_sweep = list(self._holders)
        holders, left = self._holders, ~self._swept
        for block in self._to_sweep[-_SWEEP:]:
            held = holders.get(block, 0)
            if held & self._swept:
                if held & left:
                    holders[block] = held & left
                else:
                    del holders[block]
        del self._to_sweep[-_SWEEP:]
        if not self._to_sweep:
            while self._swept:
                low = self._swept & -self._swept
                self._free.append(low.bit_length() - 1)
                self._swept ^= low

    def _end_guesses(self, now: float) -> None:
        guesses = self._guesses
        while guesses and guesses[0][0] <= now:
            self._end_guess()

    def _end_guess(self) -> None:
        """Clear the bits of the oldest guess that were not confirmed."""
        _, bit, blocks = self._guesses.popleft()
        guessed, holders = self._guessed, self._holders
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
                held = holders.get(block, 0) & ~bit
                if held:
                    holders[block] = held
                else:
                    holders.pop(block, None)
