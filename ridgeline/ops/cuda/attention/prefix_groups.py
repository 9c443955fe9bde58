"""Finds the rows of a decode step that share their first KV blocks, and splits them into tiles.

Called by the runner when the batch has changed; the results are copied to the device for `shared_prefix`.
Plain Python: imports neither torch nor triton.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

LEAST_ROWS = 4  # fewer rows read their shared tokens from L2 about as fast
LEAST_TOKENS = 256


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Rows first … first + rows - 1 of the new order share their first `blocks` blocks."""

    first: int
    rows: int
    blocks: int


@dataclass(frozen=True, slots=True)
class PrefixTiles:
    """The numbers of `shared_prefix.SharedPrefix`, as lists."""

    first_rows: list[int]
    row_counts: list[int]
    tile_tokens: list[int]
    tokens: list[int]


def find_shared_prefixes(
    tables: Sequence[Sequence[int]],
    block_size: int = 16,
    least_rows: int = LEAST_ROWS,
    least_tokens: int = LEAST_TOKENS,
) -> tuple[list[int], list[PrefixGroup]]:
    """An order of the rows (old indices) in which groups are contiguous, and the groups in it.

    Rows with the same first block are one group over their common prefix, unless a subset with a longer
    prefix would save more reads. Groups come first, then the rows that share too little, both in their old
    order. A block that a row will still write is never shared, so whole tables may be passed.
    """
    by_first: dict[int, list[int]] = defaultdict(list)
    for row, table in enumerate(tables):
        if len(table) * block_size >= least_tokens:
            by_first[table[0]].append(row)
    order: list[int] = []
    groups: list[PrefixGroup] = []
    least_blocks = -(-least_tokens // block_size)
    for rows in by_first.values():
        for members, blocks in _best_groups(tables, rows, least_rows, least_blocks):
            groups.append(PrefixGroup(len(order), len(members), blocks))
            order += members
    grouped = set(order)
    return order + [row for row in range(len(tables)) if row not in grouped], groups


def prefix_tiles(
    groups: Sequence[PrefixGroup], rows: int, tiles: int, rows_per_tile: int, block_size: int = 16
) -> PrefixTiles:
    """Groups split into at most `tiles` tiles of rows; groups that save least are left out if necessary."""
    result = PrefixTiles([0] * tiles, [0] * tiles, [0] * tiles, [0] * rows)
    used = 0
    for group in sorted(groups, key=lambda group: -(group.rows - 1) * group.blocks):
        needed = -(-group.rows // rows_per_tile)
        if used + needed > tiles:
            continue
        tokens = group.blocks * block_size
        end = group.first + group.rows
        result.tokens[group.first : end] = [tokens] * group.rows
        for first in range(group.first, end, rows_per_tile):
            result.first_rows[used] = first
            result.row_counts[used] = min(rows_per_tile, end - first)
            result.tile_tokens[used] = tokens
            used += 1
    return result


def _best_groups(
    tables: Sequence[Sequence[int]], rows: list[int], least_rows: int, least_blocks: int
) -> list[tuple[list[int], int]]:
    """Groups among rows with a common start: all of them, or, if that saves more, those after each fork."""
    if len(rows) < least_rows:
        return []
    blocks = _common_blocks(tables, rows)
    whole = [(rows, blocks)] if blocks >= least_blocks else []
    branches: dict[int, list[int]] = defaultdict(list)
    for row in rows:
        if len(tables[row]) > blocks:
            branches[tables[row][blocks]].append(row)
    if all(len(branch) < least_rows for branch in branches.values()):
        return whole
    parts = [
        group
        for branch in branches.values()
        for group in _best_groups(tables, branch, least_rows, least_blocks)
    ]
    return parts if _saved(parts) > _saved(whole) else whole


def _saved(groups: Sequence[tuple[list[int], int]]) -> int:
    """The number of block reads saved."""
    return sum((len(rows) - 1) * blocks for rows, blocks in groups)


def _common_blocks(tables: Sequence[Sequence[int]], rows: Sequence[int]) -> int:
    """The number of leading blocks that all these tables have in common.

    By bisection: a block of the prefix cache has one history, so tables equal at a position are equal before
    it.
    """
    model = tables[rows[0]]
    low, high = 0, min(len(tables[row]) for row in rows)
    while low < high:
        middle = (low + high) // 2
        if all(tables[row][middle] == model[middle] for row in rows):
            low = middle + 1
        else:
            high = middle
    return low
