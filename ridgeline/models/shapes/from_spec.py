"""ModelShape of a model that has a ModelSpec.

Called by `shapes.read`. The spec stays the only description of such a model; its shape is derived from it.
"""

from __future__ import annotations

from ridgeline.models.shapes.attention import FullAttention
from ridgeline.models.shapes.ffn import DenseFfn, Experts, Ffn
from ridgeline.models.shapes.precision import Precision
from ridgeline.models.shapes.shape import ExtraWeights, LayerShape, ModelShape
from ridgeline.models.spec.model_spec import ModelSpec


def shape_of(
    spec: ModelSpec, *, stored: Precision, extra_parameters: tuple[ExtraWeights, ...] = ()
) -> ModelShape:
    return ModelShape(
        name=spec.name,
        family=spec.family,
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        max_context=spec.max_context,
        tied_embeddings=spec.tied_embeddings,
        layers=tuple(_layer(spec, index) for index in range(spec.num_layers)),
        weight_format=spec.weight_format,
        stored=stored,
        extra_parameters=extra_parameters,
    )


def _layer(spec: ModelSpec, index: int) -> LayerShape:
    attention = FullAttention(
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        window=spec.layers[index].window,
        qkv_bias=spec.qkv_bias,
        output_bias=spec.output_bias,
        qk_norm="head" if spec.qk_norm else "",
    )
    return LayerShape(attention, _ffn(spec, index), norms=4 if spec.post_norms else 2)


def _ffn(spec: ModelSpec, index: int) -> Ffn:
    moe = spec.moe
    if moe is None or index in moe.dense_layers:
        return DenseFfn(spec.ffn_size, bias=spec.mlp_bias)
    return Experts(
        num=moe.num_experts,
        per_token=moe.experts_per_token,
        size=moe.expert_ffn_size,
        shared_size=moe.shared_expert_ffn_size,
        shared_gate=moe.shared_expert_gate,
    )
