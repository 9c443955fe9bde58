"""Every layout is read as its producer reads it: golden/ was written by the producers (make_golden.py)."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from ridgeline.models.errors import BrokenModel
from ridgeline.models.files.safetensors_file import SafetensorsFile
from ridgeline.models.quantized.blocks import KINDS, block_form, float_rows
from ridgeline.models.quantized.compressed import config_group, packed_tensors
from ridgeline.models.quantized.config import read_scheme
from ridgeline.models.quantized.format import int4_format
from ridgeline.models.quantized.matrix import dequantize
from ridgeline.models.quantized.packings import UNREAD, StoredMatrix, StoredTensor
from ridgeline.models.quantized.rounding import quantize

GOLDEN = Path(__file__).parent / "golden"
PROVENANCE = json.loads((GOLDEN / "provenance.json").read_text(encoding="utf-8"))
NAMES = sorted(name for name in PROVENANCE if name != "torch")
COMPRESSED = [name for name in NAMES if name.startswith("ct_") and not name.endswith("bf16")]
# Where a producer multiplies in 16 bits, and so rounds once: units in the last place of its type.
ROUNDED_ONCE = {"F16": 2.0**-10, "BF16": 2.0**-7, "F32": 1e-6}


def stored_tensors(name: str) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
    """(the layer's tensors by their names after the module's, the others)"""
    file = SafetensorsFile(GOLDEN / f"{name}.safetensors")
    every = {key: StoredTensor(t.dtype, t.shape, file.raw(key)) for key, t in file.tensors.items()}
    layer = {key.removeprefix("layer."): t for key, t in every.items() if key.startswith("layer.")}
    return layer, {key: t for key, t in every.items() if not key.startswith("layer.")}


def stored_matrix(name: str) -> tuple[StoredMatrix, dict[str, StoredTensor]]:
    layer, others = stored_tensors(name)
    config = PROVENANCE[name]["config"]
    scheme = read_scheme(config) if "quant_method" in config else read_scheme(None, config)
    assert scheme is not None
    assert scheme.refusal == ""
    format = scheme.format_of("model.layers.0.self_attn.q_proj")
    assert format is not None
    return StoredMatrix(format, layer, name), others


@pytest.mark.parametrize("name", NAMES)
def test_a_matrix_has_the_values_that_its_producer_reads(name: str) -> None:
    matrix, others = stored_matrix(name)
    expected = others["expected"].floats()
    values = dequantize(matrix.read())
    assert values.shape == expected.shape
    within = ROUNDED_ONCE[others["expected"].dtype]
    np.testing.assert_allclose(values, expected, rtol=within, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_chosen_rows_are_those_rows_of_the_whole(name: str) -> None:
    matrix, _ = stored_matrix(name)
    rows = np.array([31, 0, 7, 8, 7, 24])
    np.testing.assert_array_equal(dequantize(matrix.read(rows)), dequantize(matrix.read())[rows])


@pytest.mark.parametrize("name", COMPRESSED)
def test_rounding_gives_the_bytes_of_compressed_tensors(name: str) -> None:
    """From the same weights: the same codes, scales and zero points, byte for byte, and the same group."""
    matrix, others = stored_matrix(name)
    layer, _ = stored_tensors(name)
    made = quantize(others["source"].floats(), matrix.format)
    written = packed_tensors(made)
    assert written.keys() == layer.keys() - set(UNREAD)
    for key, tensor in written.items():
        assert (tensor.dtype, tensor.shape) == (layer[key].dtype, layer[key].shape), key
        differing = np.flatnonzero(tensor.data != layer[key].data)
        assert differing.size == 0, (
            f"{key}: {differing} {tensor.data[differing]} {layer[key].data[differing]}"
        )
    weights = PROVENANCE[name]["config"]["config_groups"]["group_0"]["weights"]
    assert weights.items() <= config_group(matrix.format)["weights"].items()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", ["missing", "cut"])
def test_a_missing_or_cut_scale_is_an_error_that_names_the_matrix(name: str, change: str) -> None:
    matrix, _ = stored_matrix(name)
    layer, _ = stored_tensors(name)
    key = next(k for k in ("weight_scale", "scales", "SCB", "weight.absmax") if k in layer)
    scale = layer.pop(key)
    if change == "cut" and scale.data.size > 4:
        half: Any = scale.data[: scale.data.size // 2]
        layer[key] = StoredTensor(scale.dtype, (*scale.shape[:-1], scale.shape[-1] // 2), half)
        if scale.shape[-1] == 1:
            layer[key] = StoredTensor(scale.dtype, (scale.shape[0] // 2, 1), half)
    with pytest.raises(BrokenModel, match=name):
        StoredMatrix(matrix.format, layer, name).read()


def test_tiles_of_bitsandbytes_are_refused() -> None:
    layer, _ = stored_tensors("bnb_int8")
    scheme = read_scheme(PROVENANCE["bnb_int8"]["config"])
    assert scheme is not None
    format = scheme.format_of("model.layers.0.self_attn.q_proj")
    assert format is not None
    layer["weight_format"] = StoredTensor("U8", (), np.full(1, 2, np.uint8))
    with pytest.raises(BrokenModel, match="weight_format"):
        StoredMatrix(format, layer, "a matrix")


@pytest.mark.parametrize("columns", [192, 96])
def test_blocks_do_not_cross_the_end_of_an_incomplete_group(columns: int) -> None:
    rows, group = 8, 128 if columns == 192 else 64
    draw = np.random.default_rng(0)
    groups = -(-columns // group)
    words = draw.integers(0, 2**32, (columns // 8, rows), np.uint32)
    tensors = {
        "qweight": StoredTensor("I32", words.shape, words.reshape(-1).view(np.uint8)),
        "qzeros": StoredTensor("I32", (groups, 1), np.full(groups, 0x77777777, np.uint32).view(np.uint8)),
        "scales": StoredTensor(
            "F16", (groups, rows), draw.uniform(0.5, 2, groups * rows).astype(np.float16).view(np.uint8)
        ),
        "g_idx": StoredTensor(
            "I32", (columns,), (np.arange(columns, dtype=np.int32) // group).view(np.uint8)
        ),
    }
    scheme = read_scheme(
        {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": True, "sym": True}
    )
    assert scheme is not None
    format = scheme.format_of("model.layers.0.self_attn.q_proj")
    assert format is not None
    matrix = StoredMatrix(format, tensors, "a matrix")
    every = np.arange(rows)
    assert block_form(matrix).type in KINDS  # no block type holds it
    scales = tensors["scales"].floats().reshape(groups, rows)[np.arange(columns) // group].T
    codes = (words[np.arange(columns) // 8] >> (np.arange(columns) % 8 * 4).astype(np.uint32)[:, None] & 15).T
    assert np.array_equal(float_rows(matrix, every), (codes.astype(np.float32) - 8) * scales)


@pytest.mark.parametrize(("zeros", "blocks"), [((-8, 7), "Q4_Z"), ((-7, 8), "Q8_0")])
def test_a_zero_point_of_sixteen_is_kept_in_eight_bits(zeros: tuple[int, int], blocks: str) -> None:
    """A file that stores zero points less one can have it: 15 + 1, which no 4-bit code is."""
    scales = np.ones((2, 2), np.float32)
    matrix = SimpleNamespace(
        format=int4_format(32, zero_point=True, scale="float16"),
        shape=(2, 64),
        is_act_order=False,
        parameters=lambda rows: (scales, np.array([zeros, zeros], np.int8)),
    )
    assert block_form(cast(StoredMatrix, matrix)).type == blocks
