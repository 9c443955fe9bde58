"""The structure of a packed decoder: its matrices and vectors, and the tensor rows that each contains.

Follows from the spec alone. q, k and v are one matrix; gate and up are one whose panels of 16 rows alternate,
so that the kernel that multiplies them finds both halves of a product next to each other. Reads no files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.weights.layout import Piece, pieces

PANEL_ROWS = 16
PADDING = -1
ROPE_DIVISORS = "rope_divisors"  # the only vector that is not a layer's tensor: GGUF's form of a rope scaling

Rows = NDArray[np.intp]

_NAMES = {"embed": "embedding", "o": "output", "o_bias": "output_bias"}


@dataclass(frozen=True, slots=True)
class Fused:
    """A matrix or a vector of the packed decoder. Its parts are whole tensors of the checkpoint."""

    name: str  # final_norm, layers.3.qkv, layers.3.qkv_bias, …
    parts: tuple[Piece, ...]

    @property
    def is_matrix(self) -> bool:
        return len(self.parts[0].shape) == 2

    @property
    def is_outermost(self) -> bool:
        return self.parts[0].layer is None

    @property
    def _alternates(self) -> bool:
        return self.parts[0].field.startswith("gate_up")

    @property
    def n(self) -> int:
        rows = [piece.shape[0] for piece in self.parts]
        return 2 * _round_up(rows[0]) if self._alternates else sum(rows)

    @property
    def k(self) -> int:
        """Weights per row; 0 for a vector."""
        return self.parts[0].shape[1] if self.is_matrix else 0

    def rows(self) -> Rows:
        """[n] indices into the rows of all parts, concatenated; PADDING where there is none."""
        indices, first = [], 0
        for piece in self.parts:
            indices.append(np.arange(piece.shape[0]) + first)
            first += piece.shape[0]
        return _alternating(*indices) if self._alternates else np.concatenate(indices)


def fused_tensors(spec: ModelSpec) -> Iterator[Fused]:
    """Every matrix and vector, in storage order, which is the order in which a step reads them."""
    groups: dict[tuple[int | None, str], list[Piece]] = {}
    for piece in pieces(spec):
        groups.setdefault((piece.layer, piece.field), []).append(piece)
    for (layer, field), parts in groups.items():
        name = _NAMES.get(field, field)
        yield Fused(name if layer is None else f"layers.{layer}.{name}", tuple(parts))


def _alternating(gate: Rows, up: Rows) -> Rows:
    """16 gate rows, 16 up rows, …"""
    padding = (0, _round_up(len(gate)) - len(gate))
    both = [np.pad(half, padding, constant_values=PADDING).reshape(-1, 1, PANEL_ROWS) for half in (gate, up)]
    return np.concatenate(both, axis=1).reshape(-1)


def _round_up(rows: int) -> int:
    return -(-rows // PANEL_ROWS) * PANEL_ROWS
