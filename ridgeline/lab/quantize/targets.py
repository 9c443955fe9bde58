"""The names of --to: what each stores, as a QuantFormat.

Names of GGUF's types (q4_k_m, …) belong to another writer (`gguf`) and are not read here.
"""

from __future__ import annotations

from dataclasses import replace

from ridgeline.lab.errors import BadInput
from ridgeline.lab.quantize.options import QuantizeOptions
from ridgeline.models.gguf_output.recipes import RECIPES
from ridgeline.models.quantized.format import (
    MXFP4,
    NVFP4,
    QuantFormat,
    fp8_format,
    int4_format,
    int8_format,
)
from ridgeline.options import nearest

TARGETS = {
    "fp8": "8-bit floats, a scale per row; inputs rounded per token",
    "fp8-block": "8-bit floats, a scale per 128×128 weights; inputs rounded per 128 columns",
    "int8": "8-bit integers, a scale per row; inputs rounded per token (W8A8)",
    "w8a16": "8-bit integers, a scale per row; inputs stay in 16 bits",
    "int4": "4-bit integers, a scale per --group weights; inputs stay in 16 bits",
    "mxfp4": "4-bit floats, a power of two per 32 weights; inputs stay in 16 bits",
    "nvfp4": "4-bit floats, an 8-bit scale per 16 weights; inputs stay in 16 bits",
}


def target_format(name: str, options: QuantizeOptions) -> QuantFormat:
    """The format of quantized matrices. BadInput for an unknown name or an option that does not fit."""
    if name not in TARGETS:
        raise BadInput(f"--to {name}: unknown format{nearest(name, (*TARGETS, *RECIPES))}")
    if options.requantize:
        raise BadInput(f"--requantize is for GGUF files; --to {name} starts from 16 bits: leave it out")
    formats = {
        "fp8": fp8_format("channel"),
        "fp8-block": fp8_format("block"),
        "int8": int8_format(),
        "w8a16": QuantFormat("int8", "channel", (1, 0), "bfloat16", packing="pack32"),
        "int4": int4_format(options.group),
        "mxfp4": MXFP4,
        "nvfp4": NVFP4,
    }
    found = formats[name]
    if options.zero_points and not found.is_integer:
        raise BadInput(f"--zero-points: {name} has none; they belong to int4, int8 and w8a16")
    if options.zero_points and found.activations:
        raise BadInput("--zero-points: products of 8-bit inputs need weights without them; use --to w8a16")
    if options.scaling == "smoothquant" and not found.activations:
        raise BadInput(
            f"--method smoothquant moves the range of inputs into the weights, and --to {name} does not "
            "round inputs: use awq, or --to int8"
        )
    return replace(found, zero_point=options.zero_points)
