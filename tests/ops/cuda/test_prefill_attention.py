"""Prefill attention agrees with the reference on mixed rows, and a token's bits depend on its context."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from ridgeline.ops import reference
from ridgeline.ops.cuda.attention import prefill_specialized
from ridgeline.ops.cuda.attention.gather_kv import gather_scratch_tokens, make_prefill_scratch
from ridgeline.ops.cuda.attention.prefill_attention import (
    PrefillConfig,
    prefill_attention,
    prefill_config,
    tile_tokens_of,
)
from ridgeline.ops.cuda.attention.prefill_plan import GATHER_UNIT, plan_prefill
from ridgeline.ops.cuda.dependent_launch import INTERPRETED
from ridgeline.ops.inputs import InputRow, StepInputs
from tests.ops.cuda.conftest import assert_close
from tests.ops.cuda.gluon_model import modelled

BLOCK_SIZE = 16


# (tokens already cached, tokens of this step): whole prompts, chunks, decodes, tile edges on both sides.
MIXED = [(0, 1), (39, 1), (0, 37), (150, 13), (63, 2), (64, 64), (127, 1), (5, 130)]


@dataclass
class Sequences:
    """Sequences of known keys, values and queries, to be cut into steps; `kv` as the engine lays it out."""

    q: list[Tensor]
    kv: Tensor
    tables: Tensor
    blocks: list[list[int]]

    def cached(self, device: str) -> tuple[Tensor, Tensor]:
        return self.kv.to(device), self.tables.to(device)


def make_sequences(
    lengths: list[int], heads: int, kv_heads: int, dim: int, dtype: torch.dtype, seed: int = 0
) -> Sequences:
    """Contents come from each sequence's own length, so that two seeds differ in block tables only."""
    counts = [-(-length // BLOCK_SIZE) for length in lengths]
    free = list(range(1, sum(counts) + 5))
    random.Random(seed).shuffle(free)
    blocks = [[free.pop() for _ in range(count)] for count in counts]
    kv = torch.full((sum(counts) + 5, kv_heads, 2, BLOCK_SIZE, dim), torch.nan, dtype=dtype)
    tables = torch.zeros(len(lengths) + 3, max(counts) + 2, dtype=torch.int32)
    q = []
    for index, (length, own) in enumerate(zip(lengths, blocks, strict=True)):
        generator = torch.Generator().manual_seed(length)
        content = torch.randn(2, length, kv_heads, dim, generator=generator).to(dtype)
        for position in range(length):
            kv[own[position // BLOCK_SIZE], :, :, position % BLOCK_SIZE] = content[:, position].transpose(
                0, 1
            )
        tables[_table_row(index), : len(own)] = torch.tensor(own, dtype=torch.int32)
        q.append(torch.randn(length, heads, dim, generator=generator).to(dtype))
    return Sequences(q, kv, tables, blocks)


def _table_row(index: int) -> int:
    return index + 2


def attend(
    sequences: Sequences,
    rows: list[tuple[int, int, int]],
    device: str,
    config: PrefillConfig | None = None,
    first_token: int = 0,
    **options: object,
) -> list[Tensor]:
    """Attention of one step of (sequence, tokens cached before, tokens of the step), per row."""
    kv, tables = sequences.cached(device)
    _, kv_heads, _, _, dim = kv.shape
    heads, dtype = sequences.q[0].shape[1], kv.dtype
    parts = [sequences.q[index][start : start + count] for index, start, count in rows]
    q = torch.cat([torch.full((first_token, heads, dim), torch.nan, dtype=dtype), *parts]).to(device)
    used = config or prefill_config(dim, dtype)
    plan = plan_prefill(
        [count for _, _, count in rows],
        [start + count for _, start, count in rows],
        used.block_m // (heads // kv_heads),
        table_rows=[_table_row(index) for index, _, _ in rows],
        first_token=first_token,
    )
    scratch = make_prefill_scratch(plan.gathered_tokens, kv_heads, dim, dtype, device)
    scratch.keys.fill_(torch.nan)
    scratch.values.fill_(torch.nan)
    out = torch.full_like(q, torch.nan)
    views = plan.device_views(torch.from_numpy(plan.pack()).to(device))
    prefill_attention(
        q,
        kv,
        tables,
        views,
        out,
        scratch,
        scale=dim**-0.5,
        config=config,
        **options,  # type: ignore[arg-type]
    )
    assert out[:first_token].isnan().all()
    return list(out[first_token:].cpu().split([count for _, _, count in rows]))


def expected(
    sequences: Sequences,
    rows: list[tuple[int, int, int]],
    window: int | None,
    softcap: float | None,
    chunked: bool = False,
    sinks: Tensor | None = None,
) -> Tensor:
    inputs = StepInputs.from_rows(
        [InputRow([0] * count, start, sequences.blocks[index], None) for index, start, count in rows],
        BLOCK_SIZE,
    )
    q = torch.cat([sequences.q[index][start : start + count] for index, start, count in rows]).float()
    plain = sequences.kv.float().permute(2, 0, 3, 1, 4)  # keys and values, block, token, head, dim
    plan = reference.plan_attention(inputs, window, chunked)
    return reference.paged_attention(q, plain, plan, q.shape[-1] ** -0.5, softcap, sinks)


def of_mixed(rows: list[tuple[int, int]]) -> tuple[list[int], list[tuple[int, int, int]]]:
    return [s + c for s, c in rows], [(index, s, c) for index, (s, c) in enumerate(rows)]


def small(gathered: bool) -> PrefillConfig:
    return PrefillConfig(32, 32, 4, 2, gathered)


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize(
    ("window", "softcap"), [(None, None), (1, None), (7, None), (64, 5.0), (100, None), (None, 5.0)]
)
def test_mixed_rows_agree_with_the_reference(
    window: int | None, softcap: float | None, gathered: bool, device: str
) -> None:
    lengths, rows = of_mixed(MIXED)
    sequences = make_sequences(lengths, 4, 2, 32, torch.float32)
    out = attend(sequences, rows, device, small(gathered), window=window, softcap=softcap, first_token=3)
    assert_close(torch.cat(out), expected(sequences, rows, window, softcap), torch.float32)


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("window", [1, 7, 32, 50, 64, 100])
def test_chunks_hide_the_tokens_before_their_start(window: int, gathered: bool, device: str) -> None:
    """Of a length that is a tile's, part of one, or neither."""
    lengths, rows = of_mixed(MIXED)
    sequences = make_sequences(lengths, 4, 2, 32, torch.float32)
    out = attend(sequences, rows, device, small(gathered), window=window, chunked=True)
    assert_close(torch.cat(out), expected(sequences, rows, window, None, chunked=True), torch.float32)


@pytest.mark.parametrize("window", [None, 7])
def test_sinks_take_their_share_of_every_head(window: int | None, device: str) -> None:
    lengths, rows = of_mixed(MIXED)
    sequences = make_sequences(lengths, 6, 2, 32, torch.float32)
    sinks = torch.tensor([-20.0, -1.0, 0.0, 1.0, 5.0, 200.0])
    out = attend(sequences, rows, device, small(False), window=window, sinks=sinks.to(device))
    assert_close(torch.cat(out), expected(sequences, rows, window, None, sinks=sinks), torch.float32)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dtype"),
    [
        (9, 3, 64, torch.bfloat16),
        (4, 4, 20, torch.float32),
        (8, 1, 8, torch.float16),
        (8, 2, 128, torch.bfloat16),
        (2, 1, 256, torch.bfloat16),
        (2, 2, 256, torch.float32),
        (16, 1, 72, torch.float16),
    ],
)
def test_the_shipped_shapes_of_tile_agree_with_the_reference(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: str
) -> None:
    lengths, rows = of_mixed([(0, 1), (70, 1), (0, 37), (150, 66)])
    sequences = make_sequences(lengths, heads, kv_heads, dim, dtype)
    out = attend(sequences, rows, device)
    assert_close(torch.cat(out), expected(sequences, rows, None, None), dtype)


def test_a_long_row_of_many_tokens_takes_the_gathered_copy_by_itself(device: str) -> None:
    lengths, rows = of_mixed([(40, 600), (0, 500)])
    sequences = make_sequences(lengths, 2, 1, 32, torch.bfloat16)
    reference_out = expected(sequences, rows, None, None)
    kv, tables = sequences.cached(device)
    q = torch.cat([sequences.q[0][40:], sequences.q[1]]).to(device)
    plan = plan_prefill([600, 500], [640, 500], tile_tokens_of(2, 1, 32, torch.bfloat16), table_rows=[2, 3])
    scratch = make_prefill_scratch(plan.gathered_tokens, 1, 32, torch.bfloat16, device)
    views = plan.device_views(torch.from_numpy(plan.pack()).to(device))
    for deterministic in (False, True):
        scratch.keys.fill_(torch.nan)
        out = torch.full_like(q, torch.nan)
        prefill_attention(q, kv, tables, views, out, scratch, scale=32**-0.5, deterministic=deterministic)
        assert_close(out, reference_out, torch.bfloat16)
        assert bool(scratch.keys.isnan().all()) is deterministic


def test_a_padded_row_is_written_as_zeros(device: str) -> None:
    sequences = make_sequences([20], 4, 2, 32, torch.float32)
    kv, tables = sequences.cached(device)
    q = torch.cat([sequences.q[0][19:], sequences.q[0][:1]]).to(device)
    plan = plan_prefill([1, 1], [20, 0], tile_tokens_of(4, 2, 32, torch.float32), table_rows=[2, 0])
    out = torch.full_like(q, torch.nan)
    views = plan.device_views(torch.from_numpy(plan.pack()).to(device))
    prefill_attention(q, kv, tables, views, out, None, scale=32**-0.5)
    assert_close(out[:1], expected(sequences, [(0, 19, 1)], None, None), torch.float32)
    assert out[1].count_nonzero() == 0


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("window", [None, 50])
def test_the_bits_of_a_token_depend_on_its_context_alone(
    window: int | None, gathered: bool, device: str
) -> None:
    """Whole, in chunks, token by token, in company, with other block tables; this is deterministic mode."""
    shape = (4, 2, 32, torch.bfloat16)
    config = None if not gathered else small(True)
    alone = make_sequences([141], *shape)
    company = make_sequences([30, 141, 77], *shape, seed=5)

    def steps(sequences: Sequences, index: int, cuts: list[int]) -> Tensor:
        parts = []
        for start, stop in pairwise(cuts):
            others = [(other, 3, 25) for other in range(len(sequences.q)) if other != index]
            rows = [*others[:1], (index, start, stop - start), *others[1:]]
            out = attend(sequences, rows, device, config, window=window, deterministic=True)
            parts.append(out[rows.index((index, start, stop - start))])
        return torch.cat(parts)

    whole = steps(alone, 0, [0, 141])
    assert_close(whole, expected(alone, [(0, 0, 141)], window, None), torch.bfloat16)
    assert torch.equal(whole, steps(alone, 0, [0, 1, 33, 64, 65, 128, 141]))
    assert torch.equal(whole[125:], steps(alone, 0, list(range(125, 142))))
    assert torch.equal(whole, steps(company, 1, [0, 50, 141]))


@pytest.fixture
def _gluon_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The specialized kernel runs as it is on a GPU, else against a model of Gluon."""
    if INTERPRETED:
        kernel = modelled(prefill_specialized.__file__)["specialized_attention"]
        monkeypatch.setattr(prefill_specialized, "specialized_attention", partial(kernel, programs=3))


SPECIALIZED = [
    PrefillConfig(128, 128, 4, 2, specialized=True),
    PrefillConfig(128, 64, 4, 4, specialized=True, turns=True),
]


@pytest.mark.usefixtures("_gluon_runs")
@pytest.mark.parametrize("config", SPECIALIZED, ids=lambda config: f"{config.block_n}x{config.stages}")
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (4, 2), (16, 1)])
def test_the_specialized_kernel_agrees_with_the_reference(
    heads: int, kv_heads: int, config: PrefillConfig, device: str
) -> None:
    lengths, rows = of_mixed([(0, 1), (39, 1), (0, 37), (150, 13), (127, 2), (500, 140), (5, 130)])
    sequences = make_sequences(lengths, heads, kv_heads, 128, torch.bfloat16)
    out = attend(sequences, rows, device, config, first_token=3)
    assert_close(torch.cat(out), expected(sequences, rows, None, None), torch.bfloat16)


@pytest.mark.usefixtures("_gluon_runs")
def test_the_specialized_kernel_gives_a_token_the_same_bits_however_it_is_cut(device: str) -> None:
    sequences = make_sequences([300], 4, 2, 128, torch.bfloat16)
    (whole,) = attend(sequences, [(0, 0, 300)], device, SPECIALIZED[0])
    parts = [
        attend(sequences, [(0, a, b - a)], device, SPECIALIZED[0]) for a, b in pairwise([0, 1, 200, 257, 300])
    ]
    assert torch.equal(whole, torch.cat([part for (part,) in parts]))


def test_a_plan_covers_every_token_once_with_the_most_keys_first() -> None:
    counts, contexts = [1, 70, 32, 33, 1], [900, 70, 232, 64, 0]
    plan = plan_prefill(counts, contexts, 32, table_rows=[7, 3, 4, 9, 0], first_token=11)
    assert plan.rows[:, 0].tolist() == [7, 3, 4, 9, 0]
    assert plan.rows[:, 1].tolist() == [11, 12, 82, 114, 147]
    assert sorted(map(tuple, plan.tiles.tolist())) == [
        (0, 0), (1, 0), (1, 32), (1, 64), (2, 0), (3, 0), (3, 32), (4, 0),
    ]  # fmt: skip
    ends = [contexts[r] - counts[r] + min(counts[r], first + 32) for r, first in plan.tiles.tolist()]
    assert ends == sorted(ends, reverse=True)
    assert (plan.rows[:, 4] % GATHER_UNIT == 0).all()
    places = [(int(plan.rows[r, 4]) + first) for r, first in plan.units.tolist()]
    assert places == list(range(0, plan.gathered_tokens, GATHER_UNIT))


def test_a_packed_plan_is_found_again_in_the_uploaded_copy() -> None:
    plan = plan_prefill([5, 40], [5, 100], 32, table_rows=[1, 0])
    buffer = torch.cat([torch.from_numpy(plan.pack()), torch.full((9,), -1, dtype=torch.int32)])
    assert plan.pack().dtype == np.int32
    assert len(plan.pack()) == plan.packed_size
    views = plan.device_views(buffer)
    assert np.array_equal(views.rows, plan.rows)
    assert np.array_equal(views.tiles, plan.tiles)
    assert np.array_equal(views.units, plan.units)


def test_a_plan_for_other_tiles_is_refused(device: str) -> None:
    sequences = make_sequences([20], 4, 2, 32, torch.float32)
    plan = plan_prefill([20], [20], 5, table_rows=[2])
    views = plan.device_views(torch.from_numpy(plan.pack()))
    q = sequences.q[0]
    with pytest.raises(ValueError, match="tiles of 5 tokens"):
        prefill_attention(q, sequences.kv, sequences.tables, views, q, None, scale=1.0)


def test_scratch_is_bounded_and_holds_whole_units() -> None:
    assert gather_scratch_tokens(8192, 32768) == 32768
    assert gather_scratch_tokens(8192, 4100) % GATHER_UNIT == 0
    assert gather_scratch_tokens(8192, 1 << 20) == 1 << 17
