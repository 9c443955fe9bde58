"""Decode attention against ops/reference: fused inputs, splits, windows, soft-cap, padding, prefixes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline.ops import reference
from ridgeline.ops.cuda.attention.prefix_groups import find_shared_prefixes, prefix_tiles
from ridgeline.ops.inputs import InputRow, StepInputs
from tests.ops.cuda.conftest import assert_close, relative_error

prefixes = pytest.importorskip("ridgeline.ops.cuda.attention.shared_prefix")
decode = pytest.importorskip("ridgeline.ops.cuda.attention.decode_attention")
combine = pytest.importorskip("ridgeline.ops.cuda.attention.decode_combine")
configs = pytest.importorskip("ridgeline.ops.cuda.attention.decode_config")

BLOCK = 16
EPS = 1e-6
CONFIG = configs.DecodeConfig(block_tokens=32, split_tokens=32, num_warps=4, num_stages=2)


@dataclass
class Case:
    """Rows of the given contexts over a shuffled cache: slots no row owns, and the new tokens', hold NaN."""

    contexts: list[int]
    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    device: str
    rope_dim: int | None = None
    norm: bool = True
    bias: bool = False
    partials: int = 0
    shared_blocks: int = 0  # leading blocks that all rows have in common

    def __post_init__(self) -> None:
        rows, device = len(self.contexts), self.device
        half = (self.dim if self.rope_dim is None else self.rope_dim) // 2
        width = (self.heads + 2 * self.kv_heads) * self.dim
        needed = [-(-context // BLOCK) for context in self.contexts]
        order = torch.randperm(sum(needed) + 3).tolist()
        common = [order.pop() for _ in range(self.shared_blocks)]
        self.blocks = [
            common[:count] + [order.pop() for _ in range(count - min(count, len(common)))] for count in needed
        ]
        self.kv = torch.full(
            (sum(needed) + 3, self.kv_heads, 2, BLOCK, self.dim), torch.nan, dtype=self.dtype
        )
        for blocks, context in zip(self.blocks, self.contexts, strict=True):
            for position in range(context - 1):
                token = self.kv[blocks[position // BLOCK], :, :, position % BLOCK]
                token.copy_(torch.where(token.isnan(), torch.randn(token.shape).to(self.dtype), token))
        self.kv = self.kv.to(device)
        self.table_rows = torch.randperm(rows + 2)[:rows].to(device, torch.int32)
        self.tables = torch.zeros(rows + 2, max(needed) + 1, dtype=torch.int32)
        for row, blocks in zip(self.table_rows.tolist(), self.blocks, strict=True):
            self.tables[row, : len(blocks)] = torch.tensor(blocks)
        self.tables = self.tables.to(device)
        positions = [max(context - 1, 0) for context in self.contexts]
        self.positions = torch.tensor(positions, dtype=torch.int32, device=device)
        self.slots = torch.tensor(
            [
                blocks[position // BLOCK] * BLOCK + position % BLOCK if blocks else -1
                for blocks, position in zip(self.blocks, positions, strict=True)
            ],
            dtype=torch.int32,
            device=device,
        )
        angles = torch.randn(max(positions) + 1, half)
        self.cos, self.sin = angles.cos().to(device), angles.sin().to(device)
        self.q_norm = torch.rand(self.dim, device=device) + 0.5 if self.norm else None
        self.k_norm = torch.rand(self.dim, device=device) + 0.5 if self.norm else None
        self.qkv_bias = torch.randn(width).to(device, self.dtype) if self.bias else None
        shape = (self.partials, rows, width) if self.partials else (rows, width)
        self.qkv = torch.randn(shape).to(device, torch.float32 if self.partials else self.dtype)
        self.out = torch.full((rows, self.heads, self.dim), torch.nan, dtype=self.dtype, device=device)
        self.scale = self.dim**-0.5

    def run(self, splits: int, parts: int | None = None, **options: Any) -> Tensor:
        scratch = options.pop("scratch", None)
        if scratch is None:
            rows, parts = len(self.contexts), parts or splits
            scratch = combine.decode_scratch(rows, self.heads, self.kv_heads, self.dim, parts, self.device)
            scratch.acc.fill_(torch.nan)
            scratch.tops.fill_(torch.nan)
        arguments = {
            "qkv": self.qkv,
            "q_norm": self.q_norm,
            "k_norm": self.k_norm,
            "eps": EPS,
            "bias": self.qkv_bias,
            "config": CONFIG,
        } | options
        decode.decode_attention(
            kv=self.kv,
            tables=self.tables,
            table_rows=self.table_rows,
            positions=self.positions,
            slots=self.slots,
            cos=self.cos,
            sin=self.sin,
            out=self.out,
            scratch=scratch,
            scale=self.scale,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            splits=splits,
            **arguments,
        )
        assert scratch.counters.eq(0).all(), "counters must be ready for the next launch"
        return self.out

    def heads_of_tokens(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the new tokens, rounded step by step as the reference does."""
        qkv = self.qkv.cpu().float()
        qkv = qkv.sum(0) if self.partials else qkv
        if self.qkv_bias is not None:
            qkv = qkv + self.qkv_bias.cpu().float()
        sizes = [self.heads * self.dim, self.kv_heads * self.dim, self.kv_heads * self.dim]
        q, k, v = (part.unflatten(1, (-1, self.dim)) for part in qkv.to(self.dtype).split(sizes, dim=1))
        if self.q_norm is not None and self.k_norm is not None:
            q = reference.rms_norm(q, self.q_norm.cpu(), EPS)
            k = reference.rms_norm(k, self.k_norm.cpu(), EPS)
        cos, sin = self.cos.cpu()[self.positions.cpu()], self.sin.cpu()[self.positions.cpu()]
        return reference.apply_rope(q, cos, sin), reference.apply_rope(k, cos, sin), v

    def expected(
        self,
        window: int | None = None,
        softcap: float | None = None,
        chunked: bool = False,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Output in float32 of the rows that are not padding, their indices, and the cache afterwards."""
        q, k, v = self.heads_of_tokens()
        real = [row for row, context in enumerate(self.contexts) if context]
        rows = [InputRow([0], self.contexts[row] - 1, self.blocks[row], None) for row in real]
        inputs = StepInputs.from_rows(rows, BLOCK)
        kv = self.kv.cpu().permute(2, 0, 3, 1, 4).contiguous()  # [2, num_blocks, block_size, K, D]
        reference.write_kv(k[real], v[real], kv, inputs.slots)
        plan = reference.plan_attention(inputs, window, chunked)
        sinks = None if sinks is None else sinks.cpu()
        out = reference.paged_attention(q[real].float(), kv.float(), plan, self.scale, softcap, sinks)
        return out, torch.tensor(real), kv.permute(1, 3, 0, 2, 4)

    def check(
        self, splits: int, window: int | None = None, softcap: float | None = None, **more: Any
    ) -> None:
        ref, real, cache = self.expected(window, softcap, **more)
        out = self.run(splits, window=window, softcap=softcap, **more).cpu()
        assert_close(out[real], ref, self.dtype)
        assert torch.equal(self.kv.cpu().isnan(), cache.isnan()), (
            "something else than the new tokens was written"
        )
        assert_close(self.kv.cpu().nan_to_num(), cache.nan_to_num(), self.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("splits", [1, 3])
def test_decode_attention_agrees_with_the_reference(dtype: torch.dtype, splits: int, device: str) -> None:
    Case([1, 33, 2, 100], heads=8, kv_heads=2, dim=32, dtype=dtype, device=device).check(splits)


@pytest.mark.parametrize("context", [16, 17, 32, 33, 64, 65])
def test_the_last_tile_may_be_full_or_hold_one_token(context: int, device: str) -> None:
    Case([context], heads=2, kv_heads=1, dim=16, dtype=torch.float32, device=device).check(splits=2)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 8), (6, 2, 24), (2, 1, 256)])
def test_odd_head_counts_and_sizes(heads: int, kv_heads: int, dim: int, device: str) -> None:
    Case([45, 70], heads, kv_heads, dim, torch.float32, device).check(splits=2)


@pytest.mark.parametrize("partials", [1, 3])
def test_partial_sums_and_bias_are_added_before_the_one_rounding(partials: int, device: str) -> None:
    case = Case([20, 50], 4, 2, 16, torch.bfloat16, device, norm=False, bias=True, partials=partials)
    case.check(splits=2)


def test_bias_is_added_to_rounded_input_too(device: str) -> None:
    Case([20, 50], 4, 2, 16, torch.float32, device, norm=False, bias=True).check(splits=1)


def test_rope_may_turn_only_the_first_elements(device: str) -> None:
    Case([20, 50], 4, 2, 32, torch.float32, device, rope_dim=12).check(splits=2)


def test_nothing_may_be_turned(device: str) -> None:
    Case([20, 50], 4, 2, 32, torch.float32, device, rope_dim=0).check(splits=2)


@pytest.mark.parametrize("window", [1, 7, 16, 40, 500])
def test_chunks_hide_the_tokens_before_their_start(window: int, device: str) -> None:
    contexts = [1, 40, 41, 100]
    Case(contexts, 4, 2, 16, torch.float32, device).check(splits=2, window=window, chunked=True)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("splits", [1, 3])
def test_sinks_take_their_share_of_every_head(splits: int, window: int | None, device: str) -> None:
    case = Case([0, 1, 30, 100], 6, 2, 16, torch.float32, device)
    sinks = torch.tensor([-20.0, -1.0, 0.0, 1.0, 5.0, 200.0], device=device)
    case.check(splits=splits, window=window, sinks=sinks)
    assert relative_error(case.expected(window, sinks=sinks)[0], case.expected(window)[0]) > 1e-2


def test_sinks_count_once_over_a_written_cache(device: str) -> None:
    case = Case([33, 100], 4, 2, 16, torch.float32, device)
    sinks = torch.randn(4, device=device)
    out = case.run(splits=3, sinks=sinks).clone()
    q = case.heads_of_tokens()[0].to(device)
    assert_close(case.run(splits=3, qkv=None, q=q, sinks=sinks), out, torch.float32)


@pytest.mark.parametrize("window", [1, 2, 20, 64, 500])
def test_a_window_hides_older_tokens(window: int, device: str) -> None:
    Case([1, 30, 100], 4, 2, 16, torch.float32, device).check(splits=2, window=window)


def test_softcap_bends_the_scores(device: str) -> None:
    case = Case([30, 100], 4, 2, 16, torch.float32, device)
    case.check(splits=2, softcap=2.0)
    assert relative_error(case.expected(softcap=2.0)[0], case.expected()[0]) > 1e-2


def test_a_padded_row_gives_zeros_and_writes_nothing(device: str) -> None:
    case = Case([0, 40, 0], 4, 2, 16, torch.float32, device)
    case.check(splits=3)
    assert case.out[0].eq(0).all()
    assert case.out[2].eq(0).all()


def test_rotated_queries_over_a_written_cache_give_the_same(device: str) -> None:
    fused = Case([1, 33, 100], 4, 2, 16, torch.float32, device)
    out = fused.run(splits=2).clone()
    q = fused.heads_of_tokens()[0].to(device)
    fused.out.fill_(torch.nan)
    again = fused.run(splits=2, qkv=None, q=q)  # the first run has written keys and values
    assert_close(again, out, torch.float32)


def test_the_result_of_a_row_does_not_depend_on_the_rows_beside_it(device: str) -> None:
    case = Case([90, 33, 70], 4, 2, 16, torch.bfloat16, device)
    together = case.run(splits=3).clone()
    for row in range(3):
        alone = Case([16], 4, 2, 16, torch.bfloat16, device)
        alone.kv, alone.tables = case.kv, case.tables
        for name in ("table_rows", "positions", "slots", "qkv"):
            setattr(alone, name, getattr(case, name)[row : row + 1].contiguous())
        alone.cos, alone.sin, alone.q_norm, alone.k_norm = case.cos, case.sin, case.q_norm, case.k_norm
        assert torch.equal(alone.run(splits=3)[0], together[row])


def test_a_scratch_that_is_too_small_is_refused(device: str) -> None:
    case = Case([40], 4, 2, 16, torch.float32, device)
    with pytest.raises(ValueError, match="too small for 1 rows in 5 parts"):
        case.run(splits=5, parts=4)


@pytest.mark.parametrize(
    ("rows", "longest", "expected"), [(1, None, 64), (8, None, 17), (256, None, 2), (1, 640, 10)]
)
def test_few_rows_are_split_more(rows: int, longest: int | None, expected: int) -> None:
    assert configs.decode_splits(rows, 8, sms=132, longest=longest) == expected


def share(case: Case, splits: int, parts: int, config: Any, **options: Any) -> Any:
    """The prefix of all rows of the case that have it, its attention computed into a scratch."""
    order, groups = find_shared_prefixes(case.blocks, BLOCK, least_rows=2, least_tokens=BLOCK)
    assert order == sorted(order), "the cases have their groups contiguous"
    per_tile = prefixes.rows_per_tile(case.heads, case.kv_heads, config)
    tiles = prefix_tiles(groups, len(case.contexts), 4, per_tile, BLOCK)
    on_device = [
        torch.tensor(numbers, dtype=torch.int32, device=case.device)
        for numbers in (tiles.first_rows, tiles.row_counts, tiles.tile_tokens, tiles.tokens)
    ]
    prefix = prefixes.SharedPrefix(*on_device, parts=parts)
    scratch = combine.decode_scratch(
        len(case.contexts), case.heads, case.kv_heads, case.dim, parts + splits, case.device
    )
    scratch.acc.fill_(torch.nan)
    scratch.tops.fill_(torch.nan)
    inputs = {"qkv": case.qkv, "q_norm": case.q_norm, "bias": case.qkv_bias, "eps": EPS} | options
    prefixes.shared_prefix_attention(
        kv=case.kv,
        tables=case.tables,
        table_rows=case.table_rows,
        positions=case.positions,
        cos=case.cos,
        sin=case.sin,
        scratch=scratch,
        prefix=prefix,
        scale=case.scale,
        num_heads=case.heads,
        num_kv_heads=case.kv_heads,
        splits=splits,
        config=config,
        **inputs,
    )
    return scratch, prefix


SMALL_TILES = prefixes.PrefixConfig(tile_heads=16, block_tokens=32, num_warps=4, num_stages=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("splits", "parts"), [(1, 1), (3, 2), (2, 5)])
def test_a_shared_prefix_and_the_rest_make_the_whole(
    dtype: torch.dtype, splits: int, parts: int, device: str
) -> None:
    contexts = [81, 99, 150, 97, 200, 90]  # 80 tokens shared: the first row adds its newest token alone
    case = Case(contexts, 6, 2, 32, dtype, device, shared_blocks=5)
    ref = case.expected()[0]
    scratch, prefix = share(case, splits, parts, SMALL_TILES)
    assert prefix.tokens.tolist() == [80] * 6
    out = case.run(splits, scratch=scratch, prefix=prefix)
    assert_close(out, ref, dtype)


def test_rows_that_share_nothing_stand_beside_a_group(device: str) -> None:
    case = Case([70, 90, 30, 0], 4, 2, 16, torch.float32, device, partials=2, shared_blocks=4)
    own = Case([70, 90, 30, 0], 4, 2, 16, torch.float32, device, partials=2)
    case.blocks[2] = [case.kv.shape[0] + block for block in own.blocks[2]]
    case.kv = torch.cat([case.kv, own.kv])
    case.tables[case.table_rows[2], :2] = torch.tensor(case.blocks[2], dtype=torch.int32)
    case.slots[2] = case.blocks[2][1] * BLOCK + 29 % BLOCK
    scratch, prefix = share(case, 2, 2, SMALL_TILES)
    assert prefix.tokens.tolist() == [64, 64, 0, 0]
    ref, real, _ = case.expected()
    out = case.run(2, scratch=scratch, prefix=prefix)
    assert_close(out[real], ref, torch.float32)
    assert out[3].eq(0).all()


def test_the_rows_of_a_group_do_not_read_their_prefix_again(device: str) -> None:
    case = Case([100, 100, 100], 4, 2, 16, torch.float32, device, shared_blocks=4)
    ref = case.expected()[0]
    scratch, prefix = share(case, 1, 2, SMALL_TILES)
    case.kv[case.blocks[0][:4]] = torch.nan
    assert_close(case.run(1, scratch=scratch, prefix=prefix), ref, torch.float32)


def test_rotated_queries_may_be_given_with_a_prefix(device: str) -> None:
    case = Case([70, 90], 4, 2, 16, torch.float32, device, shared_blocks=4)
    ref = case.expected()[0]
    case.run(splits=1)  # writes keys and values
    q = case.heads_of_tokens()[0].to(device)
    scratch, prefix = share(case, 2, 1, SMALL_TILES, qkv=None, q=q)
    case.out.fill_(torch.nan)
    assert_close(case.run(2, qkv=None, q=q, scratch=scratch, prefix=prefix), ref, torch.float32)


def test_a_window_and_a_shared_prefix_exclude_each_other(device: str) -> None:
    case = Case([70, 90], 4, 2, 16, torch.float32, device, shared_blocks=4)
    scratch, prefix = share(case, 1, 1, SMALL_TILES)
    with pytest.raises(ValueError, match="window"):
        case.run(1, scratch=scratch, prefix=prefix, window=8)
