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
from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import chain, islice

from ridgeline.engine.kv.prefix_index import PrefixIndex

PIECE_BLOCKS = 500  # of a check at a time: well under a millisecond


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
        self._version = 0  # of the state: a check that takes a while notices a change

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
        self._version += 1
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
        self._version += 1
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
        self._version += 1
        for block in reversed(table):
            if self.references(block) == 0:
                raise PoolCorrupted(f"block {block} was released but is not held")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._retire(block)

    def drop_cached(self) -> int:
        """Drop every cached prefix; held blocks stay held. Returns how many cached blocks became free."""
        self._version += 1
        dropped = len(self._cached)
        self._free.extend(self._cached)
        self._cached.clear()
        self.index.clear()
        return dropped

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise PoolCorrupted unless the pool agrees with the block tables of all live sequences."""
        for _ in self.integrity_pieces(tables):
            pass

    def integrity_pieces(self, tables: Iterable[Sequence[int]]) -> Generator[None, None, bool]:
        """As `check_integrity`, a piece of the blocks at a time: a pool may have a hundred thousand. Returns
        False, without a verdict, if the pool or its index changes meanwhile."""
        began, used = self._changes, len(self._references)
        held = Counter(block for table in tables for block in table)
        free, strays = Counter[int](), {block for block in held if block >= used}
        # Blocks that were never used are free; what names one of them is checked with the others.
        for batch in chain(_batches(self._free), _batches(self._cached), _batches(self.index.blocks())):
            strays.update(block for block in batch if block >= used)
            yield
            if self._changes != began:
                return False
        for batch in _batches(self._free):
            free.update(batch)
            yield
            if self._changes != began:
                return False
        for batch in _batches(chain(range(used), sorted(strays))):
            for block in batch:
                self._check_block(block, held[block], free[block] + (block >= used))
            yield
            if self._changes != began:
                return False
        if not self.index.is_one_to_one:
            raise PoolCorrupted("two hashes of the prefix index map to one block")
        return True

    @property
    def _changes(self) -> tuple[int, int]:
        return self._version, self.index.version

    def _check_block(self, block: int, held: int, free: int) -> None:
        """held: times that live tables name it; free: times that it is free."""
        references = self.references(block)
        is_cached, is_indexed = block in self._cached, block in self.index
        if free + is_cached + (references > 0) != 1:
            states = (free, int(is_cached), int(references > 0))
            raise PoolCorrupted(f"block {block} must be in exactly one state: free, cached, held = {states}")
        if held != references:
            raise PoolCorrupted(f"block {block} has {references} references, but {held} live tables name it")
        if is_cached and not is_indexed:
            raise PoolCorrupted(f"block {block} is cached but not in the prefix index")
        if free and is_indexed:
            raise PoolCorrupted(f"block {block} is free but still in the prefix index")
        if is_indexed and not self.index.agrees_on(block):
            raise PoolCorrupted(f"block {block} has a hash that maps to another block")

    def _retire(self, block: int) -> None:
        if block in self.index:
            self._cached[block] = None
        else:
            self._free.append(block)


def _batches(values: Iterable[int]) -> Iterator[list[int]]:
    values = iter(values)
    while batch := list(islice(values, PIECE_BLOCKS)):
        yield batch
