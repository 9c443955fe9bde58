"""Rotary positions of draft heads: the two halves of a head are rotated against each other."""

from __future__ import annotations

import torch
from torch import Tensor


def rotation(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """positions [...] → cos and sin [..., 1, head_dim / 2] in float32"""
    half = head_dim // 2
    steps = torch.arange(half, device=positions.device, dtype=torch.float32)
    angles = positions.float()[..., None] * theta ** (-steps / half)
    return angles.cos()[..., None, :], angles.sin()[..., None, :]


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
