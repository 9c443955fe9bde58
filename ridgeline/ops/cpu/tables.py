"""A decoder as the native library's tables: layers with their kinds as tags, experts, norms, rotary tables.

`models.weights.packed_table` fills them from a ModelSpec; `library.NativeDecoder` passes them on. It checks
the type and length of every array, which the library cannot know. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Array
from dataclasses import dataclass
from typing import Any

import numpy as np

from ridgeline.ops.cpu.interface import (
    DECODER_FLOATS,
    DECODER_INTS,
    EXPERTS_FLOATS,
    EXPERTS_INTS,
    LAYER_FLOATS,
    LAYER_INTS,
    LAYER_NORMS,
    Activation,
    CDecoder,
    CExperts,
    CLayer,
    CMatrix,
    CNorm,
    FfnKind,
    KvFormat,
    NormKind,
    QkNorm,
    Scores,
    address,
)
from ridgeline.ops.cpu.matrices import Floats, PackedMatrix


@dataclass(frozen=True, slots=True, eq=False)
class NormTable:
    """A norm's float32 vectors, ready to multiply with and to add."""

    weight: Floats
    bias: Floats | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ExpertsTable:
    """Routed experts (rl_experts). The matrices of all experts are stacked, each padded to whole panels."""

    num: int
    per_token: int
    size: int
    router: PackedMatrix  # [num, hidden]; with a shared gate one row more
    gate_up: PackedMatrix
    down: PackedMatrix
    scores: Scores = Scores.SOFTMAX
    normalized: bool = True
    scales_input: bool = False
    groups: int = 1
    top_groups: int = 1
    shared_gate: bool = False
    scale: float = 1.0
    clamp: float = 0.0  # 0: none
    margin: float = 0.0  # of sparsemixer
    choice_bias: Floats | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LayerTable:
    """One layer (rl_layer). None: the layer has no such part."""

    qkv: PackedMatrix
    output: PackedMatrix
    attention_scale: float
    ffn: int  # inner size; with experts: of the part that all tokens use, 0 for none
    gate_up: PackedMatrix | None  # of a plain FFN: up
    down: PackedMatrix | None
    attn_norm: NormTable | None = None
    ffn_norm: NormTable | None = None
    post_attn_norm: NormTable | None = None
    post_ffn_norm: NormTable | None = None
    cosine: Floats | None = None  # [max_context, rotary_dim / 2]
    sine: Floats | None = None
    rotary_dim: int = 0
    attention_softcap: float = 0.0  # 0: none
    window: int = 0  # 0: full attention
    chunked: bool = False
    qk_norm: QkNorm = QkNorm.PLAIN
    q_norm: Floats | None = None  # of scaled queries: their factors, [max_context]
    k_norm: Floats | None = None
    sinks: Floats | None = None  # [heads]
    parallel: bool = False
    ffn_kind: FfnKind = FfnKind.GATED
    activation: Activation = Activation.SILU
    experts: ExpertsTable | None = None


@dataclass(frozen=True, slots=True, eq=False)
class DecoderTable:
    """A whole decoder (rl_decoder): its shape, its weights, and the KV cache to allocate."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_context: int
    norm_eps: float
    embedding: PackedMatrix
    lm_head: PackedMatrix  # the same object as `embedding` if tied, unless it has a bias
    final_norm: NormTable
    layers: Sequence[LayerTable]
    num_blocks: int
    max_step_tokens: int
    kv_format: KvFormat = KvFormat.BF16
    deterministic: bool = False
    norm_kind: NormKind = NormKind.RMS
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0  # 0: none
    positions: PackedMatrix | None = None


def c_layer(layer: LayerTable, table: DecoderTable) -> CLayer:
    """Holds no reference to the arrays: the table must outlive it."""
    shared = layer.qk_norm is QkNorm.HEAD
    q_norm, k_norm = (table.head_dim * (1 if shared else heads) for heads in (table.heads, table.kv_heads))
    if layer.qk_norm is QkNorm.SCALED:
        q_norm = table.max_context
    fields: dict[str, Any] = {name: _norm(getattr(layer, name), table.hidden, name) for name in LAYER_NORMS}
    tables = (table.max_context, layer.rotary_dim // 2)
    for name, array, shape in (
        ("q_norm", layer.q_norm, (q_norm,)),
        ("k_norm", layer.k_norm, (k_norm,)),
        ("sinks", layer.sinks, (table.heads,)),
        ("cosine", layer.cosine, tables),
        ("sine", layer.sine, tables),
    ):
        if array is not None:
            fields[name] = address(array, np.float32, shape, name)
    fields |= {name: getattr(layer, name) for name in (*LAYER_INTS, *LAYER_FLOATS)}
    if layer.experts is not None:
        fields["experts"] = _experts(layer.experts)
    return CLayer(
        qkv=layer.qkv.as_c(),
        output=layer.output.as_c(),
        gate_up=_matrix(layer.gate_up),
        down=_matrix(layer.down),
        **fields,
    )


def c_decoder(table: DecoderTable, layers: Array[CLayer]) -> CDecoder:
    """Holds no reference to the arrays: the table must outlive it."""
    scalars = {
        name: getattr(table, name) for name in (*DECODER_INTS, *DECODER_FLOATS) if name != "num_layers"
    }
    return CDecoder(
        **scalars,
        num_layers=len(layers),
        embedding=table.embedding.as_c(),
        positions=_matrix(table.positions),
        lm_head=table.lm_head.as_c(),
        final_norm=_norm(table.final_norm, table.hidden, "final_norm"),
        layers=layers,
    )


def _experts(experts: ExpertsTable) -> CExperts:
    bias = experts.choice_bias
    return CExperts(
        **{name: getattr(experts, name) for name in (*EXPERTS_INTS, *EXPERTS_FLOATS)},
        router=experts.router.as_c(),
        choice_bias=None if bias is None else address(bias, np.float32, (experts.num,), "choice_bias"),
        gate_up=experts.gate_up.as_c(),
        down=experts.down.as_c(),
    )


def _norm(norm: NormTable | None, hidden: int, name: str) -> CNorm:
    if norm is None:
        return CNorm()
    bias = None if norm.bias is None else address(norm.bias, np.float32, (hidden,), f"the bias of {name}")
    return CNorm(address(norm.weight, np.float32, (hidden,), name), bias)


def _matrix(matrix: PackedMatrix | None) -> CMatrix:
    return CMatrix() if matrix is None else matrix.as_c()
