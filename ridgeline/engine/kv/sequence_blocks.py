"""SequenceBlocks: the block pool and the prefix index as a sequence uses them.

The scheduler decides who gets blocks; here is what getting, sharing, filling and giving them back means for
a sequence's block table. Whatever changes a block table is in this file.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection

from ridgeline.engine.kv.block_pool import BlockPool, PoolCorrupted
from ridgeline.engine.plan.request import SeqState, Sequence
from ridgeline.engine.plan.step import BlockCopy


class SequenceBlocks:
    def __init__(self, pool: BlockPool, prefix_cache: bool) -> None:
        self.pool = pool
        self.index = pool.index
        self._size = pool.block_size
        self._prefix_cache = prefix_cache

    def cached_prefix(self, seq: Sequence, usable_tokens: int) -> list[int]:
        """Blocks that already hold the KV of the beginning of `seq`, at most `usable_tokens` of it."""
        if not self._prefix_cache:
            return []
        self._name_full_blocks(seq)
        return self.index.lookup(seq.block_hashes[: usable_tokens // self._size])

    def num_idle(self, blocks: list[int]) -> int:
        """How many of these nobody holds: to take them uses up what is available."""
        return sum(1 for block in blocks if self.pool.references(block) == 0)

    def num_missing(self, seq: Sequence, hits: list[int]) -> int:
        return self.pool.blocks_for(len(seq.tokens)) - len(hits)

    def num_shared(self, seq: Sequence) -> int:
        """Leading blocks that others hold too: prefixes are shared, continuations are not."""
        return bisect_left(seq.block_table, True, key=lambda block: self.pool.references(block) < 2)

    def take(self, seq: Sequence, hits: list[int]) -> None:
        """Give `seq` the cached blocks and new ones for the rest of its tokens: a prefill never waits."""
        missing = self.num_missing(seq, hits)
        for block in hits:  # before any allocation, which might evict them
            self.pool.share(block)
        seq.block_table = hits + [self.pool.allocate() for _ in range(missing)]
        seq.num_computed = len(hits) * self._size

    def make_writable(self, seq: Sequence, position: int, copies: list[BlockCopy]) -> bool:
        """Let the block of `position`, the next to be computed, exist and belong to `seq` alone.

        False: there is no block for that.
        """
        table, place = seq.block_table, position // self._size
        is_new = place == len(table)
        if not is_new and self.pool.references(table[place]) == 1:
            return True
        if not self.pool.available:
            return False
        block = self.pool.allocate()
        if is_new:
            table.append(block)
        else:  # siblings share the last block of their prompt; the last one to hold it writes in place
            copies.append(BlockCopy(source=table[place], target=block))
            self.pool.release([table[place]])
            table[place] = block
        return True

    def advance(self, seq: Sequence, count: int) -> None:
        """The KV of `count` more tokens is written; blocks that became full can be found from now on."""
        first_place = seq.num_computed // self._size
        seq.num_computed += count
        end_place = seq.num_computed // self._size
        if self._prefix_cache and first_place < end_place:
            self._name_full_blocks(seq)
            for place in range(first_place, end_place):
                self.index.insert(seq.block_hashes[place], seq.block_table[place])

    def grow(self, seq: Sequence) -> None:
        """One more block at the end: `make_writable` where there surely is one, and none to copy."""
        seq.block_table.append(self.pool.allocate())

    def fill(self, seq: Sequence, place: int) -> None:
        """The block at `place` has become full: what `advance` does about it, when tokens follow already."""
        if self._prefix_cache:
            hashes, request = seq.block_hashes, seq.request
            end = (place + 1) * self._size
            self.index.extend(hashes, seq.tokens, request.adapter, request.cache_namespace, end)
            self.index.insert(hashes[place], seq.block_table[place])

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` stand on the blocks of `parent`, all of them, the partly filled last one too."""
        for block in parent.block_table:
            self.pool.share(block)
        child.block_table = list(parent.block_table)
        child.block_hashes = list(parent.block_hashes)
        child.num_computed = parent.num_computed

    def give_back(self, seq: Sequence) -> None:
        self.pool.release(seq.block_table)
        seq.block_table = []

    def check_integrity(self, holders: Collection[Sequence]) -> None:
        """Raise PoolCorrupted unless `holders`, and nobody else, own the held blocks, each its own."""
        self.pool.check_integrity(seq.block_table for seq in holders)
        for seq in holders:
            least = self.pool.blocks_for(seq.num_computed + seq.in_flight)
            most = self.pool.blocks_for(len(seq.tokens) + seq.pending)
            has_ended = seq.state is SeqState.FINISHED  # then samples in flight will never be its tokens
            if not has_ended and not least <= len(seq.block_table) <= most:
                raise PoolCorrupted(
                    f"{seq.name} has {len(seq.block_table)} blocks for {len(seq.tokens)} + {seq.pending} "
                    f"tokens, {seq.num_computed} of them computed and {seq.in_flight} in flight: "
                    f"it must be {least} to {most}"
                )
            for place, block in enumerate(seq.block_table):
                name = self.index.hash_of(block)
                if name is not None and seq.block_hashes[place : place + 1] != [name]:
                    raise PoolCorrupted(f"{seq.name} holds block {block} at {place}, indexed as another's")
                if name is not None and (place + 1) * self._size > seq.num_computed:
                    raise PoolCorrupted(f"{seq.name}: block {block} at {place} is indexed before it is full")

    def _name_full_blocks(self, seq: Sequence) -> None:
        request = seq.request
        self.index.extend(seq.block_hashes, seq.tokens, request.adapter, request.cache_namespace)
