"""A checkpoint as torch tensors in the torch decoder's layout: fused, norms in float32.

`load_weights` allocates every tensor once and fills it chunk by chunk from the checkpoint, so loading never
needs a second copy of the model. Used by the torch and GPU backends (`stream` fills the latter's tensors from
safetensors); the native library's loader is `packed`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.weights.checkpoint import (
    Progress,
    TensorSource,
    checked_places,
    float_chunks,
    not_finite,
    open_source,
)
from ridgeline.models.weights.dequant import Floats
from ridgeline.models.weights.layout import Piece, pieces
from ridgeline.models.weights.places import Place
from ridgeline.ops.mxfp4 import Mxfp4

EXPERT_MATRICES = ("experts_gate_up", "experts_down")


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Matrices are [out, in]; None if the family has no such tensor."""

    qkv: Tensor  # q rows, then k rows, then v rows
    o: Tensor
    attn_norm: Tensor | None = None
    attn_norm_bias: Tensor | None = None
    ffn_norm: Tensor | None = None
    ffn_norm_bias: Tensor | None = None
    post_attn_norm: Tensor | None = None
    post_attn_norm_bias: Tensor | None = None
    post_ffn_norm: Tensor | None = None
    post_ffn_norm_bias: Tensor | None = None
    qkv_bias: Tensor | None = None
    o_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    sinks: Tensor | None = None  # [heads]
    gate_up: Tensor | None = None  # gate rows, then up rows; of a dense FFN or of shared experts
    gate_up_bias: Tensor | None = None
    up: Tensor | None = None  # of an FFN without a gate
    up_bias: Tensor | None = None
    down: Tensor | None = None
    down_bias: Tensor | None = None
    router: Tensor | None = None  # [experts, hidden]
    router_bias: Tensor | None = None
    choice_bias: Tensor | None = None
    experts_gate_up: Tensor | Mxfp4 | None = None  # [experts, 2 · size, hidden]
    experts_gate_up_bias: Tensor | None = None
    experts_down: Tensor | Mxfp4 | None = None  # [experts, hidden, size]
    experts_down_bias: Tensor | None = None
    shared_scale: Tensor | None = None  # [1, hidden]


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embed: Tensor  # [vocab, hidden]
    final_norm: Tensor
    lm_head: Tensor  # the same tensor as `embed` if embeddings are tied
    layers: list[LayerWeights]
    final_norm_bias: Tensor | None = None
    lm_head_bias: Tensor | None = None
    positions: Tensor | None = None  # [learned positions, hidden]
    rope_divisors: Floats | None = None  # [rope dim / 2]: GGUF's form of a rope scaling

    @property
    def nbytes(self) -> int:
        """Memory used, each tensor counted once."""
        tensors: list[Tensor | Mxfp4] = [self.embed, self.final_norm]
        tensors += [t for t in (self.final_norm_bias, self.lm_head_bias, self.positions) if t is not None]
        if self.lm_head is not self.embed:
            tensors.append(self.lm_head)
        for layer in self.layers:
            tensors += [t for t in _fields(layer).values() if t is not None]
        return sum(t.nbytes for t in tensors)


def there(tensor: Tensor | Mxfp4 | None) -> Tensor:
    """A tensor that the layer's description says it has."""
    assert isinstance(tensor, Tensor)
    return tensor


def expert_matrices(matrices: Tensor | Mxfp4 | None) -> Tensor | Mxfp4:
    """Those of a layer that the description says has experts; as stored, where the backend asked for it."""
    assert matrices is not None
    return matrices


def load_weights(
    path: Path,
    spec: ModelSpec,
    dtype: torch.dtype,
    progress: Progress | None = None,
    device: torch.device | str = "cpu",
) -> DecoderWeights:
    """Read a checkpoint: a directory in Hugging Face layout, a .safetensors file or a .gguf file.

    `progress` is called with (elements read, total elements) after each tensor.
    """
    source = open_source(path, spec)
    places = checked_places(source, spec, path)
    weights = allocate_weights(spec, dtype, device, source.rope_divisors())
    total, done = sum(math.prod(piece.shape) for piece in places), 0
    for piece, place in places.items():
        rows = target_rows(weights, piece)
        _read_into(rows, source, piece, place)
        if piece.is_norm and spec.norm.offset:
            rows += spec.norm.offset
        # A sum in float64 is finite exactly when every element is, and needs no memory.
        if not math.isfinite(rows.sum(dtype=torch.float64).item()):
            raise not_finite(source, place.name, str(dtype).removeprefix("torch."))
        done += math.prod(piece.shape)
        if progress is not None:
            progress(done, total)
    return weights


def random_weights(
    spec: ModelSpec,
    dtype: torch.dtype,
    seed: int = 0,
    device: torch.device | str = "cpu",
    *,
    stored_experts: bool = False,
) -> DecoderWeights:
    """Random weights of the right shapes and magnitudes, for measuring speed without a checkpoint."""
    generator = torch.Generator(device=device).manual_seed(seed)
    weights = allocate_weights(spec, dtype, device, None, stored_experts=stored_experts)
    for piece in pieces(spec):
        if (stored := stored_target(weights, piece)) is not None:
            stored.words.random_(-(2**31), 2**31 - 1, generator=generator)
            stored.scales.random_(119, 122, generator=generator)
            continue
        rows = target_rows(weights, piece)
        if piece.is_norm:
            rows.fill_(1.0)
        else:
            rows.normal_(0.0, piece.shape[-1] ** -0.5, generator=generator)
    return weights


def _read_into(out: Tensor, source: TensorSource, piece: Piece, place: Place) -> None:
    flat = out.view(-1)
    for first, values in float_chunks(source, piece, place):
        flat[first : first + len(values)].copy_(torch.from_numpy(values))


def allocate_weights(
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device | str,
    rope_divisors: Floats | None,
    *,
    stored_experts: bool = False,
) -> DecoderWeights:
    """Uninitialised tensors for every piece; fused ones are sized by their last piece.

    stored_experts: the experts' matrices as MXFP4.
    """
    sizes: dict[tuple[int | None, str], tuple[int, ...]] = {}
    for piece in pieces(spec):
        stack = () if piece.expert is None else (piece.expert + 1,)
        sizes[piece.layer, piece.field] = (*stack, piece.first_row + piece.shape[0], *piece.shape[1:])
    small = {piece.field for piece in pieces(spec) if piece.is_float32}

    def allocated(field: str, shape: tuple[int, ...]) -> Tensor | Mxfp4:
        if stored_experts and field in EXPERT_MATRICES:
            return Mxfp4.empty(shape, device)
        return torch.empty(shape, dtype=torch.float32 if field in small else dtype, device=device)

    def tensors(layer: int | None) -> dict[str, Any]:
        return {field: allocated(field, shape) for (place, field), shape in sizes.items() if place == layer}

    whole = tensors(None)
    whole.setdefault("lm_head", whole["embed"])
    layers = [LayerWeights(**tensors(layer)) for layer in range(spec.num_layers)]
    return DecoderWeights(layers=layers, rope_divisors=rope_divisors, **whole)


def target_rows(weights: DecoderWeights, piece: Piece) -> Tensor:
    """The rows this piece fills."""
    owner = weights if piece.layer is None else weights.layers[piece.layer]
    tensor: Tensor = getattr(owner, piece.field)
    if piece.expert is not None:
        tensor = tensor[piece.expert]
    return tensor[piece.first_row : piece.first_row + piece.shape[0]]


def stored_target(weights: DecoderWeights, piece: Piece) -> Mxfp4 | None:
    """The matrix of a piece that is kept as stored; None for any other."""
    if piece.layer is None or piece.field not in EXPERT_MATRICES:
        return None
    matrix = getattr(weights.layers[piece.layer], piece.field)
    return matrix if isinstance(matrix, Mxfp4) else None


def _fields(layer: LayerWeights) -> dict[str, Tensor | Mxfp4 | None]:
    return {name: getattr(layer, name) for name in LayerWeights.__slots__}
