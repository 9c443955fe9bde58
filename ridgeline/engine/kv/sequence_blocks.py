"""SequenceBlocks: the block pool and the prefix index from a sequence's point of view.

The scheduler decides which sequence gets blocks. This module allocates, shares, fills and releases them in
a sequence's block table. No other module changes a block table.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Generator

from ridgeline.engine.kv.block_pool import BlockPool, PoolCorrupted
from ridgeline.engine.schedule.request import SeqState, Sequence
from ridgeline.engine.schedule.step import BlockCopy


class SequenceBlocks:
    def __init__(self, pool: BlockPool, prefix_cache: bool) -> None:
        self.pool = pool
        self.index = pool.index
        self._size = pool.block_size
        self._prefix_cache = prefix_cache

    def cached_prefix(self, seq: Sequence, usable_tokens: int) -> list[int]:
        """Blocks that already hold the KV of the start of `seq`, up to `usable_tokens`."""
        if not self._prefix_cache:
            return []
        self._name_full_blocks(seq)
        return self.index.lookup(seq.block_hashes[: usable_tokens // self._size])

    def num_evicted_tokens(self, seq: Sequence, found: int) -> int:
        """Prompt tokens behind the first `found` ones whose KV was cached once and is evicted."""
        places = slice(found // self._size, seq.prompt_len // self._size)
        return self.index.num_evicted(seq.block_hashes[places]) * self._size

    def num_idle(self, blocks: list[int]) -> int:
        """How many of these are not held. Taking them reduces what is available."""
        return sum(1 for block in blocks if self.pool.references(block) == 0)

    def num_missing(self, seq: Sequence, hits: list[int]) -> int:
        return self.pool.blocks_for(len(seq.tokens)) - len(hits)

    def num_shared(self, seq: Sequence) -> int:
        """Leading blocks that other sequences hold too. Only prefixes are shared."""
        return bisect_left(seq.block_table, True, key=lambda block: self.pool.references(block) < 2)

    def take(self, seq: Sequence, hits: list[int]) -> None:
        """Give `seq` the cached blocks and new ones for its other tokens, so that a prefill never waits."""
        missing = self.num_missing(seq, hits)
        for block in hits:  # before any allocation, which might evict them
            self.pool.share(block)
        seq.block_table = hits + [self.pool.allocate() for _ in range(missing)]
        seq.num_computed = len(hits) * self._size

    def make_writable(self, seq: Sequence, position: int, copies: list[BlockCopy]) -> bool:
        """Make the block of `position`, the next token to be computed, exist and belong to `seq` alone.

        Returns False if no block is available.
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
        else:  # siblings share the last block of their prompt; the last holder writes in place
            copies.append(BlockCopy(source=table[place], target=block))
            self.pool.release([table[place]])
            table[place] = block
        return True

    def advance(self, seq: Sequence, count: int) -> None:
        """The KV of `count` more tokens is written. Blocks that became full are indexed."""
        first_place = seq.num_computed // self._size
        seq.num_computed += count
        end_place = seq.num_computed // self._size
        if self._prefix_cache and first_place < end_place:
            self._name_full_blocks(seq)
            for place in range(first_place, end_place):
                self.index.insert(seq.block_hashes[place], seq.block_table[place])

    def grow(self, seq: Sequence) -> None:
        """Add one block at the end, like `make_writable` when one is available and none must be copied."""
        seq.block_table.append(self.pool.allocate())

    def fill(self, seq: Sequence, place: int) -> None:
        """Index the block at `place`, which became full, as `advance` does; later tokens exist already."""
        if self._prefix_cache:
            hashes, request = seq.block_hashes, seq.request
            end = (place + 1) * self._size
            self.index.extend(hashes, seq.tokens, request.adapter, request.cache_namespace, end)
            self.index.insert(hashes[place], seq.block_table[place])

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` share all blocks of `parent`, including the partly filled last one."""
        for block in parent.block_table:
            self.pool.share(block)
        child.block_table = list(parent.block_table)
        child.block_hashes = list(parent.block_hashes)
        child.num_computed = parent.num_computed

    def trim(self, seq: Sequence) -> None:
        """Release the blocks at the end that hold no token of `seq`: their drafts were wrong."""
        needed = self.pool.blocks_for(len(seq.tokens))
        if len(seq.block_table) > needed:
            self.pool.release(seq.block_table[needed:])
            del seq.block_table[needed:]

    def release(self, seq: Sequence) -> None:
        self.pool.release(seq.block_table)
        seq.block_table = []

    def integrity_pieces(self, holders: Collection[Sequence]) -> Generator[None, None, bool]:
        """The pool's check, in pieces: exactly `holders` own the held blocks."""
        return self.pool.integrity_pieces([list(seq.block_table) for seq in holders])

    def check_sequences(self, holders: Collection[Sequence]) -> None:
        """Raise PoolCorrupted unless each of `holders` has the blocks that it needs, in its own order."""
        for seq in holders:
            least = self.pool.blocks_for(seq.num_computed + seq.in_flight)
            most = self.pool.blocks_for(len(seq.tokens) + seq.pending + seq.drafted)
            has_ended = seq.state is SeqState.FINISHED  # its samples in flight are discarded
            if not has_ended and not least <= len(seq.block_table) <= most:
                raise PoolCorrupted(
                    f"{seq.name} has {len(seq.block_table)} blocks for {len(seq.tokens)} + {seq.pending} "
                    f"tokens, {seq.num_computed} of them computed and {seq.in_flight} in flight: "
                    f"it must have {least} to {most} blocks"
                )
            for place, block in enumerate(seq.block_table):
                name = self.index.hash_of(block)
                if name is not None and seq.block_hashes[place : place + 1] != [name]:
                    raise PoolCorrupted(
                        f"{seq.name} holds block {block} at {place}, which is indexed with another hash"
                    )
                if name is not None and (place + 1) * self._size > seq.num_computed:
                    raise PoolCorrupted(f"{seq.name}: block {block} at {place} is indexed before it is full")

    def _name_full_blocks(self, seq: Sequence) -> None:
        request = seq.request
        self.index.extend(seq.block_hashes, seq.tokens, request.adapter, request.cache_namespace)
