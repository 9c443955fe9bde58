"""Writes golden/: small matrices quantized by the packages that write real checkpoints, and their own values.

Not run by the tests. The project does not depend on these packages, and some need old ones, so they are
installed apart from it, without their dependencies:

    python -m venv golden-env && golden-env/bin/pip install torch==2.13.0 transformers numpy pydantic gguf
    golden-env/bin/pip install --no-deps compressed-tensors==0.20.0 loguru autoawq==0.2.9 auto-gptq==0.7.1 \
        bitsandbytes==0.50.2 nvidia-modelopt==0.47.0 omegaconf antlr4-python3-runtime==4.9.3 \
        gptqmodel==7.7.0 accelerate logbar safetensors psutil
    golden-env/bin/python tests/models/quantized/make_golden.py

Each file has the stored tensors under `layer.`, and as `expected` what the package itself makes of them
(compressed-tensors in float32: also the weights that went in, as `source`). golden/provenance.json says how
each was made, and what config.json says of it.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
import types
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HERE = Path(__file__).parent / "golden"
ROWS, COLUMNS = 32, 64
provenance: dict[str, Any] = {}


def weights(rows: int = ROWS, columns: int = COLUMNS, seed: int = 0) -> torch.Tensor:
    """Rows of different sizes, an outlier, and a group of zeros."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(rows, columns, generator=generator) * torch.logspace(-2, 0, rows)[:, None]
    made[3, 5] = 4.0
    made[7, :32] = 0.0
    return made


def write(name: str, package: str, how: str, config: Any, source: Any, tensors: Any, expected: Any) -> None:
    stored = {f"layer.{key}": value.contiguous() for key, value in tensors.items()}
    checked = {"expected": expected.contiguous()}
    if package == "compressed-tensors" and source.dtype == torch.float32:  # whose rounding is ours, too
        checked["source"] = source.to(torch.bfloat16)
    save_file(stored | checked, HERE / f"{name}.safetensors")
    provenance[name] = {"package": f"{package} {version(package)}", "call": how, "config": config}


def without_init(*packages: str) -> None:
    """Packages whose __init__ imports what is not installed: their submodules are imported on their own."""
    found = find_spec(packages[0])
    assert found is not None
    assert found.origin is not None
    root = Path(found.origin).parent
    for name in packages:
        module = types.ModuleType(name)
        module.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = module


# ---- compressed-tensors ----


def compressed_tensors() -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    inputs = {"num_bits": 8, "symmetric": True, "dynamic": True, "strategy": "token"}
    int4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True}
    fp4 = {"num_bits": 4, "type": "float", "symmetric": True}
    int8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    cases = {
        "ct_int4": ("pack-quantized", {**int4, "symmetric": True}, None),
        "ct_int4_bf16": ("pack-quantized", {**int4, "symmetric": True}, None),
        "ct_int4_zeros": ("pack-quantized", {**int4, "symmetric": False}, None),
        "ct_int4_zeros_bf16": ("pack-quantized", {**int4, "symmetric": False}, None),
        "ct_int8_packed": ("pack-quantized", int8, None),
        "ct_int8": ("int-quantized", int8, {**inputs, "type": "int"}),
        "ct_int8_bf16": ("int-quantized", int8, {**inputs, "type": "int"}),
        "ct_fp8_channel": ("float-quantized", {**fp8, "strategy": "channel"}, {**inputs, "type": "float"}),
        "ct_fp8_tensor_bf16": ("float-quantized", {**fp8, "strategy": "tensor"}, {**inputs, "type": "float"}),
        "ct_fp8_block": ("float-quantized", {**fp8, "strategy": "block", "block_structure": [24, 48]}, None),
        "ct_nvfp4": (
            "nvfp4-pack-quantized",
            {**fp4, "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"},
            None,
        ),
        "ct_mxfp4": (
            "mxfp4-pack-quantized",
            {**fp4, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
            None,
        ),
    }
    for name, (compression, args, activations) in cases.items():
        columns = 60 if name == "ct_fp8_block" else COLUMNS  # the last blocks are incomplete
        source = weights(columns=columns).to(torch.bfloat16)
        source = source if name.endswith("bf16") else source.float()
        made = QuantizationArgs(**args)
        scheme = QuantizationScheme(targets=["Linear"], weights=made)
        gain = generate_gparam(source.min(), source.max()) if made.strategy == "tensor_group" else None
        low, high = _extremes(source, made)
        scale, zero = calculate_qparams(low, high, made, global_scale=gain)
        state = {"weight": source, "weight_scale": scale, "weight_zero_point": zero}
        if gain is not None:
            state["weight_global_scale"] = gain
        writer = BaseCompressor.get_value_from_registry(compression)
        stored = writer.compress(dict(state), scheme)
        expected = writer.decompress(dict(stored), scheme)["weight"]
        config = {
            "quant_method": "compressed-tensors",
            "format": compression,
            "config_groups": {
                "group_0": {"targets": ["Linear"], "weights": args, "input_activations": activations}
            },
            "ignore": ["lm_head"],
        }
        how = f"{writer.__name__}.compress, calculate_qparams of the extremes"
        stored.pop("weight_g_idx", None)
        write(name, "compressed-tensors", how, config, source, stored, expected)


def _extremes(source: torch.Tensor, made: Any) -> tuple[torch.Tensor, torch.Tensor]:
    strategy = str(getattr(made.strategy, "value", made.strategy))
    rows, columns = source.shape
    if strategy == "tensor":
        return source.min().reshape(1), source.max().reshape(1)
    if strategy == "block":
        high, wide = made.block_structure
        padded = torch.nn.functional.pad(source, (0, -columns % wide, 0, -rows % high))
        blocks = padded.reshape(padded.shape[0] // high, high, padded.shape[1] // wide, wide)
        return blocks.amin((1, 3)), blocks.amax((1, 3))
    wide = columns if strategy == "channel" else made.group_size
    groups = source.reshape(rows, -1, wide)
    return groups.amin(2), groups.amax(2)


# ---- GPTQ ----


def gptq() -> None:
    without_init("auto_gptq", "auto_gptq.nn_modules", "auto_gptq.nn_modules.qlinear")
    old = importlib.import_module("auto_gptq.nn_modules.qlinear.qlinear_cuda")
    group = 32
    order = torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(2))
    cases = {"gptq": (False, False), "gptq_zeros": (False, True), "gptq_act_order": (True, True)}
    for name, (desc_act, with_zeros) in cases.items():
        source = weights().half()
        belongs = (order if desc_act else torch.arange(COLUMNS)) // group
        scales, zeros = _gptq_parameters(source.float(), belongs, with_zeros)
        linear = torch.nn.Linear(COLUMNS, ROWS, bias=False, dtype=torch.float16)
        linear.weight.data = source
        layer = old.QuantLinear(4, group, COLUMNS, ROWS, False)
        layer.pack(linear, scales.half(), zeros.clone(), belongs.to(torch.int32))
        stored = {key: getattr(layer, key) for key in ("qweight", "qzeros", "scales", "g_idx")}
        expected = _by_unit_vectors(layer)
        config = {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": group,
            "desc_act": desc_act,
            "sym": not with_zeros,
        }
        how = "QuantLinear.pack of nn_modules.qlinear.qlinear_cuda; forward of unit vectors"
        write(name, "auto-gptq", how, config, source, stored, expected)


def gptq_v2() -> None:
    """Of gptqmodel, whose layers have the second version's zero points in memory. On a CPU; its __init__ and
    its kernels are not imported."""
    folders = ("nn_modules", "models", "adapter", "quantization", "looper")
    without_init("gptqmodel", *(f"gptqmodel.{folder}" for folder in folders))
    sys.modules["pcre"] = re
    sys.modules["gptqmodel"].DEBUG_ON = False  # type: ignore[attr-defined]
    known = importlib.import_module("gptqmodel.quantization.config")
    for name in ("FORMAT", "METHOD"):
        setattr(sys.modules["gptqmodel.quantization"], name, getattr(known, name))
    linears = importlib.import_module("gptqmodel.nn_modules.qlinear.torch")
    group = 32
    order = torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(2))
    for name, desc_act in (("gptq_v2", False), ("gptq_v2_act_order", True)):
        source = weights().half()
        belongs = (order if desc_act else torch.arange(COLUMNS)) // group
        scales, zeros = _gptq_parameters(source.float(), belongs, True)
        linear = torch.nn.Linear(COLUMNS, ROWS, bias=False, dtype=torch.float16)
        linear.weight.data = source
        layer = linears.TorchLinear(
            bits=4, group_size=group, sym=False, desc_act=desc_act, in_features=COLUMNS, out_features=ROWS,
            bias=False, pack_dtype=torch.int32, register_buffers=True,
        )  # fmt: skip
        layer.pack_original(linear, scales.half(), zeros.clone(), belongs.to(torch.int32))
        stored = {key: getattr(layer, key) for key in ("qweight", "qzeros", "scales", "g_idx")}
        config = {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": desc_act, "sym": False}
        config["checkpoint_format"] = "gptq_v2"
        how = "TorchLinear.pack_original, dequantize_weight"
        write(name, "gptqmodel", how, config, source, stored, layer.dequantize_weight().T)


def _gptq_parameters(source: torch.Tensor, belongs: torch.Tensor, with_zeros: bool) -> Any:
    """[rows, groups] of scales and zero points; the latter from 1 to 15."""
    scales, zeros = [], []
    for number in range(int(belongs.max()) + 1):
        part = source[:, belongs == number]
        low, high = part.amin(1).clamp(max=-1e-4), part.amax(1).clamp(min=1e-4)
        if with_zeros:
            scales.append((high - low) / 15)
            zeros.append((-low / scales[-1]).round().clamp(1, 15))
        else:
            scales.append(torch.maximum(-low, high) / 7.5)
            zeros.append(torch.full_like(low, 8))
    return torch.stack(scales, 1), torch.stack(zeros, 1)


def _by_unit_vectors(layer: torch.nn.Module) -> torch.Tensor:
    """The matrix that a layer multiplies by."""
    with torch.no_grad():
        return layer(torch.eye(COLUMNS, dtype=torch.float16)).T.contiguous()


# ---- AWQ ----


def awq() -> None:
    without_init("awq", "awq.modules", "awq.modules.linear", "awq.utils")
    gemm = importlib.import_module("awq.modules.linear.gemm")
    packing = importlib.import_module("awq.utils.packing_utils")
    source = weights().half()
    linear = torch.nn.Linear(COLUMNS, ROWS, bias=False, dtype=torch.float16)
    linear.weight.data = source
    scales, zeros = _gptq_parameters(source.float(), torch.arange(COLUMNS) // 32, True)
    layer = gemm.WQLinear_GEMM.from_linear(
        linear, 4, 32, scales=scales.T.contiguous().half(), zeros=zeros.T.contiguous()
    )
    stored = {key: getattr(layer, key) for key in ("qweight", "qzeros", "scales")}
    expected = packing.dequantize_gemm(stored["qweight"], stored["qzeros"], stored["scales"], 4, 32).T
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    how = "WQLinear_GEMM.from_linear; dequantize_gemm"
    write("awq", "autoawq", how, config, source, stored, expected)


# ---- bitsandbytes ----


def bitsandbytes() -> None:
    import bitsandbytes.functional as bnb

    for name, kind, nested in (
        ("bnb_nf4", "nf4", False),
        ("bnb_nf4_nested", "nf4", True),
        ("bnb_fp4", "fp4", False),
    ):
        source = weights().to(torch.bfloat16)
        packed, state = bnb.quantize_4bit(source, blocksize=64, quant_type=kind, compress_statistics=nested)
        stored = {"weight": packed} | {
            f"weight.{key}": value for key, value in state.as_dict(packed=True).items()
        }
        expected = bnb.dequantize_4bit(packed, state)
        config = {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_quant_type": kind,
            "bnb_4bit_use_double_quant": nested,
            "llm_int8_skip_modules": ["lm_head"],
        }
        write(
            name, "bitsandbytes", "quantize_4bit, dequantize_4bit; bfloat16", config, source, stored, expected
        )
    source = weights().half()
    codes, rows, _ = bnb.int8_vectorwise_quant(source)
    stored = {"weight": codes, "SCB": rows, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": ["lm_head"]}
    expected = bnb.int8_vectorwise_dequant(codes, rows)
    write("bnb_int8", "bitsandbytes", "int8_vectorwise_quant and dequant", config, source, stored, expected)


# ---- ModelOpt ----


def modelopt() -> None:
    from modelopt.torch.quantization.qtensor.fp8_tensor import FP8QTensor
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    source = weights()
    made, scale, outer = NVFP4QTensor.quantize(source, 16)
    stored = {"weight": made._quantized_data, "weight_scale": scale, "weight_scale_2": outer}
    expected = made.dequantize(torch.float32, scale=scale, double_scale=outer, block_sizes={-1: 16})
    config = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
    write(
        "modelopt_nvfp4",
        "nvidia-modelopt",
        "NVFP4QTensor.quantize, dequantize",
        config,
        source,
        stored,
        expected,
    )
    made, scale = FP8QTensor.quantize(source)
    stored = {
        "weight": made._quantized_data,
        "weight_scale": scale.reshape(()).float(),
        "input_scale": torch.tensor(0.02),
    }
    expected = made.dequantize(torch.float32, scale=scale)
    config = {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    write(
        "modelopt_fp8", "nvidia-modelopt", "FP8QTensor.quantize, dequantize", config, source, stored, expected
    )


if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    for make in (compressed_tensors, gptq, gptq_v2, awq, bitsandbytes, modelopt):
        make()
    provenance["torch"] = torch.__version__
    (HERE / "provenance.json").write_text(json.dumps(provenance, indent=1) + "\n", encoding="utf-8")
