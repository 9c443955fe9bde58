"""Shapes of the models with multi-head latent attention: DeepSeek V3 to V3.2, Kimi K2, GLM-5.

Called by `find_spec` through its table. The families differ only in numbers, and in whether an index
selects the tokens that attention reads.
"""

from __future__ import annotations

from ridgeline.models.files.config_values import ConfigValues
from ridgeline.models.spec.ffn import Dense, Experts
from ridgeline.models.spec.layer_spec import LayerSpec
from ridgeline.models.spec.mixers import LatentAttention, SparseIndex
from ridgeline.models.spec.model_spec import ExtraWeights, ModelSpec
from ridgeline.models.spec.readers.planner_config import PlannerConfig, layer_count, per_layer, planned_spec
from ridgeline.models.spec.readers.vision import kimi_tower


def read_latent(config: PlannerConfig) -> ModelSpec:
    values = config.text()
    family = str(config.outer["model_type"])
    count = layer_count(values)
    owns_index = [kind == "full" for kind in per_layer(values, "indexer_types", count) or ["full"] * count]
    dense = _dense_layers(values, count)
    layers = tuple(
        LayerSpec(
            _attention(values, owns_index=owns_index[index]),
            Dense(values.integer("intermediate_size")) if dense[index] else deepseek_experts(values),
        )
        for index in range(count)
    )
    extras = [*_prediction_heads(values)]
    if (vision := config.vision()) is not None:
        extras.append(kimi_tower(vision))
    return planned_spec(config, values, family, layers, extra_parameters=tuple(extras))


def _attention(values: ConfigValues, *, owns_index: bool) -> LatentAttention:
    index = None
    if (top := values.optional_integer("index_topk")) is not None:
        heads, head_dim = values.integer("index_n_heads"), values.integer("index_head_dim")
        index = SparseIndex(heads, head_dim, top, owns_weights=owns_index)
    return latent_attention(values, index)


def latent_attention(
    values: ConfigValues, index: SparseIndex | None = None, *, output_gate: bool = False
) -> LatentAttention:
    return LatentAttention(
        heads=values.integer("num_attention_heads"),
        q_lora_rank=values.optional_integer("q_lora_rank"),
        kv_lora_rank=values.integer("kv_lora_rank"),
        nope_dim=values.integer("qk_nope_head_dim"),
        rope_dim=values.integer("qk_rope_head_dim"),
        value_dim=values.integer("v_head_dim"),
        index=index,
        output_gate=output_gate,
    )


def _dense_layers(values: ConfigValues, count: int) -> list[bool]:
    first, step = values.integer("first_k_dense_replace", minimum=0), values.integer("moe_layer_freq")
    stated = per_layer(values, "mlp_layer_types", count)
    if stated is not None:
        return [kind == "dense" for kind in stated]
    return [index < first or index % step != 0 for index in range(count)]


def deepseek_experts(values: ConfigValues) -> Experts:
    """Routed and shared experts, under the names of DeepSeek's config."""
    size = values.integer("moe_intermediate_size")
    return Experts(
        num=values.integer("n_routed_experts"),
        per_token=values.integer("num_experts_per_tok"),
        size=size,
        shared_size=size * values.integer("n_shared_experts", minimum=0),
    )


def _prediction_heads(values: ConfigValues) -> list[ExtraWeights]:
    """Each is a whole layer, a projection from two hidden vectors to one, and three norms.

    They share the model's embeddings and LM head, though checkpoints contain those a second time.
    """
    heads = values.optional_integer("num_nextn_predict_layers", minimum=0) or 0
    if not heads:
        return []
    hidden = values.integer("hidden_size")
    layer = LayerSpec(_attention(values, owns_index=True), deepseek_experts(values))
    alone = layer.parameters(hidden) + 2 * hidden * hidden + 3 * hidden
    return [ExtraWeights("MTP", heads * alone, resident=False)]
