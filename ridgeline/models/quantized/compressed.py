"""Writes matrices as compressed-tensors stores them: their tensors, and the group of config.json for them.

The other direction of `packings` and `config`, for tools that make quantized checkpoints. Formats whose
packing belongs to another producer are refused.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.models.quantized.format import QuantFormat
from ridgeline.models.quantized.matrix import QuantizedMatrix
from ridgeline.models.quantized.numbers import E4M3, Floats, to_bfloat16, to_e8m0, to_table
from ridgeline.models.quantized.packings import SCALE_TYPES, StoredTensor

_SCALE_DTYPES = {"e8m0": "torch.uint8", "e4m3": "torch.float8_e4m3fn"}
_DTYPES = {name: dtype for dtype, name in SCALE_TYPES.items() if dtype != "F8_E8M0"}


def packed_tensors(matrix: QuantizedMatrix) -> dict[str, StoredTensor]:
    """By the part of their names after the module's: weight_packed, weight_scale, …"""
    format = matrix.format
    tensors = {"weight_scale": scale_tensor(matrix.scales, format)}
    if format.packing in ("plain", "block"):
        dtype = {"e4m3": "F8_E4M3", "e5m2": "F8_E5M2", "int8": "I8"}[format.element]
        tensors["weight"] = _tensor(dtype, matrix.codes)
        if matrix.zeros is not None:
            tensors["weight_zero_point"] = _tensor("I8", matrix.zeros)
    elif format.packing == "pack32":
        tensors["weight_packed"] = _tensor("I32", _words(matrix.codes.view(np.int8), format.bits))
        tensors["weight_shape"] = _tensor("I64", np.array(matrix.shape, "<i8"))
        if matrix.zeros is not None:
            down = _words(np.ascontiguousarray(matrix.zeros.T), format.bits)
            tensors["weight_zero_point"] = _tensor("I32", np.ascontiguousarray(down.T))
    elif format.packing == "pairs":
        low, high = matrix.codes[:, ::2], matrix.codes[:, 1::2]
        tensors["weight_packed"] = _tensor("U8", (low | high << 4).astype(np.uint8))
        if format.tensor_scale:
            inverse = np.array([1 / matrix.tensor_scale], np.float32)
            tensors["weight_global_scale"] = _tensor("F32", inverse)
    else:
        raise ValueError(f"compressed-tensors has no packing {format.packing!r}")
    return tensors


def scale_tensor(scales: Floats, format: QuantFormat) -> StoredTensor:
    """Scales in their stored type. Those of a whole tensor have the shape [1]."""
    shaped = scales.reshape(1) if format.granularity == "tensor" else scales
    stored: NDArray[Any] = shaped
    if format.scale == "float16":
        stored = shaped.astype("<f2")
    elif format.scale == "bfloat16":
        stored = to_bfloat16(shaped)
    elif format.scale == "e4m3":
        stored = to_table(shaped, E4M3)
    elif format.scale == "e8m0":
        stored = to_e8m0(shaped)
    return _tensor(_DTYPES[format.scale], stored)


def config_group(format: QuantFormat, targets: tuple[str, ...] = ("Linear",)) -> dict[str, Any]:
    """An entry of `config_groups` for the matrices of this format."""
    strategy = "tensor_group" if format.tensor_scale else format.granularity
    weights: dict[str, Any] = {
        "num_bits": format.bits,
        "type": "int" if format.is_integer else "float",
        "symmetric": not format.zero_point,
        "strategy": strategy,
        "dynamic": False,
        "observer": "minmax",
    }
    if format.granularity == "group":
        weights["group_size"] = format.group[1]
    if format.granularity == "block":
        weights["block_structure"] = list(format.group)
    if format.scale in _SCALE_DTYPES:
        weights["scale_dtype"] = _SCALE_DTYPES[format.scale]
    return {
        "targets": list(targets),
        "weights": weights,
        "input_activations": _activations(format),
        "output_activations": None,
        "format": compression_format(format),
    }


def compression_format(format: QuantFormat) -> str:
    """compressed-tensors' name of the packing."""
    if format.packing == "pack32":
        return "pack-quantized"
    if format.packing == "pairs":
        return "nvfp4-pack-quantized" if format.tensor_scale else "mxfp4-pack-quantized"
    return "int-quantized" if format.is_integer else "float-quantized"


def _activations(format: QuantFormat) -> dict[str, Any] | None:
    """Inputs rounded per token, or per 128 columns beside blocks of weights."""
    inputs = format.activations
    if inputs is None:
        return None
    if inputs.static or inputs.element not in ("int8", "e4m3") or inputs.scale != "float32":
        raise ValueError(f"inputs in {inputs} are not written: only int8 and FP8 with steps of each token")
    kind = "int" if inputs.element.startswith("int") else "float"
    found: dict[str, Any] = {"num_bits": 8, "type": kind, "symmetric": True, "dynamic": True}
    if inputs.group:
        return found | {"strategy": "group", "group_size": inputs.group}
    return found | {"strategy": "token"}


def _words(codes: NDArray[np.int8], bits: int) -> NDArray[np.uint32]:
    """[rows, elements] around 0 → [rows, words], the lowest bits first; the last word is padded with 0."""
    per_word = 32 // bits
    missing = -codes.shape[1] % per_word
    unsigned = (codes.astype(np.int16) + (1 << (bits - 1))).astype(np.uint32)
    padded = np.pad(unsigned, ((0, 0), (0, missing))).reshape(len(codes), -1, per_word)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    words: NDArray[np.uint32] = np.bitwise_or.reduce(padded << shifts, axis=2).astype("<u4")
    return words


def _tensor(dtype: str, values: NDArray[Any]) -> StoredTensor:
    data = np.ascontiguousarray(values)
    return StoredTensor(dtype, values.shape, data.view(np.uint8).reshape(-1))
