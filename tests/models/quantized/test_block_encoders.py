"""Floats to GGUF blocks: what gguf reads from them, how far it is from the weights, and what is refused."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from ridgeline.models.files.gguf import BLOCK_SIZES
from ridgeline.models.quantized.block_encoders import ENCODERS, encode
from ridgeline.models.weights.dequant import dequantize

QUANTIZED = tuple(name for name in ENCODERS if name not in ("F32", "F16", "BF16"))
# The relative rms error of llama.cpp's encoders on this very matrix (libggml 0.25.3, no importances).
LLAMA_CPP = {
    "Q8_0": 0.00535,
    "Q4_0": 0.08594,
    "Q4_1": 0.07853,
    "Q5_0": 0.04269,
    "Q5_1": 0.03801,
    "Q4_K": 0.07129,
    "Q5_K": 0.03614,
    "Q6_K": 0.01777,
}


@pytest.fixture(scope="module")
def weights() -> np.ndarray:
    return np.random.default_rng(5).standard_normal((48, 512)).astype(np.float32) * np.float32(0.03)


def decoded(blocks: np.ndarray, type_name: str) -> np.ndarray:
    return dequantize(blocks.reshape(-1), type_name).reshape(len(blocks), -1)


def relative_error(weights: np.ndarray, values: np.ndarray, importance: float | np.ndarray = 1.0) -> float:
    squares = importance * (weights.astype(np.float64) - values) ** 2
    return float((squares.sum() / (importance * weights.astype(np.float64) ** 2).sum()) ** 0.5)


@pytest.mark.parametrize("name", ENCODERS)
def test_gguf_reads_the_same_values_bit_for_bit(weights: np.ndarray, name: str) -> None:
    blocks = encode(weights, name)
    theirs = gguf.quants.dequantize(blocks, GGMLQuantizationType[name])
    assert theirs.shape == weights.shape
    np.testing.assert_array_equal(theirs.view(np.uint32), decoded(blocks, name).view(np.uint32))


@pytest.mark.parametrize("name", QUANTIZED)
def test_the_error_is_that_of_llama_cpp_or_less(weights: np.ndarray, name: str) -> None:
    assert relative_error(weights, decoded(encode(weights, name), name)) < 1.02 * LLAMA_CPP[name]


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_the_error_is_below_that_of_gguf_itself(weights: np.ndarray, name: str) -> None:
    kind = GGMLQuantizationType[name]
    theirs = gguf.quants.dequantize(gguf.quants.quantize(weights, kind), kind)
    assert relative_error(weights, decoded(encode(weights, name), name)) <= relative_error(weights, theirs)


@pytest.mark.parametrize("name", [name for name in QUANTIZED if name != "Q8_0"])
def test_importances_move_the_error_to_columns_that_matter_less(weights: np.ndarray, name: str) -> None:
    importance = np.random.default_rng(6).gamma(0.3, size=weights.shape[1]).astype(np.float32)
    plain = relative_error(weights, decoded(encode(weights, name), name), importance)
    weighted = relative_error(weights, decoded(encode(weights, name, importance), name), importance)
    assert weighted < 0.97 * plain


def test_importances_of_zero_give_finite_blocks(weights: np.ndarray) -> None:
    importance = np.zeros(weights.shape[1], np.float32)
    np.testing.assert_array_equal(
        encode(weights, "Q4_K", importance), encode(weights, "Q4_K", importance + 1)
    )
    importance[::7] = 3.0
    assert np.isfinite(decoded(encode(weights, "Q6_K", importance), "Q6_K")).all()


def test_sixteen_bit_floats_are_rounded_as_torch_rounds_them(weights: np.ndarray) -> None:
    tensor = torch.from_numpy(weights)
    expected = tensor.to(torch.bfloat16).view(torch.uint16).numpy().view(np.uint8)
    np.testing.assert_array_equal(encode(weights, "BF16"), expected)
    expected = tensor.to(torch.float16).view(torch.uint16).numpy().view(np.uint8)
    np.testing.assert_array_equal(encode(weights, "F16"), expected)


@pytest.mark.parametrize("name", QUANTIZED)
def test_zeros_constants_and_a_lone_outlier_survive(name: str) -> None:
    elements = BLOCK_SIZES[name][0]
    rows = np.zeros((5, elements), np.float32)
    rows[1] = 0.25
    rows[2] = -0.25
    rows[3, 7] = 3.0
    rows[4] = np.linspace(-1e-6, 2e-6, elements)  # scales that are subnormal in float16
    values = decoded(encode(rows, name), name)
    assert np.isfinite(values).all()
    assert (values[0] == 0).all()
    np.testing.assert_allclose(values[1:3], rows[1:3], rtol=0.02)
    assert values[3, 7] == pytest.approx(3.0, rel=0.02)
    assert np.abs(np.delete(values[3], 7)).max() < 0.02
    assert np.abs(values[4] - rows[4]).max() < 4e-6


def test_rows_that_are_not_whole_blocks_and_scales_beyond_float16_are_refused() -> None:
    with pytest.raises(ValueError, match="rows of 48 weights are not whole Q4_0 blocks of 32"):
        encode(np.ones((2, 48), np.float32), "Q4_0")
    with pytest.raises(ValueError, match="does not fit a float16"):
        encode(np.full((1, 256), 1e9, np.float32), "Q6_K")
    with pytest.raises(ValueError, match="1e\\+06 does not fit a float16"):
        encode(np.full((1, 32), 1e6, np.float32), "F16")
    with pytest.raises(ValueError, match="IQ4_NL is not written"):
        encode(np.ones((1, 32), np.float32), "IQ4_NL")
    with pytest.raises(ValueError, match="importances for rows of 32"):
        encode(np.ones((1, 32), np.float32), "Q4_0", np.ones(31, np.float32))
