"""The structure of a packed decoder: its matrices and vectors, and the tensor rows that each contains.

Follows from the spec alone. q, k and v are one matrix; gate and up are one whose panels of 16 rows alternate,
so that the kernel that multiplies them finds both halves of a product next to each other. The matrices of all
experts of a layer are one, each expert padded to whole panels. Reads no files.
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
_JOINED = {"shared_scale": "router"}  # rows of another matrix: one product computes both


@dataclass(frozen=True, slots=True)
class Fused:
    """A matrix or a vector of the packed decoder. Its parts are whole tensors of the checkpoint."""

    name: str  # final_norm, layers.3.qkv, layers.3.qkv_bias, …
    parts: tuple[Piece, ...]
    zero_rows: int = 0  # after the parts' rows

    @property
    def is_matrix(self) -> bool:
        return len(self.parts[0].shape) == 2

    @property
    def is_outermost(self) -> bool:
        return self.parts[0].layer is None

    @property
    def is_router(self) -> bool:
        """Computed in float32: a rounding error could choose other experts."""
        return self.parts[0].field == "router"

    @property
    def _alternates(self) -> bool:
        return self.parts[0].field.removeprefix("experts_").startswith("gate_up")

    @property
    def n(self) -> int:
        rows = [piece.shape[0] for piece in self.parts]
        padded = self._alternates or self.parts[0].expert is not None
        return sum(_round_up(count) if padded else count for count in rows) + self.zero_rows

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
        if self._alternates:
            indices = [_alternating(*pair) for pair in zip(indices[::2], indices[1::2], strict=True)]
        elif self.parts[0].expert is not None:
            indices = [_padded(rows) for rows in indices]
        return np.concatenate([*indices, np.full(self.zero_rows, PADDING)])


def fused_tensors(spec: ModelSpec) -> Iterator[Fused]:
    """Every matrix and vector, in storage order, which is the order in which a step reads them."""
    groups: dict[tuple[int | None, str], list[Piece]] = {}
    for piece in pieces(spec):
        groups.setdefault((piece.layer, _JOINED.get(piece.field, piece.field)), []).append(piece)
    for (layer, field), parts in groups.items():
        name = _NAMES.get(field, field)
        more = len(groups[layer, "router"]) - 1 if field == "router_bias" else 0
        yield Fused(name if layer is None else f"layers.{layer}.{name}", tuple(parts), more)


def looked_up(spec: ModelSpec) -> tuple[str, ...]:
    """The matrices of which a step reads the rows of its tokens, and never all."""
    return ("positions",) if spec.tied_embeddings else ("positions", "embedding")


def _alternating(gate: Rows, up: Rows) -> Rows:
    """16 gate rows, 16 up rows, …"""
    both = [_padded(half).reshape(-1, 1, PANEL_ROWS) for half in (gate, up)]
    return np.concatenate(both, axis=1).reshape(-1)


def _padded(rows: Rows) -> Rows:
    return np.pad(rows, (0, _round_up(len(rows)) - len(rows)), constant_values=PADDING)


def _round_up(rows: int) -> int:
    return -(-rows // PANEL_ROWS) * PANEL_ROWS
