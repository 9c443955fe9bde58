"""Device memory of routed experts: allocated once for the largest step, used by every layer."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import triton
from torch import Tensor

SMALLEST_TILE = 16  # rows
SORTED_BLOCK = 512  # pairs that one program of the sort counts


def most_tiles(pairs: int, experts: int, block_t: int) -> int:
    """The number of tiles of up to block_t rows where the pairs fall on the experts as badly as they can."""
    used = min(pairs, experts)
    return used + (pairs - used) // block_t


@dataclass(frozen=True, slots=True)
class Groups:
    """Pairs (token · per_token + slot) grouped by expert.

    order   int32 [pairs]: pairs of expert 0, then of expert 1, each in ascending order
    tiles   int32 [tiles, 4]: expert, first position in `order`, position after the expert's last
    total   int32 [1]: tiles in use
    counts  int32 [blocks, experts rounded up to a power of two]: between the launches of a sort
    """

    order: Tensor
    tiles: Tensor
    total: Tensor
    counts: Tensor

    def require(self, pairs: int, experts: int, tiles: int) -> None:
        """Raise if the scratch is too small."""
        if self.order.numel() < pairs or self.tiles.shape[0] < tiles:
            raise ValueError(
                f"the scratch of experts ({self.order.numel()} pairs, {self.tiles.shape[0]} tiles) is too "
                f"small for {pairs} pairs of {experts} experts in {tiles} tiles"
            )


@dataclass(frozen=True, slots=True)
class ExpertsScratch:
    """One is enough for all layers of a model.

    chosen, weights  [T, per_token], int32 and float32: what `route` writes
    logits           [T, experts]: router logits, of the model's dtype
    counter          int32 [1]: programs of `route_few` that have arrived; 0 between launches
    inner            [pairs, size]: activated gates times ups
    results          [pairs, hidden]: each pair's output, before the weighted sum
    """

    chosen: Tensor
    weights: Tensor
    logits: Tensor
    counter: Tensor
    inner: Tensor
    results: Tensor
    groups: Groups

    def nbytes(self) -> int:
        own = [getattr(self, field.name) for field in fields(self) if field.name != "groups"]
        inside = [getattr(self.groups, field.name) for field in fields(self.groups)]
        return sum(tensor.nbytes for tensor in own + inside)


def experts_scratch(
    tokens: int,
    experts: int,
    per_token: int,
    hidden: int,
    size: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> ExpertsScratch:
    """Scratch for steps of up to `tokens` tokens; takes `experts_scratch_bytes` of these sizes."""
    pairs = tokens * per_token
    tiles = max(most_tiles(pairs, experts, SMALLEST_TILE), 1)
    bins = triton.next_power_of_2(experts)

    def integers(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    return ExpertsScratch(
        chosen=integers(tokens, per_token),
        weights=torch.empty((tokens, per_token), dtype=torch.float32, device=device),
        logits=torch.empty((tokens, experts), dtype=dtype, device=device),
        counter=integers(1),
        inner=torch.empty((pairs, size), dtype=dtype, device=device),
        results=torch.empty((pairs, hidden), dtype=dtype, device=device),
        groups=Groups(
            order=integers(pairs),
            tiles=integers(tiles, 4),
            total=integers(1),
            counts=integers(-(-pairs // SORTED_BLOCK), bins),
        ),
    )


def experts_scratch_bytes(
    tokens: int, experts: int, per_token: int, hidden: int, size: int, dtype: torch.dtype
) -> int:
    """For the memory plan; allocates nothing."""
    return experts_scratch(tokens, experts, per_token, hidden, size, dtype, "meta").nbytes()
