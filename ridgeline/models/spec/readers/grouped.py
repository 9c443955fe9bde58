"""Shapes of models with grouped attention that have no ModelSpec: MiniMax M2 and M3.

Called by `find_spec` through its table. Attention is the same in every layer, except for M3's index.
"""

from __future__ import annotations

from ridgeline.models.errors import UnsupportedModel
from ridgeline.models.files.config_values import ConfigValues
from ridgeline.models.spec.ffn import Dense, Experts
from ridgeline.models.spec.layer_spec import LayerSpec
from ridgeline.models.spec.mixers import Attention, SparseIndex
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.readers.planner_config import (
    PlannerConfig,
    flags_per_layer,
    layer_count,
    planned_spec,
)


def read_minimax_m2(config: PlannerConfig) -> ModelSpec:
    """One norm over all query heads, one over all key heads; experts in every layer.

    Published checkpoints do not contain the prediction heads that the config mentions.
    """
    values = config.text()
    if values.text("qk_norm_type") != "per_layer":
        raise UnsupportedModel(
            f"{values.where}: qk_norm_type is not per_layer, the only supported type for M2"
        )
    experts = Experts(
        num=values.integer("num_local_experts"),
        per_token=values.integer("num_experts_per_tok"),
        size=values.integer("intermediate_size"),
        shared_size=values.optional_integer("shared_intermediate_size", minimum=0) or 0,
    )
    layers = (LayerSpec(_attention(values, norm="projection"), experts),) * layer_count(values)
    return planned_spec(config, values, "minimax_m2", layers)


def read_minimax_m3(config: PlannerConfig) -> ModelSpec:
    """An index selects blocks of tokens in most layers; the first layers have no experts."""
    values = config.text()
    count = layer_count(values)
    sparse = ConfigValues(
        values.mapping("sparse_attention_config") or {}, values.where, prefix="sparse_attention_config."
    )
    indexed = flags_per_layer(sparse, "sparse_attention_freq", count)
    routed = flags_per_layer(values, "moe_layer_freq", count)
    index = SparseIndex(
        heads=sparse.integer("sparse_num_index_heads"),
        head_dim=sparse.integer("sparse_index_dim"),
        top=sparse.integer("sparse_topk_blocks") * sparse.integer("sparse_block_size"),
        wide_keys=True,
    )
    experts = Experts(
        num=values.integer("num_local_experts"),
        per_token=values.integer("num_experts_per_tok"),
        size=values.integer("moe_intermediate_size"),
        shared_size=values.integer("shared_intermediate_size") * values.integer("n_shared_experts"),
    )
    dense = Dense(values.integer("dense_intermediate_size"))
    layers = tuple(
        LayerSpec(
            _attention(values, norm="head", index=index if indexed[layer] else None),
            experts if routed[layer] else dense,
        )
        for layer in range(count)
    )
    return planned_spec(config, values, "minimax_m3", layers)


def _attention(
    values: ConfigValues, *, norm: str = "", bias: bool = False, index: SparseIndex | None = None
) -> Attention:
    return Attention(
        heads=values.integer("num_attention_heads"),
        kv_heads=values.integer("num_key_value_heads"),
        head_dim=values.integer("head_dim"),
        qkv_bias=bias,
        qk_norm="projection" if norm == "projection" else "head" if norm == "head" else "",
        index=index,
    )
