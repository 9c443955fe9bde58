"""The format of a quantized matrix as data: element, what shares a scale, zero points, packing.

A format says what an element is, which elements share a scale, how scales are stored, whether there is a
zero point, and how a file packs all of it (`packings`). `matrix` has matrices in a format, `rounding` makes
them. Imports no numpy: a model's description has formats in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Bits of a stored element and of a scale; `numbers` has their values.
ELEMENT_BITS = {
    "int2": 2,
    "int3": 3,
    "int4": 4,
    "int8": 8,
    "e4m3": 8,
    "e5m2": 8,
    "e2m1": 4,
    "nf4": 4,
    "fp4": 4,
}
SCALE_BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "e4m3": 8, "e8m0": 8}
Granularity = Literal["tensor", "channel", "group", "block"]
Packing = Literal[
    "plain",  # one element a byte: weight, weight_scale
    "block",  # as plain, scales of blocks: weight, weight_scale_inv
    "pack32",  # compressed-tensors: int32 words along a row: weight_packed, weight_scale, weight_shape, …
    "pairs",  # two E2M1 numbers a byte, low half first: compressed-tensors' and ModelOpt's 4-bit floats
    "gptq",  # int32 words along a column: qweight, qzeros, scales, g_idx
    "awq",  # int32 words along a row of the transposed matrix, interleaved: qweight, qzeros, scales
    "bnb4",  # bitsandbytes: two codes a byte, high half first, absmax of flat blocks
    "bnb8",  # bitsandbytes: int8 rows with their largest magnitude
    "mxfp4",  # gpt-oss: blocks and scales of stacked experts
]


# The names that users know.
_NAMES = {"e4m3": "FP8", "e5m2": "FP8 E5M2", "nf4": "NF4", "fp4": "FP4"}


@dataclass(frozen=True, slots=True)
class InputFormat:
    """How a producer meant the inputs of a matrix to be rounded (`ops.input_rounding` has the arithmetic).

    element: e4m3, int8, e2m1, int4, or "other"
    group:   columns of a token that share a step; 0: the whole token, or every token if it is static
    scale:   the type of steps: float32; e4m3 (NVFP4); e8m0 (MX)
    static:  a factor is stored with the matrix (input_scale, input_global_scale)
    zero_point: integers with an offset for each step (asymmetric)
    """

    element: str
    group: int = 0
    scale: str = "float32"
    static: bool = False
    zero_point: bool = False

    @property
    def name(self) -> str:
        """As users know it."""
        name = {"e4m3": "FP8", "e2m1": "FP4"}.get(self.element, self.element)
        return f"{name} with zero points" if self.zero_point else name


@dataclass(frozen=True, slots=True)
class QuantFormat:
    """How a matrix [rows, columns] is stored.

    element:      a key of ELEMENT_BITS: int4, int8, e4m3, e2m1, nf4, …
    granularity:  what shares a scale: the whole tensor, a row (channel), columns of a row, or a rectangle
    group:        (rows, columns) that share a scale; 0: all
    scale:        the type that scales are rounded to, a key of SCALE_BITS
    zero_point:   integers are stored with an offset for each scale
    tensor_scale: one more float32 factor for the whole matrix (NVFP4)
    act_order:    columns belong to groups in any order (GPTQ's desc_act)
    stored_zeros: "less one": the file has each zero point minus 1 (GPTQ's first version)
    activations:  how the producer meant inputs to be rounded; None: not at all. A GPU rounds them
                  where a kernel does (`low_bits.plan`), a CPU never
    """

    element: str
    granularity: Granularity
    group: tuple[int, int]
    scale: str = "float32"
    zero_point: bool = False
    tensor_scale: bool = False
    act_order: bool = False
    stored_zeros: Literal["whole", "less one"] = "whole"
    packing: Packing = "plain"
    activations: InputFormat | None = None

    def __post_init__(self) -> None:
        if self.element not in ELEMENT_BITS:
            raise ValueError(f"unknown element type {self.element!r}; use one of {', '.join(ELEMENT_BITS)}")
        if self.scale not in SCALE_BITS:
            raise ValueError(f"unknown scale type {self.scale!r}; use one of {', '.join(SCALE_BITS)}")
        if self.zero_point and not self.is_integer:
            raise ValueError(f"{self.element} has no zero point")

    @property
    def bits(self) -> int:
        return ELEMENT_BITS[self.element]

    @property
    def is_integer(self) -> bool:
        return self.element.startswith("int")

    def group_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """(rows, columns) that share a scale in a matrix of this shape."""
        rows, columns = self.group
        return rows or shape[0], columns or shape[1]

    def scales_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """The last block of a row or a column may be incomplete."""
        rows, columns = self.group_shape(shape)
        return -(-shape[0] // rows), -(-shape[1] // columns)

    def bytes_per_weight(self) -> float:
        """Scales included; those of whole rows, whole tensors and the zero points are left out."""
        rows, columns = self.group
        return self.bits / 8 + (SCALE_BITS[self.scale] / 8 / (rows * columns) if rows and columns else 0.0)

    def __str__(self) -> str:
        rows, columns = self.group
        shared = {
            "tensor": "one scale",
            "channel": "a scale per row",
            "group": f"groups of {columns}",
            "block": f"blocks of {rows}×{columns}",
        }[self.granularity]
        extras = [", zero points"] * self.zero_point + [", act-order"] * self.act_order
        name = _NAMES.get(self.element, self.element)
        if self.element == "e2m1":
            name = "MXFP4" if self.scale == "e8m0" else "NVFP4"
        return f"{name} ({shared}{''.join(extras)})"


def fp8_format(granularity: Granularity = "channel", *, static: bool = False) -> QuantFormat:
    """tensor, channel, or block (of 128×128). Inputs are rounded per token, beside blocks per 128 columns;
    static: by a stored scale."""
    group = {"tensor": (0, 0), "channel": (1, 0), "block": (128, 128)}[granularity]
    columns = 0 if static else group[1]
    return QuantFormat(
        "e4m3",
        granularity,
        group,
        packing="block" if granularity == "block" else "plain",
        activations=InputFormat("e4m3", columns, static=static),
    )


def int8_format(scale: str = "bfloat16") -> QuantFormat:
    """A scale per row; inputs rounded per token."""
    return QuantFormat("int8", "channel", (1, 0), scale, activations=InputFormat("int8"))


def int4_format(group: int = 128, *, zero_point: bool = False, scale: str = "bfloat16") -> QuantFormat:
    """Groups of a row, packed as compressed-tensors does."""
    return QuantFormat("int4", "group", (1, group), scale, zero_point, packing="pack32")


NVFP4 = QuantFormat("e2m1", "group", (1, 16), "e4m3", tensor_scale=True, packing="pairs")
MXFP4 = QuantFormat("e2m1", "group", (1, 32), "e8m0", packing="pairs")
