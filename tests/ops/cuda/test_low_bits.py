"""Products with matrices in 8 and 4 bits: those of the dequantized weights with inputs rounded as the format
says. `ops.low_bits.expanded` and `ops.input_rounding` are the reference."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.ops import reference
from ridgeline.ops.cuda.experts.experts import experts
from ridgeline.ops.cuda.experts.scratch import experts_scratch
from ridgeline.ops.cuda.low_bits import eight, four
from ridgeline.ops.cuda.low_bits.expand_eight import expand_eight
from ridgeline.ops.cuda.low_bits.four import expand_four, four_linear
from ridgeline.ops.cuda.low_bits.gemv import LowGemvConfig, low_gemv
from ridgeline.ops.cuda.low_bits.products import LowScratch, low_linear, low_splits
from ridgeline.ops.cuda.low_bits.round_inputs import round_inputs
from ridgeline.ops.input_rounding import round_inputs as reference_inputs
from ridgeline.ops.low_bit_formats import ONLINE, LowBitFormat, ScratchSizes
from ridgeline.ops.low_bits import LowBits, expanded
from tests.ops.cuda.conftest import assert_close, relative_error

FORMATS = {
    "fp8": ONLINE["fp8"],
    "fp8 blocks": LowBitFormat("fp8", 128, inputs=True),
    "fp8 groups of 32": LowBitFormat("fp8", 32, inputs=True),
    "fp8 groups of 96": LowBitFormat("fp8", 96, inputs=True),
    "fp8 groups of 256": LowBitFormat("fp8", 256, inputs=True),
    "fp8 weights alone": LowBitFormat("fp8"),
    "int8": ONLINE["int8"],
    "int8 groups of 192": LowBitFormat("int8", 192, inputs=True),
    "int8 weights alone": LowBitFormat("int8", 64),
    "int8 weights alone, groups of 96": LowBitFormat("int8", 96),
    "int4": ONLINE["int4"],
    "int4 groups of 32": LowBitFormat("int4", 32, scale="float16"),
    "int4 zeros": LowBitFormat("int4", 64, zeros=True, scale="float16"),
}
N, K = 48, 320


def matrix(name: str, device: str, rows: int = N, columns: int = K, ordered: bool = False) -> LowBits:
    format = FORMATS[name]
    made = LowBits.empty(format, (rows, columns), device, ordered=ordered)
    if made.order is not None:
        made.order.copy_(torch.randperm(columns))
    if not format.zeros:
        made.round(0, torch.randn(rows, columns, device=device) / columns**0.5)
        return made
    groups = format.groups(columns)
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, device=device)
    scales = torch.rand(rows, groups, device=device) / columns**0.5
    made.fill(0, codes, scales, torch.randint(0, 16, (rows, groups), device=device))
    return made


def tokens(count: int, device: str, columns: int = K, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(count, columns, device=device).to(dtype)


def exact(x: Tensor, weight: LowBits) -> Tensor:
    """In float64: weights dequantized, inputs rounded as the format says."""
    format = weight.format
    inputs = x.float().cpu()
    if format.inputs:
        element = "e4m3" if format.element == "fp8" else "int8"
        inputs = reference_inputs(inputs, element, group=format.group)
    return inputs.double() @ expanded(weight).double().cpu().t()


def scratch_for(count: int, weight: LowBits, device: str) -> LowScratch:
    sizes = ScratchSizes().with_matrix(weight.format, *weight.shape, count)
    scratch = LowScratch.empty(sizes, torch.bfloat16, device)
    scratch.codes.fill_(0x7F)
    scratch.steps.fill_(float("nan"))
    scratch.wide.fill_(float("nan"))
    return scratch


@pytest.mark.parametrize("element", ["fp8", "int8"])
@pytest.mark.parametrize(("group", "columns"), [(0, 200), (32, 200), (128, 200), (96, 2048)])
def test_inputs_are_rounded_as_the_reference_says_bit_for_bit(
    element: str, group: int, columns: int, device: str
) -> None:
    x = tokens(5, device, columns)
    x[1] = 0
    x[2] *= 1000
    groups = -(-columns // group) if group else 1
    dtype = torch.int8 if element == "int8" else torch.float8_e4m3fn
    codes, steps = torch.empty_like(x, dtype=dtype), torch.empty(groups, 5, device=device)
    round_inputs(x, codes, steps, group)
    values = codes.float() * steps.t().repeat_interleave(group or columns, dim=1)[:, :columns]
    expected = reference_inputs(x.float().cpu(), "e4m3" if element == "fp8" else element, group=group)
    assert torch.equal(values.cpu(), expected)
    alone = torch.empty_like(codes[3:4])
    round_inputs(x[3:4].contiguous(), alone, torch.empty(groups, 1, device=device), group)
    assert torch.equal(alone.view(torch.uint8), codes[3:4].view(torch.uint8))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("count", [1, 2, 20, 70])
def test_a_product_is_that_of_the_dequantized_weights(name: str, count: int, device: str) -> None:
    weight, x = matrix(name, device), tokens(count, device)
    bias = torch.randn(N, device=device).bfloat16()
    out = torch.full((count, N), float("nan"), dtype=torch.bfloat16, device=device)
    low_linear(x, weight, out, bias, scratch=scratch_for(count, weight, device))
    assert_close(out, exact(x, weight) + bias.double().cpu(), torch.bfloat16, 3e-3)


@pytest.mark.parametrize("name", ["fp8", "fp8 blocks", "fp8 groups of 96", "int8", "int4 zeros"])
def test_partial_sums_add_up_to_the_product_in_float32(name: str, device: str) -> None:
    columns = 2048
    weight, x = matrix(name, device, columns=columns), tokens(3, device, columns)
    splits = low_splits(3, weight)
    assert splits > 1
    parts = torch.full((splits, 3, N), float("nan"), device=device)
    low_linear(x, weight, parts, scratch=scratch_for(3, weight, device))
    assert_close(parts.sum(0), exact(x, weight), torch.float32, 2e-3 if device == "cuda" else 1e-5)


@pytest.mark.parametrize("name", ["fp8", "fp8 blocks", "fp8 groups of 256", "int8", "int4", "int4 zeros"])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_one_token_with_its_norm_and_what_follows(name: str, activation: str | None, device: str) -> None:
    weight, x = matrix(name, device), tokens(1, device)
    norm, bias = torch.rand(K, device=device) + 0.5, torch.randn(N, device=device).bfloat16()
    wide = x.float()
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * norm).bfloat16()
    expected = (exact(normed, weight) + bias.double().cpu()).bfloat16()
    config = LowGemvConfig(4, 1, 1)  # several steps along K
    options = {"bias": bias, "norm_weight": norm, "eps": 1e-6, "config": config}
    if activation is None:
        residual = torch.randn(1, N, device=device).bfloat16()
        expected = residual.double().cpu() + expected.double()
        low_gemv(x, weight, residual=residual, **options)  # type: ignore[arg-type]
        assert_close(residual, expected, torch.bfloat16, 5e-3)
        return
    out = torch.empty(1, N // 2, dtype=torch.bfloat16, device=device)
    low_gemv(x, weight, out, activation="silu", **options)  # type: ignore[arg-type]
    gate, up = expected.float().chunk(2, dim=1)
    assert_close(out, F.silu(gate) * up, torch.bfloat16, 5e-3)


@pytest.mark.parametrize("count", [1, 3, 100])
def test_columns_in_another_order_are_those_of_the_matrix(count: int, device: str) -> None:
    weight, x = matrix("int4", device, ordered=True), tokens(count, device)
    assert weight.order is not None
    assert not torch.equal(weight.order, weight.order.sort().values)
    out = torch.empty(count, N, dtype=torch.bfloat16, device=device)
    low_linear(x, weight, out, scratch=scratch_for(count, weight, device))
    assert_close(out, exact(x, weight), torch.bfloat16, 4e-3)


@pytest.mark.parametrize("name", ["int4", "int4 zeros", "fp8 weights alone", "int8 weights alone"])
def test_an_expanded_matrix_has_the_rounded_values(name: str, device: str) -> None:
    weight = matrix(name, device, columns=300 if name.startswith("fp8") else 320)
    out = torch.full(weight.shape, float("nan"), dtype=torch.bfloat16, device=device)
    (expand_four if name.startswith("int4") else expand_eight)(weight, out)
    assert torch.equal(out, expanded(weight).bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_int4_with_inputs_of_either_16_bit_type(dtype: torch.dtype, device: str) -> None:
    weight, x = matrix("int4 zeros", device), tokens(4, device, dtype=dtype)
    out = torch.empty(4, N, dtype=dtype, device=device)
    four_linear(x, weight, out)
    assert_close(out, exact(x, weight), dtype)


@pytest.mark.parametrize("name", ["fp8", "fp8 blocks", "int8", "int4"])
def test_in_deterministic_mode_a_row_has_the_same_bits_in_any_company(name: str, device: str) -> None:
    weight, x = matrix(name, device), tokens(70, device)
    outs = []
    for rows in (slice(0, 70), slice(5, 6)):
        part = x[rows].contiguous()
        out = torch.empty(len(part), N, dtype=torch.bfloat16, device=device)
        low_linear(part, weight, out, scratch=scratch_for(70, weight, device), deterministic=True)
        outs.append(out)
    assert torch.equal(outs[0][5:6], outs[1])


@pytest.mark.parametrize("name", ["fp8", "fp8 groups of 32", "fp8 groups of 96", "int8", "fp8 weights alone"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_experts_are_those_of_the_dequantized_weights(name: str, deterministic: bool, device: str) -> None:
    count, num, per_token, hidden, size = 6, 4, 2, 64, 32
    format = FORMATS[name]

    def stack(rows: int, columns: int) -> LowBits:
        made = LowBits.empty(format, (num, rows, columns), device)
        for expert in range(num):
            made.of(expert).round(0, torch.randn(rows, columns, device=device) / columns**0.5)
        return made

    gate_up, down, x = stack(2 * size, hidden), stack(hidden, size), tokens(count, device, hidden)
    chosen = torch.stack([torch.randperm(num)[:per_token] for _ in range(count)]).to(torch.int32).to(device)
    shares = torch.rand(count, per_token, device=device)
    biases = {
        "gate_up_bias": torch.randn(num, 2 * size, device=device).bfloat16(),
        "down_bias": torch.randn(num, hidden, device=device).bfloat16(),
    }
    sizes = ScratchSizes().with_matrix(format, 2 * size, hidden, count, stack=True)
    sizes = sizes.with_matrix(format, hidden, size, count * per_token, stack=True)
    out = torch.empty(count, hidden, dtype=torch.bfloat16, device=device)
    experts(
        x, chosen, shares, gate_up, down, out, "silu",
        experts_scratch(count, num, per_token, hidden, size, torch.bfloat16, device),
        low=LowScratch.empty(sizes, torch.bfloat16, device), deterministic=deterministic, **biases,
    )  # fmt: skip

    def product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        inputs = rows.float()
        if format.inputs:
            element = "e4m3" if format.element == "fp8" else "int8"
            inputs = reference_inputs(inputs, element, group=format.group)
        found = inputs @ weight.t()
        return (found if bias is None else found + bias.float()).bfloat16()

    wide = [expanded(each).cpu() for each in (gate_up, down)]
    expected = reference.experts(
        x.cpu(), chosen.cpu().long(), shares.cpu(), *wide, "silu",
        **{each: bias.cpu() for each, bias in biases.items()}, product=product,
    )  # fmt: skip
    assert_close(out, expected, torch.bfloat16, 2e-2)


def test_rounding_is_that_of_the_quantizer() -> None:
    import numpy as np

    from ridgeline.models.quantized.format import fp8_format, int4_format, int8_format
    from ridgeline.models.quantized.matrix import dequantize
    from ridgeline.models.quantized.rounding import quantize

    weights = np.random.default_rng(0).standard_normal((16, 256), np.float32)
    for name, format in (("fp8", fp8_format()), ("int8", int8_format("float32")), ("int4", int4_format())):
        made = LowBits.empty(FORMATS[name], (16, 256), "cpu")
        made.round(0, torch.from_numpy(weights))
        expected = torch.from_numpy(dequantize(quantize(weights, format)))
        assert relative_error(expanded(made), expected) < 1e-6


def test_groups_that_no_kernel_computes_are_refused() -> None:
    with pytest.raises(ValueError, match="int4 in groups of 48: the GPU computes multiples of 32"):
        LowBitFormat("int4", 48)


def test_configs_cover_small_and_large_steps() -> None:
    assert eight.eight_config(1, 64).block_t == 16
    assert eight.eight_config(4096, 64).block_t == 128
    assert four.four_config(3, 64).block_t == 16
