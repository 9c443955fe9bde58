"""Formats of matrices in 8 and 4 bits on a device, as data: what an element is, what shares a scale, whether
inputs are rounded too. `ops.low_bits` has the matrices. Imports nothing, so that memory can be planned first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CHUNK = 256  # columns of int4 that are packed together: 32 words, of which each has every 32nd column
PLANE = 32  # columns that have the same place within their words
SCALE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

Element = Literal["fp8", "int8", "int4"]


@dataclass(frozen=True, slots=True)
class LowBitFormat:
    """element: fp8 (E4M3), int8, int4
    group:   columns of a row with one scale; 0: the whole row
    inputs:  the other factor is rounded to the same element: per token, or per token and group
    zeros:   int4: each group has a zero point; else it is 8
    scale:   type of the scales: float32, float16, bfloat16
    """

    element: Element
    group: int = 0
    inputs: bool = False
    zeros: bool = False
    scale: str = "float32"

    def __post_init__(self) -> None:
        if self.group % PLANE or (self.element == "int4" and not self.group):
            raise ValueError(
                f"{self.element} in groups of {self.group}: the GPU computes multiples of {PLANE}"
            )
        if self.element == "int4" and self.inputs:
            raise ValueError("inputs of int4 matrices are not rounded")

    def __str__(self) -> str:
        name = {"fp8": "FP8", "int8": "int8", "int4": "int4"}[self.element]
        shared = f"groups of {self.group}" if self.group else "a scale per row"
        zeros = ", zero points" if self.zeros else ""
        if not self.inputs:
            return f"{name} ({shared}{zeros}) with inputs in 16 bits"
        per = f"token and {self.group} columns" if self.group else "token"
        return f"{name} ({shared}{zeros}) with inputs in {name} per {per}"

    def groups(self, columns: int) -> int:
        return -(-columns // self.group) if self.group else 1

    def nbytes(self, rows: int, columns: int) -> int:
        """Of a matrix, without an order of its columns."""
        codes = padded_columns(columns) // 2 if self.element == "int4" else columns
        return rows * (codes + self.groups(columns) * (SCALE_BYTES[self.scale] + self.zeros))


@dataclass(frozen=True, slots=True)
class ScratchSizes:
    """Elements of what products share: rounded inputs, their steps, and a matrix in 16 bits."""

    codes: int = 0
    steps: int = 0
    wide: int = 0

    def with_matrix(
        self, format: LowBitFormat, rows: int, columns: int, tokens: int, *, stack: bool = False
    ) -> ScratchSizes:
        """Room for products of `tokens` rows with this matrix, or with a stack of them, which is not
        expanded."""
        if format.inputs:
            codes, steps = tokens * columns, tokens * format.groups(columns)
            return ScratchSizes(max(self.codes, codes), max(self.steps, steps), self.wide)
        return self if stack else ScratchSizes(self.codes, self.steps, max(self.wide, rows * columns))


# What --weights makes of a matrix in 16 bits.
ONLINE = {
    "fp8": LowBitFormat("fp8", inputs=True),
    "int8": LowBitFormat("int8", inputs=True),
    "int4": LowBitFormat("int4", group=128, scale="bfloat16"),
}


def padded_columns(columns: int) -> int:
    """Of int4: whole chunks."""
    return -(-columns // CHUNK) * CHUNK
