"""A checkpoint as weights in the torch decoder's layout: fused matrices, norms in float32.

A matrix is a `Weight`: its format, its tensors, and the slice of it that is here. A decoder takes them apart
once, when it is built (`tensors_of`): a step never looks at a Weight. Norms and biases are plain tensors.

`load_weights` allocates every tensor once and fills it chunk by chunk from the checkpoint, so loading never
needs a second copy of the model. Used by the torch and GPU backends (`stream` fills the latter's tensors from
safetensors); the native library's loader is `packed`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.weights.checkpoint import (
    Progress,
    TensorSource,
    float_chunks,
    not_finite,
    open_source,
    sharded_places,
)
from ridgeline.models.weights.dequant import Floats
from ridgeline.models.weights.layout import Piece, pieces
from ridgeline.models.weights.low_bits.loading import fill_low_bits
from ridgeline.models.weights.low_bits.plan import NOTHING_LOW, LowBitPlan
from ridgeline.models.weights.places import Place
from ridgeline.models.weights.shards import ALONE, WHOLE, Rank, Shard
from ridgeline.ops.low_bits import LowBits
from ridgeline.ops.mxfp4 import Mxfp4

M = TypeVar("M")  # a matrix
E = TypeVar("E")  # a matrix of experts, which a device may keep in the file's format
EXPERT_MATRICES = ("experts_gate_up", "experts_down")


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How a matrix is stored.

    parts: the tensors that it consists of; the first has its elements
    group: neighbouring elements of a row that share a scale
    """

    name: str
    parts: tuple[str, ...] = ("data",)
    group: int = 1


DENSE = {
    dtype: WeightFormat(str(dtype).removeprefix("torch."))
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
}
# words int32 [experts, rows, K / 8], scales uint8 [experts, K / 32, rows]: see ops.mxfp4
MXFP4 = WeightFormat("mxfp4", ("words", "scales"), group=32)


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix [out, in], or a stack of them [experts, out, in]. low: its parts, where it is in 8 or 4
    bits."""

    format: WeightFormat
    parts: Mapping[str, Tensor]
    shard: Shard = WHOLE
    low: LowBits | None = None

    @staticmethod
    def dense(data: Tensor, shard: Shard = WHOLE) -> Weight:
        return Weight(DENSE[data.dtype], {"data": data}, shard)

    @staticmethod
    def in_low_bits(matrix: LowBits, shard: Shard = WHOLE) -> Weight:
        parts = matrix.tensors
        format = WeightFormat(str(matrix.format), tuple(parts), matrix.format.group or matrix.columns)
        return Weight(format, parts, shard, matrix)

    @property
    def tensor(self) -> Tensor:
        """The elements of a matrix without scales."""
        if len(self.parts) != 1:
            raise TypeError(f"a matrix in {self.format.name} has {', '.join(self.parts)}, not one tensor")
        return self.parts["data"]

    @property
    def stored(self) -> Mxfp4:
        """The tensors of a matrix in MXFP4."""
        return Mxfp4(self.parts["words"], self.parts["scales"])

    @property
    def device(self) -> torch.device:
        return next(iter(self.parts.values())).device

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())


@dataclass(frozen=True, slots=True)
class LayerWeights(Generic[M, E]):
    """One layer. Matrices are [out, in]; None if the family has no such tensor. Vectors are plain tensors."""

    qkv: M  # q rows, then k rows, then v rows
    o: M
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
    gate_up: M | None = None  # gate rows, then up rows; of a dense FFN or of shared experts
    gate_up_bias: Tensor | None = None
    up: M | None = None  # of an FFN without a gate
    up_bias: Tensor | None = None
    down: M | None = None
    down_bias: Tensor | None = None
    router: M | None = None  # [experts, hidden]
    router_bias: Tensor | None = None
    choice_bias: Tensor | None = None
    experts_gate_up: E | None = None  # [experts, 2 · size, hidden]
    experts_gate_up_bias: Tensor | None = None  # [experts, 2 · size]
    experts_down: E | None = None  # [experts, hidden, size]
    experts_down_bias: Tensor | None = None  # [experts, hidden]
    shared_scale: M | None = None  # [1, hidden]


@dataclass(frozen=True, slots=True)
class DecoderWeights(Generic[M, E]):
    """M: Weight as the loaders make it; Tensor as a decoder computes with it (`tensors_of`)."""

    embed: M  # [vocab, hidden]
    final_norm: Tensor
    lm_head: M  # the same object as `embed` if embeddings are tied
    layers: list[LayerWeights[M, E]]
    final_norm_bias: Tensor | None = None
    lm_head_bias: Tensor | None = None
    positions: Tensor | None = None  # [learned positions, hidden]
    rope_divisors: Floats | None = None  # [rope dim / 2]: GGUF's form of a rope scaling

    @property
    def nbytes(self) -> int:
        """Memory used, each tensor counted once."""
        held: list[Any] = [
            self.embed,
            self.final_norm,
            self.final_norm_bias,
            self.lm_head_bias,
            self.positions,
        ]
        held += [] if self.lm_head is self.embed else [self.lm_head]
        for layer in self.layers:
            held += _fields(layer).values()
        return sum(one.nbytes for one in held if one is not None)


Weights = DecoderWeights[Weight, Weight]
DecoderTensors = DecoderWeights[Tensor, Tensor | Mxfp4]
LayerTensors = LayerWeights[Tensor, Tensor | Mxfp4]
# As a device computes with them: matrices of 8 and 4 bits too.
Matrix = Tensor | LowBits
ExpertMatrix = Tensor | Mxfp4 | LowBits
DeviceTensors = DecoderWeights[Matrix, ExpertMatrix]
DeviceLayer = LayerWeights[Matrix, ExpertMatrix]
# The fields of both classes that are matrices.
MATRICES = frozenset(
    {"embed", "lm_head", "qkv", "o", "gate_up", "up", "down", "router", "shared_scale", *EXPERT_MATRICES}
)


def tensors_of(weights: Weights) -> DecoderTensors:
    """The tensors, for a decoder that is being built. Shards are rejected: it computes whole matrices."""
    _require_whole(weights)
    embed = weights.embed.tensor
    return DecoderWeights(
        embed=embed,
        final_norm=weights.final_norm,
        lm_head=embed if weights.lm_head is weights.embed else weights.lm_head.tensor,
        layers=[_layer_tensors(layer) for layer in weights.layers],
        final_norm_bias=weights.final_norm_bias,
        lm_head_bias=weights.lm_head_bias,
        positions=weights.positions,
        rope_divisors=weights.rope_divisors,
    )


def device_tensors_of(weights: Weights) -> DeviceTensors:
    """As `tensors_of`, for a decoder that computes with matrices in 8 and 4 bits."""
    _require_whole(weights)
    embed = weights.embed.tensor
    return DecoderWeights(
        embed=embed,
        final_norm=weights.final_norm,
        lm_head=embed if weights.lm_head is weights.embed else weights.lm_head.tensor,
        layers=[_layer_tensors(layer, low=True) for layer in weights.layers],
        final_norm_bias=weights.final_norm_bias,
        lm_head_bias=weights.lm_head_bias,
        positions=weights.positions,
        rope_divisors=weights.rope_divisors,
    )


def _require_whole(weights: Weights) -> None:
    top = {"embed": weights.embed, "lm_head": weights.lm_head}
    for number, held in enumerate([top, *map(_fields, weights.layers)]):
        for name, weight in held.items():
            if isinstance(weight, Weight) and weight.shard.axis != "whole":
                shard, where = weight.shard, f" of layer {number - 1}" if number else ""
                raise ValueError(
                    f"{name}{where} is a shard (its {shard.axis} of rank {shard.rank.number} of "
                    f"{shard.rank.world}); a decoder needs whole matrices: load them without a rank"
                )


def _layer_tensors(layer: LayerWeights[Weight, Weight], *, low: bool = False) -> Any:
    def taken(held: Any) -> Any:
        if not isinstance(held, Weight):
            return held
        if low and held.low is not None:
            return held.low
        return held.stored if held.format is MXFP4 else held.tensor

    return LayerWeights(**{name: taken(held) for name, held in _fields(layer).items()})


def there(tensor: Tensor | Mxfp4 | LowBits | None) -> Tensor:
    """A tensor that the layer's description says it has."""
    assert isinstance(tensor, Tensor)
    return tensor


def matrix_of(matrix: Matrix | None) -> Matrix:
    """A matrix that the layer's description says it has."""
    assert matrix is not None
    return matrix


def expert_matrices(matrices: ExpertMatrix | None) -> ExpertMatrix:
    """Those of a layer that the description says has experts; as stored, where the backend asked for it."""
    assert matrices is not None
    return matrices


def load_weights(
    path: Path,
    spec: ModelSpec,
    dtype: torch.dtype,
    progress: Progress | None = None,
    device: torch.device | str = "cpu",
    rank: Rank = ALONE,
    low: LowBitPlan = NOTHING_LOW,
) -> Weights:
    """Read a checkpoint: a directory in Hugging Face layout, a .safetensors file or a .gguf file.

    `progress` is called with (elements read, total elements) after each tensor. rank: reads the shards of one
    of several processes.
    """
    source = open_source(path, spec)
    places, shards = sharded_places(source, spec, path, rank)
    weights = allocate_weights(spec, dtype, device, source.rope_divisors(), places, shards, low=low)
    total, done = sum(math.prod(piece.shape) for piece in places), 0
    for piece, place in places.items():
        if (matrix := low_target(weights, piece)) is not None:
            fill_low_bits(matrix, source, piece, place, as_stored=(piece.layer, piece.field) in low.stored)
            done += math.prod(piece.shape)
            continue
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
    low: LowBitPlan = NOTHING_LOW,
) -> Weights:
    """Random weights of the right shapes and magnitudes, for measuring speed without a checkpoint."""
    generator = torch.Generator(device=device).manual_seed(seed)
    weights = allocate_weights(spec, dtype, device, None, stored_experts=stored_experts, low=low)
    for piece in pieces(spec):
        if (matrix := low_target(weights, piece)) is not None:
            matrix.randomize(piece.first_row, piece.shape[0], generator)
            continue
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
    held: Iterable[Piece] | None = None,
    shards: Mapping[tuple[int | None, str], Shard] | None = None,
    *,
    stored_experts: bool = False,
    low: LowBitPlan = NOTHING_LOW,
) -> Weights:
    """Uninitialised tensors for every piece; fused ones are sized by their last piece.

    held: the pieces of this process (default: all), and the shards of its tensors.
    stored_experts: the experts' matrices as MXFP4. low: those in 8 and 4 bits.
    """
    sizes: dict[tuple[int | None, str], tuple[int, ...]] = {}
    for piece in list(pieces(spec)) if held is None else held:
        stack = () if piece.expert is None else (piece.expert + 1,)
        sizes[piece.layer, piece.field] = (*stack, piece.first_row + piece.shape[0], *piece.shape[1:])
    small = {piece.field for piece in pieces(spec) if piece.is_float32}

    def made(layer: int | None, field: str, shape: tuple[int, ...]) -> Weight | Tensor:
        shard = (shards or {}).get((layer, field), WHOLE)
        if stored_experts and field in EXPERT_MATRICES:
            stored = Mxfp4.empty(shape, device)
            return Weight(MXFP4, {"words": stored.words, "scales": stored.scales}, shard)
        if layer is not None and (format := low.formats.get((layer, field))) is not None:
            ordered = (layer, field) in low.ordered
            return Weight.in_low_bits(LowBits.empty(format, shape, device, ordered=ordered), shard)
        tensor = torch.empty(shape, dtype=torch.float32 if field in small else dtype, device=device)
        return Weight.dense(tensor, shard) if field in MATRICES else tensor

    def tensors(layer: int | None) -> dict[str, Any]:
        return {field: made(layer, field, shape) for (place, field), shape in sizes.items() if place == layer}

    whole = tensors(None)
    whole.setdefault("lm_head", whole["embed"])
    layers = [LayerWeights(**tensors(layer)) for layer in range(spec.num_layers)]
    return DecoderWeights(layers=layers, rope_divisors=rope_divisors, **whole)


def target_rows(weights: Weights, piece: Piece) -> Tensor:
    """The rows this piece fills."""
    owner = weights if piece.layer is None else weights.layers[piece.layer]
    held: Weight | Tensor = getattr(owner, piece.field)
    tensor = held.tensor if isinstance(held, Weight) else held
    if piece.expert is not None:
        tensor = tensor[piece.expert]
    return tensor[piece.first_row : piece.first_row + piece.shape[0]]


def stored_target(weights: Weights, piece: Piece) -> Mxfp4 | None:
    """The matrix of a piece that is kept as stored; None for any other."""
    if piece.layer is None or piece.field not in EXPERT_MATRICES:
        return None
    matrix: Weight = getattr(weights.layers[piece.layer], piece.field)
    return matrix.stored if matrix.format is MXFP4 else None


def low_target(weights: Weights, piece: Piece) -> LowBits | None:
    """The matrix of a piece that is kept in 8 or 4 bits, of its expert; None for any other."""
    if piece.layer is None or piece.field not in MATRICES:
        return None
    matrix: Weight = getattr(weights.layers[piece.layer], piece.field)
    return None if matrix.low is None else matrix.low.of(piece.expert)


def _fields(layer: LayerWeights[Any, Any]) -> dict[str, Any]:
    return {field.name: getattr(layer, field.name) for field in fields(layer)}
