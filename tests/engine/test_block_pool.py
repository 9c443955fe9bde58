"""The block pool as a specification: free, cached or held, and nothing in between."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ridgeline.engine.kv.block_pool import PIECE_BLOCKS, BlockPool, PoolCorrupted, PoolExhausted


def name(number: int) -> bytes:
    return number.to_bytes(16, "little")


def counts(pool: BlockPool) -> tuple[int, int, int]:
    return pool.num_free, pool.num_cached, pool.num_held


def test_a_new_pool_is_all_free() -> None:
    assert counts(BlockPool(4, 16)) == (4, 0, 0)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (4, 0)])
def test_a_pool_without_room_is_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match=f"got {num_blocks} and {block_size}"):
        BlockPool(num_blocks, block_size)


def test_a_released_block_without_a_hash_is_free_again() -> None:
    pool = BlockPool(2, 4)
    pool.release([pool.allocate()])
    assert counts(pool) == (2, 0, 0)


def test_a_released_block_with_a_hash_stays_findable() -> None:
    pool = BlockPool(2, 4)
    block = pool.allocate()
    pool.index.insert(name(1), block)
    pool.release([block])
    assert counts(pool) == (1, 1, 0)
    assert pool.index.lookup([name(1)]) == [block]


def test_a_shared_block_is_held_until_the_last_reference_goes() -> None:
    pool = BlockPool(2, 4)
    block = pool.allocate()
    pool.share(block)
    pool.release([block])
    assert (pool.references(block), counts(pool)) == (1, (1, 0, 1))
    pool.release([block])
    assert counts(pool) == (2, 0, 0)


def test_sharing_takes_a_cached_block_out_of_reach_of_eviction() -> None:
    pool = BlockPool(2, 4)
    block = pool.allocate()
    pool.index.insert(name(1), block)
    pool.release([block])
    pool.share(block)
    assert pool.allocate() != block
    with pytest.raises(PoolExhausted, match="all 2 KV blocks are held"):
        pool.allocate()


def test_free_blocks_are_used_before_cached_ones_are_evicted() -> None:
    pool = BlockPool(2, 4)
    block = pool.allocate()
    pool.index.insert(name(1), block)
    pool.release([block])
    pool.allocate()
    assert pool.index.lookup([name(1)]) == [block]


def test_the_least_recently_used_cached_block_is_evicted_and_forgotten() -> None:
    pool = BlockPool(2, 4)
    old, recent = pool.allocate(), pool.allocate()
    pool.index.insert(name(1), old)
    pool.index.insert(name(2), recent)
    pool.release([old])
    pool.release([recent])
    pool.share(old)  # used once more: now `recent` is the older one
    pool.release([old])
    assert pool.allocate() == recent
    assert pool.index.lookup([name(2)]) == []
    assert pool.index.lookup([name(1)]) == [old]


def test_the_tail_of_a_sequence_is_evicted_before_its_beginning() -> None:
    pool = BlockPool(3, 4)
    table = [pool.allocate() for _ in range(3)]
    for place, block in enumerate(table):
        pool.index.insert(name(place), block)
    pool.release(table)
    assert [pool.allocate() for _ in range(3)] == table[::-1]


def test_dropping_the_cache_frees_it_and_leaves_held_blocks_alone() -> None:
    pool = BlockPool(3, 4)
    held, cached = pool.allocate(), pool.allocate()
    pool.index.insert(name(1), held)
    pool.index.insert(name(2), cached)
    pool.release([cached])
    assert pool.drop_cached() == 1
    assert counts(pool) == (2, 0, 1)
    assert len(pool.index) == 0
    pool.release([held])
    assert counts(pool) == (3, 0, 0)


def test_a_free_block_cannot_be_shared_or_released() -> None:
    pool = BlockPool(2, 4)
    with pytest.raises(PoolCorrupted, match="block 1 is free"):
        pool.share(1)
    with pytest.raises(PoolCorrupted, match="block 1 was released but is not held"):
        pool.release([1])


class TestIntegrityNamesWhatIsWrong:
    def test_a_block_nobody_names(self) -> None:
        pool = BlockPool(2, 4)
        block = pool.allocate()
        with pytest.raises(PoolCorrupted, match=f"block {block} has 1 references, but 0 live tables"):
            pool.check_integrity([])

    def test_a_block_named_by_one_too_many(self) -> None:
        pool = BlockPool(2, 4)
        block = pool.allocate()
        with pytest.raises(PoolCorrupted, match=f"block {block} has 1 references, but 2 live tables"):
            pool.check_integrity([[block], [block]])

    def test_a_block_in_no_state(self) -> None:
        pool = BlockPool(2, 4)
        pool.release([pool.allocate(), pool.allocate()])
        pool._free.remove(1)
        with pytest.raises(PoolCorrupted, match=r"block 1 must be in exactly one state.*\(0, 0, 0\)"):
            pool.check_integrity([])

    def test_a_block_that_is_free_twice(self) -> None:
        pool = BlockPool(2, 4)
        pool.release([pool.allocate(), pool.allocate()])
        pool._free.append(1)
        with pytest.raises(PoolCorrupted, match=r"block 1 must be in exactly one state.*\(2, 0, 0\)"):
            pool.check_integrity([])

    def test_a_cached_block_nobody_can_find(self) -> None:
        pool = BlockPool(2, 4)
        block = pool.allocate()
        pool.index.insert(name(1), block)
        pool.release([block])
        pool.index.clear()
        with pytest.raises(PoolCorrupted, match=f"block {block} is cached but"):
            pool.check_integrity([])

    def test_two_hashes_of_one_block(self) -> None:
        pool = BlockPool(2, 4)
        block = pool.allocate()
        pool.index.insert(name(1), block)
        pool.index._block_of[name(2)] = block
        with pytest.raises(PoolCorrupted, match="two hashes"):
            pool.check_integrity([[block]])

    def test_a_free_block_that_is_still_found(self) -> None:
        pool = BlockPool(2, 4)
        pool.index.insert(name(1), 0)
        with pytest.raises(PoolCorrupted, match="block 0 is free but"):
            pool.check_integrity([])


class PoolMachine(RuleBasedStateMachine):
    """Random holders of random tables, against a plain model of what each block contains."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6, 4)
        self.tables: list[list[int]] = []
        self.content: dict[int, bytes] = {}  # block → the name it was given since it was allocated

    @precondition(lambda self: self.pool.available)
    @rule()
    def allocate(self) -> None:
        free, cached = self.pool.num_free, self.pool.num_cached
        block = self.pool.allocate()
        self.content.pop(block, None)
        self.tables.append([block])
        assert (self.pool.num_free, self.pool.num_cached) == (
            (free - 1, cached) if free else (free, cached - 1)
        )

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 99), number=st.integers(0, 4))
    def fill(self, which: int, number: int) -> None:
        block = self.tables[which % len(self.tables)][0]
        if block not in self.content and self.pool.index.insert(name(number), block):
            self.content[block] = name(number)

    @rule(number=st.integers(0, 4))
    def hit(self, number: int) -> None:
        blocks = self.pool.index.lookup([name(number)])
        for block in blocks:
            assert self.content[block] == name(number)
            self.pool.share(block)
            self.tables.append([block])

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 99))
    def release(self, which: int) -> None:
        self.pool.release(self.tables.pop(which % len(self.tables)))

    @rule()
    def drop_cached(self) -> None:
        self.pool.drop_cached()
        self.content.clear()

    @invariant()
    def the_books_balance(self) -> None:
        self.pool.check_integrity(self.tables)
        assert self.pool.num_held == len({table[0] for table in self.tables})


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_check_comes_in_pieces_and_gives_no_verdict_about_a_pool_that_changes() -> None:
    pool = BlockPool(5 * PIECE_BLOCKS, 4)
    tables = [[pool.allocate() for _ in range(2 * PIECE_BLOCKS)]]
    pool.release([pool.allocate() for _ in range(PIECE_BLOCKS)])
    whole = list(pool.integrity_pieces(tables))
    assert len(whole) == 1 + 1 + 3  # of free blocks, twice; of the blocks that were ever used
    for pieces in range(1, len(whole) + 1):
        check = pool.integrity_pieces(tables)
        for _ in range(pieces):
            next(check)
        tables[0].append(pool.allocate())  # not in the tables that the check knows
        with pytest.raises(StopIteration) as end:
            next(check)
        assert end.value.value is False
    pool.check_integrity(tables)


def test_a_check_costs_nothing_for_blocks_that_were_never_used() -> None:
    assert len(list(BlockPool(10**9, 4).integrity_pieces([]))) == 0
