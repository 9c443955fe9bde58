"""Matrices in 8 or 4 bits as a device keeps them: codes, and scales of rows or of groups of a row's columns.

`models.weights` fills them, from a file's own codes without changing a value or by rounding a float matrix;
`ops.cuda.low_bits` computes with them. A block of several rows is kept as rows with equal scales, so rows of
any matrices can lie in one. Imports torch and `low_bit_formats`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ridgeline.ops.low_bit_formats import PLANE, LowBitFormat, padded_columns

LARGEST = {"fp8": 448.0, "int8": 127.5, "int4": 7.5}  # integers: half a step above, as producers do
SYMMETRIC_ZERO = 8
RANDOM_AT_ONCE = 1 << 26  # numbers
_LEAST = 2.0**-100  # of a scale: a group of zeros can be divided by it


@dataclass(frozen=True, slots=True)
class LowBits:
    """A matrix [rows, columns], or a stack of them.

    codes:  [..., rows, columns] float8_e4m3fn or int8; int4: words int32 [..., rows, padded columns / 8],
            where nibble p of word j of chunk c is column 256 c + 32 p + j
    scales: [..., groups, rows]
    zeros:  [..., groups, rows] uint8, of codes 0 … 15; None: 8 everywhere
    order:  int32 [columns]: column i of the codes is column order[i] of the matrix; None: the same
    """

    format: LowBitFormat
    columns: int
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    order: Tensor | None = None

    @staticmethod
    def empty(
        format: LowBitFormat, shape: tuple[int, ...], device: torch.device | str, *, ordered: bool = False
    ) -> LowBits:
        *stack, rows, columns = shape
        if format.element == "int4":
            words = (*stack, rows, padded_columns(columns) // 8)
            codes = torch.zeros(words, dtype=torch.int32, device=device)
        else:
            dtype = torch.int8 if format.element == "int8" else torch.float8_e4m3fn
            codes = torch.empty((*stack, rows, columns), dtype=dtype, device=device)
        groups = (*stack, format.groups(columns), rows)
        return LowBits(
            format,
            columns,
            codes,
            torch.empty(groups, dtype=getattr(torch, format.scale), device=device),
            torch.empty(groups, dtype=torch.uint8, device=device) if format.zeros else None,
            torch.arange(columns, dtype=torch.int32, device=device) if ordered else None,
        )

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.codes.shape[:-1], self.columns)

    def __len__(self) -> int:
        return self.codes.shape[0]

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def tensors(self) -> dict[str, Tensor]:
        held = {"codes": self.codes, "scales": self.scales, "zeros": self.zeros, "order": self.order}
        return {name: tensor for name, tensor in held.items() if tensor is not None}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def of(self, expert: int | None) -> LowBits:
        """One matrix of a stack; the matrix itself without a number."""
        if expert is None:
            return self
        zeros = None if self.zeros is None else self.zeros[expert]
        return LowBits(self.format, self.columns, self.codes[expert], self.scales[expert], zeros, self.order)

    def fill(self, first_row: int, codes: Tensor, scales: Tensor, zeros: Tensor | None = None) -> None:
        """Rows of a matrix. codes [rows, columns]: fp8, int8; int4: uint8 0 … 15. scales, zeros [rows,
        groups]."""
        rows = slice(first_row, first_row + len(codes))
        self.scales[:, rows] = scales.t().to(self.scales.dtype)
        if self.zeros is not None:
            assert zeros is not None
            self.zeros[:, rows] = zeros.t().to(torch.uint8)
        if self.format.element != "int4":
            self.codes[rows] = codes.to(self.codes.device)
            return
        padding = padded_columns(self.columns) - self.columns  # its products are with zeros
        self.codes[rows] = packed_nibbles(torch.nn.functional.pad(codes.to(self.codes.device), (0, padding)))

    def round(self, first_row: int, weights: Tensor) -> None:
        """Rows [rows, columns] of a float matrix, to nearest; the rule of `models.quantized.rounding`."""
        self.fill(first_row, *rounded(weights, self.format))

    def randomize(self, first_row: int, rows: int, generator: torch.Generator) -> None:
        """Rows of random numbers in the magnitude of a layer's weights, for measurements."""
        columns, device = self.columns, self.codes.device
        step = max(1, RANDOM_AT_ONCE // columns)
        for first in range(first_row, first_row + rows, step):
            count = min(step, first_row + rows - first)
            numbers = torch.empty(count, columns, device=device).normal_(
                0.0, columns**-0.5, generator=generator
            )
            plain = replace(self.format, zeros=False)
            codes, scales, _ = rounded(numbers, plain)
            zeros = torch.full_like(scales, SYMMETRIC_ZERO) if self.format.zeros else None
            self.fill(first, codes, scales, zeros)


def packed_nibbles(codes: Tensor) -> Tensor:
    """uint8 [rows, chunks · 256] of 0 … 15 → int32 [rows, chunks · 32]."""
    planes = codes.view(len(codes), -1, 8, PLANE).to(torch.int32)
    words = torch.zeros_like(planes[:, :, 0])
    for place in range(8):
        words |= planes[:, :, place] << 4 * place
    return words.flatten(1)


def unpacked_nibbles(words: Tensor) -> Tensor:
    """int32 [..., words] → uint8 [..., 8 · words], in the order of the columns."""
    chunks = words.view(*words.shape[:-1], -1, PLANE)
    return torch.stack([(chunks >> 4 * place & 15).to(torch.uint8) for place in range(8)], dim=-2).flatten(-3)


def rounded(weights: Tensor, format: LowBitFormat) -> tuple[Tensor, Tensor, Tensor | None]:
    """(codes [rows, columns], scales [rows, groups], zeros) of the nearest matrix without zero points."""
    assert not format.zeros, "a matrix is rounded without zero points"
    rows, columns = weights.shape
    group = format.group or columns
    padded = torch.nn.functional.pad(weights.float(), (0, -columns % group)).view(rows, -1, group)
    largest = LARGEST[format.element]
    most = padded.abs().amax(-1)
    scales = (most / largest).clamp_min(_LEAST).to(getattr(torch, format.scale)).float()
    divided = (padded / scales[..., None]).view(rows, -1)[:, :columns]
    if format.element == "fp8":
        return divided.clamp(-largest, largest).to(torch.float8_e4m3fn), scales, None
    if format.element == "int8":
        return divided.round().clamp(-128, 127).to(torch.int8), scales, None
    return (divided.round().clamp(-8, 7) + SYMMETRIC_ZERO).to(torch.uint8), scales, None


def expanded(matrix: LowBits) -> Tensor:
    """[..., rows, columns] float32: the exact values; the definition of the format, for tests and
    `expand`."""
    format, columns = matrix.format, matrix.columns
    group = format.group or columns

    def spread(per_group: Tensor) -> Tensor:
        return per_group.transpose(-1, -2).repeat_interleave(group, dim=-1)[..., :columns]

    if format.element == "int4":
        values = unpacked_nibbles(matrix.codes)[..., :columns].float()
        values = values - (SYMMETRIC_ZERO if matrix.zeros is None else spread(matrix.zeros.float()))
    else:
        values = matrix.codes.float()
    values = values * spread(matrix.scales.float())
    if matrix.order is None:
        return values
    return torch.empty_like(values).index_copy_(-1, matrix.order.long(), values)
