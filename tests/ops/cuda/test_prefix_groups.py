"""Grouping decode rows by the blocks they share: plain lists in, an order and groups out."""

from __future__ import annotations

import random

from ridgeline.ops.cuda.attention.prefix_groups import PrefixGroup, find_shared_prefixes, prefix_tiles


def table(shared: int, own: int, first_own: int, first_shared: int = 0) -> list[int]:
    return [*range(first_shared, first_shared + shared), *range(first_own, first_own + own)]


def test_rows_with_the_same_beginning_come_first_in_their_old_order() -> None:
    tables = [table(0, 30, 9000), *(table(20, 3, 1000 + 10 * row) for row in range(5)), table(0, 30, 9100)]
    order, groups = find_shared_prefixes(tables)
    assert order == [1, 2, 3, 4, 5, 0, 6]
    assert groups == [PrefixGroup(first=0, rows=5, blocks=20)]


def test_too_few_rows_or_tokens_are_no_group() -> None:
    assert find_shared_prefixes([table(20, 3, 1000 + 10 * row) for row in range(3)])[1] == []
    assert find_shared_prefixes([table(15, 3, 1000 + 10 * row) for row in range(8)])[1] == []
    assert find_shared_prefixes([])[0] == []
    assert find_shared_prefixes([[], [1], []]) == ([0, 1, 2], [])


def test_the_common_length_is_exact() -> None:
    for shared in range(16, 40):
        tables = [table(shared, 1 + row, 1000 + 100 * row) for row in range(4)]
        assert find_shared_prefixes(tables)[1] == [PrefixGroup(0, 4, shared)]


def test_a_fork_is_followed_where_that_saves_more_reads() -> None:
    """16 blocks are common to all; two branches of 4 rows have 200 more each."""
    branches = [
        [*range(16), *range(1000 * branch, 1000 * branch + 200), 9000 + 10 * branch + row]
        for row in range(4)
        for branch in (1, 2)
    ]
    order, groups = find_shared_prefixes(branches)
    assert order == [0, 2, 4, 6, 1, 3, 5, 7]
    assert groups == [PrefixGroup(0, 4, 216), PrefixGroup(4, 4, 216)]


def test_a_long_common_part_is_not_given_up_for_a_short_fork() -> None:
    tables = [
        [*range(100), *range(1000 * (row // 4 + 1), 1000 * (row // 4 + 1) + 3), 9000 + row]
        for row in range(12)
    ]
    assert find_shared_prefixes(tables)[1] == [PrefixGroup(0, 12, 100)]


def test_the_order_is_a_permutation_and_every_group_shares_what_it_says() -> None:
    rng = random.Random(3)
    for _ in range(30):
        roots = [table(rng.randrange(1, 60), 0, 0, 1000 * root) for root in range(1, 4)]
        tables = []
        for row in range(rng.randrange(1, 40)):
            root = rng.choice(roots)
            tables.append(
                [*root[: rng.randrange(1, len(root) + 1)], *range(100_000 + 100 * row, 100_002 + 100 * row)]
            )
        order, groups = find_shared_prefixes(tables)
        assert sorted(order) == list(range(len(tables)))
        for group in groups:
            members = order[group.first : group.first + group.rows]
            assert group.rows >= 4
            assert group.blocks >= 16
            assert len({tuple(tables[row][: group.blocks]) for row in members}) == 1


def test_groups_are_cut_into_tiles_of_rows() -> None:
    tiles = prefix_tiles([PrefixGroup(0, 5, 20), PrefixGroup(5, 4, 90)], rows=12, tiles=6, rows_per_tile=4)
    cut = list(zip(tiles.first_rows, tiles.row_counts, tiles.tile_tokens, strict=True))
    assert cut == [(5, 4, 1440), (0, 4, 320), (4, 1, 320), (0, 0, 0), (0, 0, 0), (0, 0, 0)]
    assert tiles.tokens == [320] * 5 + [1440] * 4 + [0] * 3


def test_groups_that_save_least_are_left_out_when_tiles_run_short() -> None:
    tiles = prefix_tiles([PrefixGroup(0, 5, 20), PrefixGroup(5, 4, 90)], rows=9, tiles=1, rows_per_tile=4)
    assert tiles.row_counts == [4]
    assert tiles.tokens == [0] * 5 + [1440] * 4
