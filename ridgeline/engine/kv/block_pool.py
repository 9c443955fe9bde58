"""BlockPool: the owners of each KV block. The KV itself is in the runner; here blocks are numbers.

A block is free, cached (not referenced, still in the prefix index, evicted in LRU order) or held (one or
more references). Called by the scheduler only; it never decides which sequence gets a block.

    free ──allocate──► held ──release, last reference──► free      (no hash: the content is lost)
                        ▲ └──release, last reference───► cached    (has a hash: the content is kept)
                        └────────────share───────────────┘ │
    held ◄──────────────allocate, oldest first─────────────┘       (evicted: removed from the index)
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from ridgeline.engine.kv.prefix_index import PrefixIndex


class PoolExhausted(RuntimeError):
    """Every block is held. The scheduler asks `available` first, so reaching this is a bug."""


class PoolCorrupted(RuntimeError):
    """The pool's state is inconsistent: a block is lost, owned twice, or its reference count is wrong."""


class BlockPool:
    def __init__(self, num_blocks: int, block_size: int, index: PrefixIndex | None = None) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"num_blocks and block_size must be at least 1, got {num_blocks} and {block_size}"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.index = PrefixIndex(block_size) if index is None else index
        self._free: list[int] = []  # a stack of blocks that were used before
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        # Of the blocks that were ever used, by number; the others are free. A simulated fleet has millions.
        self._references: list[int] = []

    @property
    def num_free(self) -> int:
        return len(self._free) + self.num_blocks - len(self._references)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_held(self) -> int:
        return len(self._references) - len(self._free) - len(self._cached)

    @property
    def available(self) -> int:
        """Blocks that allocate() can still return: free ones, and cached ones by eviction."""
        return self.num_free + len(self._cached)

    def references(self, block: int) -> int:
        return self._references[block] if block < len(self._references) else 0

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self) -> int:
        """A block with one reference and undefined content."""
        if self._free:
            block = self._free.pop()
        elif len(self._references) < self.num_blocks:  # low numbers first
            self._references.append(1)
            return len(self._references) - 1
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            self.index.forget(block)
        else:
            raise PoolExhausted(f"all {self.num_blocks} KV blocks are held")
        self._references[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more reference to a held or cached block: its content must not change from now on."""
        if self.references(block) == 0:
            if block not in self._cached:
                raise PoolCorrupted(f"block {block} is free and has no content to share")
            del self._cached[block]
        self._references[block] += 1

    def release(self, table: Sequence[int]) -> None:
        """Release one reference to each block of a block table.

        Last block first, so that a prefix is evicted after its continuations: a lookup stops at the first
        gap.
        """
        for block in reversed(table):
            if self.references(block) == 0:
                raise PoolCorrupted(f"block {block} was released but is not held")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._retire(block)

    def drop_cached(self) -> int:
        """Drop every cached prefix; held blocks stay held. Returns how many cached blocks became free."""
        dropped = len(self._cached)
        self._free.extend(self._cached)
        self._cached.clear()
        self.index.clear()
        return dropped

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise PoolCorrupted unless the pool agrees with the block tables of all live sequences."""
        held = Counter(block for table in tables for block in table)
        free = Counter(self._free)
        free.update(range(len(self._references), self.num_blocks))
        for block in range(self.num_blocks):
            references = self.references(block)
            states = (free[block], int(block in self._cached), int(references > 0))
            if sum(states) != 1:
                raise PoolCorrupted(
                    f"block {block} must be in exactly one state: free, cached, held = {states}"
                )
            if held[block] != references:
                raise PoolCorrupted(
                    f"block {block} has {references} references, but {held[block]} live tables name it"
                )
            if (block in self._cached) > (block in self.index):
                raise PoolCorrupted(f"block {block} is cached but not in the prefix index")
            if free[block] and block in self.index:
                raise PoolCorrupted(f"block {block} is free but still in the prefix index")
        for name, block in self.index.entries():
            if self.index.hash_of(block) != name:
                raise PoolCorrupted(f"hash {name.hex()} maps to block {block}, which has a different hash")

    def _retire(self, block: int) -> None:
        if block in self.index:
            self._cached[block] = None
        else:
            self._free.append(block)
