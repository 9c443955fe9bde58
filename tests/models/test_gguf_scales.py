"""Scales that are not finite are found without dequantizing, in every type, and in no healthy tensor."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from ridgeline.models.errors import BrokenModel
from ridgeline.models.files.gguf import BLOCK_SIZES, TENSOR_TYPES, GgufFile
from ridgeline.models.files.gguf_scales import check_scales

# The scales of MXFP4 and NVFP4 are bytes; the package does not decode Q1_0.
OTHERS = ("MXFP4", "NVFP4", "Q1_0")
TYPES = [name for name, _, _ in TENSOR_TYPES.values() if name not in OTHERS]
QUANTIZED = [name for name in TYPES if BLOCK_SIZES[name][0] > 1]


def refused(blocks: np.ndarray, type_name: str) -> bool:
    try:
        check_scales(blocks.ravel(), type_name, "file.gguf: tensor t")
    except BrokenModel:
        return True
    return False


def is_finite(blocks: np.ndarray, type_name: str) -> bool:
    """By the gguf package's own dequantization."""
    with np.errstate(all="ignore"):
        return bool(np.isfinite(gguf.quants.dequantize(blocks, GGMLQuantizationType[type_name])).all())


@pytest.mark.parametrize("type_name", TYPES)
def test_a_block_is_refused_exactly_if_one_of_its_values_is_not_finite(type_name: str) -> None:
    """Of blocks in which every bit is random, one half in 32 is not finite; of floats, one in 256."""
    rng = np.random.default_rng(7)
    seen = {True: 0, False: 0}
    for _ in range(2000):
        block = rng.integers(0, 256, (1, BLOCK_SIZES[type_name][1]), dtype=np.uint8)
        finite = is_finite(block, type_name)
        assert refused(block, type_name) == (not finite), block
        seen[finite] += 1
    assert min(seen.values()) > 0


@pytest.mark.parametrize("type_name", QUANTIZED)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_every_block_of_a_long_tensor_is_looked_at(type_name: str, value: float) -> None:
    """Every half of a block is broken in turn: the ones that are scales must be refused wherever they are."""
    count = 3 * (1 << 16) // 2  # more than one chunk
    blocks = np.zeros((count, BLOCK_SIZES[type_name][1]), np.uint8)
    check_scales(blocks.ravel(), type_name, "")
    half = np.array([value], "<f2").view(np.uint8)
    for row in (0, count // 2, count - 1):
        places = 0
        for at in range(0, blocks.shape[1], 2):
            blocks[row, at : at + 2] = half
            harmful = not is_finite(blocks[row : row + 1], type_name)
            assert refused(blocks, type_name) == harmful, at
            blocks[row, at : at + 2] = 0
            places += harmful
        # IQ1_M: the exponent is in two halves, and one of them alone is harmless.
        assert places == {**dict.fromkeys(("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K"), 2), "IQ1_M": 0}.get(
            type_name, 1
        )


def test_a_power_of_two_beyond_float32_is_refused() -> None:
    blocks = np.zeros((3, 17), np.uint8)
    for scale, beyond in ((0, False), (252, False), (253, True), (255, True)):
        blocks[1, 0] = scale
        assert refused(blocks, "MXFP4") == beyond
        blocks[1, 1:] = 0x77  # the largest number
        assert is_finite(blocks, "MXFP4") != beyond
        blocks[1, 1:] = 0


def test_every_byte_is_a_scale_of_nvfp4_and_a_half_of_q1_0() -> None:
    blocks = np.random.default_rng(3).integers(0, 256, (500, 36), dtype=np.uint8)
    assert is_finite(blocks, "NVFP4")
    assert not refused(blocks, "NVFP4")
    blocks = np.zeros((3, 18), np.uint8)
    assert not refused(blocks, "Q1_0")
    blocks[1, :2] = np.array([np.inf], "<f2").view(np.uint8)
    assert refused(blocks, "Q1_0")


def test_the_refusal_says_where_the_block_is() -> None:
    blocks = np.zeros((100, 18), np.uint8)
    blocks[42, :2] = np.array([np.nan], "<f2").view(np.uint8)
    expected = r"^file\.gguf: tensor t has a scale that is not finite \(type Q4_0, block 42 of 100\)"
    with pytest.raises(BrokenModel, match=expected):
        check_scales(blocks.ravel(), "Q4_0", "file.gguf: tensor t")


def test_half_a_block_is_refused() -> None:
    with pytest.raises(BrokenModel, match=r"^here has 35 bytes, which is not a whole number of Q4_0 blocks"):
        check_scales(np.zeros(35, np.uint8), "Q4_0", "here")


def test_the_default_model_passes(smollm2_path: Path) -> None:
    file = GgufFile(smollm2_path)
    for name, tensor in file.tensors.items():
        check_scales(file.raw(name), tensor.type, name)
