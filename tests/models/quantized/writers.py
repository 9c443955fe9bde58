"""Tiny checkpoints in every quantized layout, and beside each a twin in float32 with the same values.

The layouts of GPTQ, AWQ, bitsandbytes and ModelOpt are written here from their descriptions, apart from the
readers; golden/ has the bytes of the real producers.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from ridgeline.models.quantized.compressed import compression_format, config_group, packed_tensors
from ridgeline.models.quantized.format import (
    MXFP4,
    NVFP4,
    QuantFormat,
    fp8_format,
    int4_format,
    int8_format,
)
from ridgeline.models.quantized.matrix import QuantizedMatrix, dequantize
from ridgeline.models.quantized.numbers import NF4
from ridgeline.models.quantized.packings import StoredTensor
from ridgeline.models.quantized.rounding import quantize

# Matrices of layers, experts included; routers, embeddings and heads are left alone.
QUANTIZED = re.compile(r"layers\.\d+\..*(_proj|\.w[123]|c_attn|c_fc|c_proj)\.weight$")
_TORCH = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8, "U8": torch.uint8, "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip
Tensors = dict[str, torch.Tensor]


class Layout(NamedTuple):
    """config: quantization_config; or, with `beside`, hf_quant_config.json's `quantization`."""

    quantize: Callable[[np.ndarray], QuantizedMatrix]
    pack: Callable[[QuantizedMatrix], Tensors]
    config: dict[str, Any]
    beside: bool = False


def write_quantized(source: Path, folder: Path, twin: Path, layout: Layout) -> int:
    """Quantize the checkpoint in `source`; `twin` gets the dequantized weights. Returns how many matrices."""
    tensors = load_file(source / "model.safetensors")
    stored: Tensors = {}
    expanded: Tensors = {}
    count = 0
    for name, values in tensors.items():
        if not QUANTIZED.search(name):
            stored[name] = expanded[name] = values
            continue
        matrix = layout.quantize(values.numpy())
        module = name.removesuffix(".weight")
        stored |= {f"{module}.{part}": tensor for part, tensor in layout.pack(matrix).items()}
        expanded[name] = torch.from_numpy(dequantize(matrix))
        count += 1
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    for target, written in ((folder, stored), (twin, expanded)):
        target.mkdir()
        save_file(written, target / "model.safetensors")
        shutil.copy(source / "config.json", target)
    if layout.beside:
        settings = {"producer": {"name": "modelopt"}, "quantization": layout.config}
        (folder / "hf_quant_config.json").write_text(json.dumps(settings), encoding="utf-8")
    else:
        config["quantization_config"] = layout.config
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return count


# ---- packings ----


def as_torch(tensor: StoredTensor) -> torch.Tensor:
    data = torch.from_numpy(tensor.data.copy())
    return data.view(_TORCH[tensor.dtype]).reshape(tensor.shape)


def _compressed(matrix: QuantizedMatrix) -> Tensors:
    return {part: as_torch(tensor) for part, tensor in packed_tensors(matrix).items()}


def _renamed(**names: str) -> Callable[[QuantizedMatrix], Tensors]:
    def pack(matrix: QuantizedMatrix) -> Tensors:
        return {names.get(part, part): tensor for part, tensor in _compressed(matrix).items()}

    return pack


def _modelopt_nvfp4(matrix: QuantizedMatrix) -> Tensors:
    made = _compressed(matrix)
    return {
        "weight": made["weight_packed"],
        "weight_scale": made["weight_scale"],
        "weight_scale_2": torch.tensor(matrix.tensor_scale, dtype=torch.float32),
        "input_scale": torch.tensor(0.01),
    }


def _modelopt_fp8(matrix: QuantizedMatrix) -> Tensors:
    made = _compressed(matrix)
    return made | {"weight_scale": made["weight_scale"].reshape(()), "input_scale": torch.tensor(0.01)}


def _words(nibbles: np.ndarray, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """[..., 8 · n] of 0 … 15 → int32 [..., n]: nibble i of a word is element order[i] of eight."""
    words = np.zeros((*nibbles.shape[:-1], nibbles.shape[-1] // 8), np.uint32)
    for place, element in enumerate(order):
        words |= nibbles[..., element::8].astype(np.uint32) << np.uint32(4 * place)
    return torch.from_numpy(words.view(np.int32))


def _gptq(less: int) -> Callable[[QuantizedMatrix], Tensors]:
    def pack(matrix: QuantizedMatrix) -> Tensors:
        rows, columns = matrix.shape
        zeros = np.zeros_like(matrix.scales, np.int8) if matrix.zeros is None else matrix.zeros
        groups = np.arange(columns) // matrix.format.group[1] if matrix.groups is None else matrix.groups
        return {
            "qweight": _words(matrix.codes + 8).T.contiguous(),
            "qzeros": _words(np.ascontiguousarray((zeros + 8 - less).T)),
            "scales": torch.from_numpy(matrix.scales.T.copy()).half(),
            "g_idx": torch.from_numpy(groups.astype(np.int32)),
            "bias": torch.zeros(rows, dtype=torch.float16),  # as auto-gptq's first versions
        }

    return pack


def _awq(matrix: QuantizedMatrix) -> Tensors:
    assert matrix.zeros is not None
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": _words(np.ascontiguousarray((matrix.codes + 8).T), order),
        "qzeros": _words(np.ascontiguousarray((matrix.zeros + 8).T), order),
        "scales": torch.from_numpy(matrix.scales.T.copy()).half(),
    }


def _bnb4(matrix: QuantizedMatrix) -> Tensors:
    codes = matrix.codes.view(np.uint8)
    packed = (codes[:, ::2] << 4 | codes[:, 1::2]).reshape(-1, 1)
    state = {"quant_type": "nf4", "blocksize": matrix.format.group[1], "shape": list(matrix.shape)}
    return {
        "weight": torch.from_numpy(packed),
        "weight.absmax": torch.from_numpy(matrix.scales.reshape(-1)),
        "weight.quant_map": torch.from_numpy(NF4.copy()),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        ),
    }


def _bnb8(matrix: QuantizedMatrix) -> Tensors:
    return {
        "weight": torch.from_numpy(matrix.codes.view(np.int8)),
        "SCB": torch.from_numpy(matrix.scales.reshape(-1) * np.float32(127)),
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }


# ---- rounding ----


def _to(format: QuantFormat) -> Callable[[np.ndarray], QuantizedMatrix]:
    return lambda weights: quantize(weights, format)


def _in_order(format: QuantFormat) -> Callable[[np.ndarray], QuantizedMatrix]:
    """Columns belong to groups in a random order."""

    def made(weights: np.ndarray) -> QuantizedMatrix:
        order = np.random.default_rng(weights.shape[1]).permutation(weights.shape[1])
        sorted_columns = quantize(np.ascontiguousarray(weights[:, order]), format)
        codes = np.empty_like(sorted_columns.codes)
        codes[:, order] = sorted_columns.codes
        groups = np.empty(len(order), np.intp)
        groups[order] = np.arange(len(order)) // format.group[1]
        return replace(sorted_columns, codes=codes, groups=groups)

    return made


def _bnb_rows(weights: np.ndarray) -> QuantizedMatrix:
    """Scales that survive the multiplication by 127 and the division by it."""
    made = quantize(weights, QuantFormat("int8", "channel", (1, 0), packing="bnb8"))
    stored = (made.scales * np.float32(127)) / np.float32(127)
    return replace(made, scales=stored)


def _config(format: QuantFormat) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": compression_format(format),
        "config_groups": {"group_0": config_group(format)},
        "ignore": ["lm_head", "re:.*mlp.gate$", "re:.*block_sparse_moe.gate$"],
    }


def _of(format: QuantFormat) -> Layout:
    return Layout(_to(format), _compressed, _config(format))


def _gptq_config(format: QuantFormat, **more: Any) -> dict[str, Any]:
    size = format.group[1]
    return {"quant_method": "gptq", "bits": 4, "group_size": size, "desc_act": False, "sym": True, **more}


_HALF = int4_format(32, scale="float16")
_ZEROS = int4_format(32, zero_point=True, scale="float16")
_BLOCKS = replace(fp8_format("block"), group=(32, 48))
LAYOUTS: dict[str, Layout] = {
    "fp8-block": Layout(
        _to(_BLOCKS),
        _renamed(weight_scale="weight_scale_inv"),
        {"quant_method": "fp8", "weight_block_size": [32, 48], "activation_scheme": "dynamic"},
    ),
    "fp8-channel": _of(fp8_format("channel")),
    "fp8-tensor": _of(fp8_format("tensor")),
    "modelopt-fp8": Layout(_to(fp8_format("tensor")), _modelopt_fp8, {"quant_algo": "FP8"}, beside=True),
    "modelopt-nvfp4": Layout(
        _to(NVFP4), _modelopt_nvfp4, {"quant_algo": "NVFP4", "group_size": 16}, beside=True
    ),
    "nvfp4": _of(NVFP4),
    "mxfp4": _of(MXFP4),
    "int8": _of(int8_format()),
    "int8-float32-scales": _of(int8_format("float32")),
    "int4": _of(int4_format(32)),
    "int4-zeros": _of(int4_format(32, zero_point=True)),
    "gptq": Layout(_to(_HALF), _gptq(1), _gptq_config(_HALF)),
    "gptq-v2-zeros": Layout(
        _to(_ZEROS), _gptq(0), _gptq_config(_HALF, sym=False, checkpoint_format="gptq_v2")
    ),
    "gptq-act-order": Layout(_in_order(_HALF), _gptq(1), _gptq_config(_HALF, desc_act=True)),
    "awq": Layout(
        _to(_ZEROS), _awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
    ),
    "bnb-nf4": Layout(
        _to(QuantFormat("nf4", "group", (1, 32), packing="bnb4")),
        _bnb4,
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    ),
    "bnb-int8": Layout(_bnb_rows, _bnb8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
}
