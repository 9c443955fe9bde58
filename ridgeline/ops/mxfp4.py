"""MXFP4 matrices of experts as a device keeps them: E2M1 numbers, and an E8M0 scale for 32 of them.

The loader fills them, `ops.cuda.experts` computes with them as stored. Imports torch alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 32  # numbers with one scale
NAN_SCALE = 255
LARGEST_SCALE = 191  # 2^64: the kernels raise a scale by 2^63 on the way


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """One matrix of every expert: words int32 [E, rows, K / 8], scales uint8 [E, K / 32, rows].

    Scales are turned against the checkpoint's order, so that a tile's scales lie side by side.
    """

    words: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        """[E, rows, K], as of a plain matrix."""
        experts, rows, words = self.words.shape
        return experts, rows, 8 * words

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + self.scales.nbytes

    @staticmethod
    def empty(shape: tuple[int, ...], device: torch.device | str) -> Mxfp4:
        experts, rows, k = shape
        return Mxfp4(
            torch.empty((experts, rows, k // 8), dtype=torch.int32, device=device),
            torch.empty((experts, k // BLOCK, rows), dtype=torch.uint8, device=device),
        )

    def fill(self, expert: int, first_row: int, blocks: Tensor) -> None:
        """Rows of one expert from GGUF's blocks, uint8 [rows, K / 32, 17]: the scale, then 16 bytes with
        number i in the low half of byte i and number i + 16 in its high half."""
        rows = slice(first_row, first_row + len(blocks))
        halves = blocks[..., 1:]
        numbers = torch.cat([halves & 15, halves >> 4], dim=-1)
        pairs = numbers[..., 0::2] | numbers[..., 1::2] << 4
        self.words[expert, rows] = pairs.flatten(1).view(torch.int32)
        self.scales[expert, :, rows] = blocks[..., 0].t()


def mxfp4(blocks: Tensor, scales: Tensor) -> Mxfp4:
    """From the checkpoint's blocks uint8 [E, rows, K / 32, 16] and scales uint8 [E, rows, K / 32]."""
    words = blocks.flatten(2).contiguous().view(torch.int32)
    return Mxfp4(words, scales.transpose(1, 2).contiguous())


def expanded(weight: Mxfp4) -> Tensor:
    """[E, rows, K] float32: the exact values; for tests, and where nothing computes the format."""
    nibbles = torch.stack([weight.words >> 4 * place & 15 for place in range(8)], dim=-1).flatten(2)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=nibbles.device)
    values = torch.where(nibbles >= 8, -table[nibbles & 7], table[nibbles & 7])
    powers = torch.exp2(weight.scales.transpose(1, 2).double() - 127).float()
    return values * powers.repeat_interleave(BLOCK, dim=2)
