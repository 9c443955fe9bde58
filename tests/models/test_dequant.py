"""Dequantization is bit-exact against the gguf package, on random blocks and on quantized values."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize as their_dequantize
from gguf.quants import quantize as their_quantize

from ridgeline.models.files.gguf import TENSOR_TYPES
from ridgeline.models.weights import dequant

# Where each type keeps its float16 scales within a block: random bytes there could be NaN.
SCALE_OFFSETS = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "MXFP4": [],
    **{name: [0] for name in ("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS")},
    "IQ1_M": [],
    "TQ1_0": [52],
    "TQ2_0": [64],
    "NVFP4": [],
    "Q1_0": [0],
}
NOT_THEIRS = ("Q1_0",)  # the gguf package knows its size alone
BLOCK_BYTES = {name: size for name, _, size in TENSOR_TYPES.values()}


def random_blocks(type_name: str, count: int, seed: int) -> np.ndarray:
    """[count, block bytes]: every bit random but for the scales, which are finite."""
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (count, BLOCK_BYTES[type_name]), dtype=np.uint8)
    for at in SCALE_OFFSETS[type_name]:
        scales = generator.normal(size=(count, 1)).astype("<f2")
        blocks[:, at : at + 2] = scales.view(np.uint8)
    if type_name == "IQ1_M":  # the high nibbles of its last four words are a float16
        scale = generator.normal(size=count).astype("<f2").view("<u2")
        for word in range(4):
            high = blocks[:, 49 + 2 * word]
            high[:] = high & 15 | (scale >> 4 * word & 15) << 4
    if type_name == "MXFP4":
        blocks[:, 0] = generator.integers(104, 144, count)  # powers of two that half precision has
    return blocks


@pytest.mark.parametrize("type_name", [name for name in SCALE_OFFSETS if name not in NOT_THEIRS])
def test_random_blocks_are_decoded_bit_for_bit(type_name: str) -> None:
    blocks = random_blocks(type_name, 257, seed=1)
    expected = their_dequantize(blocks, GGMLQuantizationType[type_name]).ravel()
    actual = dequant.dequantize(blocks.ravel(), type_name)
    assert np.array_equal(actual.view(np.uint32), expected.view(np.uint32))


def test_every_scale_of_nvfp4_is_the_packages() -> None:
    blocks = random_blocks("NVFP4", 64, seed=8)
    blocks[:, :4] = np.arange(256, dtype=np.uint8).reshape(64, 4)
    expected = their_dequantize(blocks, GGMLQuantizationType.NVFP4).ravel()
    assert np.array_equal(dequant.dequantize(blocks.ravel(), "NVFP4"), expected)


def test_q1_0_is_the_scale_with_the_sign_of_each_bit() -> None:
    """As the type is defined: bit i % 8 of byte i / 8, from the lowest on; a bit that is set is positive."""
    (block,) = random_blocks("Q1_0", 1, seed=9)
    scale = block[:2].view("<f2").astype(np.float32)[0]
    expected = [scale if block[2 + i // 8] >> (i % 8) & 1 else -scale for i in range(128)]
    assert np.array_equal(dequant.dequantize(block, "Q1_0"), np.array(expected, np.float32))


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantized_values_come_back_as_ggml_rounds_them(type_name: str) -> None:
    values = np.random.default_rng(2).normal(size=(6, 320)).astype(np.float32)
    kind = GGMLQuantizationType[type_name]
    packed = their_quantize(values, kind)
    expected = their_dequantize(packed, kind)
    actual = dequant.dequantize(packed.view(np.uint8).ravel(), type_name).reshape(values.shape)
    assert np.array_equal(actual.view(np.uint32), expected.view(np.uint32))
    assert np.abs(actual - values).max() < 0.3


def test_every_type_of_a_gguf_file_can_be_decoded() -> None:
    """The parser accepts these types, so the loader must know them all."""
    for type_name, elements, size in TENSOR_TYPES.values():
        assert len(dequant.dequantize(np.zeros(size, np.uint8), type_name)) == elements


def test_doubles_are_rounded_to_floats() -> None:
    values = np.random.default_rng(4).normal(size=100)
    assert np.array_equal(dequant.dequantize(values.view(np.uint8), "F64"), values.astype(np.float32))


def test_chunks_join_to_the_whole_and_stay_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = random_blocks("Q4_K", 41, seed=3).ravel()
    whole = dequant.dequantize(raw, "Q4_K")
    monkeypatch.setattr(dequant, "CHUNK_ELEMENTS", 1024)
    end = 0
    for first, values in dequant.dequantize_chunks(raw, "Q4_K"):
        assert first == end
        assert len(values) <= 1024
        assert np.array_equal(values, whole[first : first + len(values)])
        end = first + len(values)
    assert end == 41 * 256
