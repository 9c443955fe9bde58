"""An encoder's weights in the native library's layout: matrices in panels; q, k and v as one matrix.

Packed at every start: it takes a third of a second for 90 MB. With bfloat16 weights the inputs of matrices
and of attention are rounded, too; embeddings, norms, biases, softmax and sums stay float32. Never imports
torch.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from ridgeline.models.spec.encoder_spec import EncoderSpec
from ridgeline.models.weights.dequant import Floats
from ridgeline.ops.cpu.encoder import EncoderLayerTable, EncoderTable
from ridgeline.ops.cpu.interface import Activation, Format, Pooling
from ridgeline.ops.cpu.library import (
    ALIGNMENT,
    Bytes,
    PackedMatrix,
    aligned_bytes,
    pack_float,
    packed_bytes,
)

ACTIVATIONS = {
    "gelu": Activation.GELU_ERF,
    "gelu_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
}
POOLINGS = {
    "cls": Pooling.FIRST,
    "mean": Pooling.MEAN,
    "max": Pooling.MAX,
    "mean_sqrt_len": Pooling.MEAN_ROOT,
    "last": Pooling.LAST,
}

FORMATS = {"float32": Format.F32, "bfloat16": Format.BF16}
BF16_ISAS = ("avx512", "amx")  # have bf16 products, twice as fast as float32 or faster


def encoder_weights(wanted: str, spec: EncoderSpec, isa: str) -> str:
    """What `auto` means. bfloat16 moves a vector by a cosine of 5e-5; scores of pairs stay float32."""
    if wanted != "auto":
        return wanted
    return "bfloat16" if isa in BF16_ISAS and spec.output == "vector" else "float32"


def encoder_table(
    spec: EncoderSpec, weights: dict[str, Floats], max_tokens: int, format: Format = Format.F32
) -> EncoderTable:
    """`max_tokens`: the most tokens of one call of the library. `format`: F32 or BF16, for all matrices."""
    return EncoderTable(
        heads=spec.num_heads,
        activation=ACTIVATIONS[spec.activation],
        norm_eps=spec.norm_eps,
        words=weights["words"],
        positions=weights["positions"],
        type_rows=weights.get("types"),
        norm=weights["norm.weight"],
        norm_bias=weights["norm.bias"],
        layers=_layers(spec, weights, format),
        max_tokens=max_tokens,
        first_position=spec.first_position,
    )


def _layers(spec: EncoderSpec, weights: dict[str, Floats], format: Format) -> list[EncoderLayerTable]:
    """All matrices are in one block of memory, large enough for huge pages."""
    hidden, ffn = spec.hidden_size, spec.ffn_size
    shapes = ((3 * hidden, hidden), (hidden, hidden), (ffn, hidden), (hidden, ffn))
    sizes = [-(-packed_bytes(format, *shape) // ALIGNMENT) * ALIGNMENT for shape in shapes]
    memory = aligned_bytes(spec.num_layers * sum(sizes))
    ends = list(accumulate(sizes * spec.num_layers))
    starts = [0, *ends[:-1]]
    return [
        _layer(weights, index, format, [memory[start:] for start in starts[4 * index : 4 * index + 4]])
        for index in range(spec.num_layers)
    ]


def _layer(weights: dict[str, Floats], index: int, format: Format, places: list[Bytes]) -> EncoderLayerTable:
    return EncoderLayerTable(
        qkv=_matrix(weights, format, places[0], *(f"{index}.{part}" for part in "qkv")),
        output=_matrix(weights, format, places[1], f"{index}.output"),
        up=_matrix(weights, format, places[2], f"{index}.up"),
        down=_matrix(weights, format, places[3], f"{index}.down"),
        attn_norm=weights[f"{index}.attn_norm.weight"],
        attn_norm_bias=weights[f"{index}.attn_norm.bias"],
        ffn_norm=weights[f"{index}.ffn_norm.weight"],
        ffn_norm_bias=weights[f"{index}.ffn_norm.bias"],
    )


def _matrix(weights: dict[str, Floats], format: Format, place: Bytes, *names: str) -> PackedMatrix:
    """The matrices of these names, stacked by rows, packed at the start of `place`."""
    rows = np.concatenate([weights[f"{name}.weight"] for name in names])
    bias = np.concatenate([weights[f"{name}.bias"] for name in names])
    return pack_float(format, rows, bias=bias, out=place[: packed_bytes(format, *rows.shape)])
