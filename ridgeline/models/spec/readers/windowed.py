"""Shapes of models that mix windowed with full attention: MiMo-V2, Step 3, Gemma 4.

Called by `find_spec` through its table. Differences between layers are read from each config's own list.
"""

from __future__ import annotations

from ridgeline.models.errors import BrokenModel, UnsupportedModel
from ridgeline.models.files.config_values import ConfigValues
from ridgeline.models.spec.ffn import Dense, Experts, Ffn
from ridgeline.models.spec.layer_spec import LayerSpec, Norms
from ridgeline.models.spec.mixers import Attention
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.readers.planner_config import (
    PlannerConfig,
    flags_per_layer,
    layer_count,
    per_layer,
    planned_spec,
)
from ridgeline.models.spec.readers.vision import gemma_tower

SLIDING = "sliding_attention"


def read_mimo_v2(config: PlannerConfig) -> ModelSpec:
    """Windowed layers have different heads and sinks; keys are wider than values."""
    values = config.text()
    count = layer_count(values)
    windowed = flags_per_layer(values, "hybrid_layer_pattern", count)
    sparse = flags_per_layer(values, "moe_layer_freq", count)
    size = values.integer("moe_intermediate_size")
    experts = Experts(
        num=values.integer("n_routed_experts"),
        per_token=values.integer("num_experts_per_tok"),
        size=size,
        shared_size=size * (values.optional_integer("n_shared_experts", minimum=0) or 0),
    )
    dense = Dense(values.integer("intermediate_size"))

    def attention(is_windowed: bool) -> Attention:
        prefix = "swa_" if is_windowed else ""
        sinks = "add_swa_attention_sink_bias" if is_windowed else "add_full_attention_sink_bias"
        return Attention(
            heads=values.integer(f"{prefix}num_attention_heads"),
            kv_heads=values.integer(f"{prefix}num_key_value_heads"),
            head_dim=values.integer(f"{prefix}head_dim"),
            value_dim=values.integer(f"{prefix}v_head_dim"),
            window=values.integer("sliding_window") if is_windowed else None,
            sinks=values.flag(sinks, default=False),
        )

    layers = tuple(
        LayerSpec(attention(windowed[index]), experts if sparse[index] else dense) for index in range(count)
    )
    return planned_spec(config, values, "mimo_v2_flash", layers)


def read_step(config: PlannerConfig) -> ModelSpec:
    """Every head has a gate; windowed layers may have more heads."""
    values = config.text(defaults={"head_dim": 128})
    kinds = _kinds(values)
    first = values.integer("first_k_dense_replace", minimum=0)
    experts = Experts(
        num=values.integer("num_experts"),
        per_token=values.integer("num_experts_per_tok"),
        size=values.integer("moe_intermediate_size"),
        shared_size=values.integer("share_expert_dim"),
    )
    dense = Dense(values.integer("intermediate_size"))
    windowed = ConfigValues(values.mapping("attention_other_setting") or {}, values.where)

    def attention(kind: str) -> Attention:
        heads = values.integer("num_attention_heads")
        if kind == SLIDING:
            heads = windowed.optional_integer("num_attention_heads") or heads
        return Attention(
            heads=heads,
            kv_heads=values.integer("num_key_value_heads"),
            head_dim=values.integer("head_dim"),
            window=values.integer("sliding_window") if kind == SLIDING else None,
            qk_norm="head",
            head_gate=True,
        )

    layers = tuple(
        LayerSpec(attention(kind), dense if index < first else experts) for index, kind in enumerate(kinds)
    )
    return planned_spec(config, values, "step3p7", layers)


def read_gemma4(config: PlannerConfig) -> ModelSpec:
    """Full layers have wider heads, and keys serve as values; experts run next to a dense FFN."""
    values = config.text()
    for key, what in (
        ("hidden_size_per_layer_input", "separate embeddings for every layer"),
        ("num_kv_shared_layers", "layers that share a cache"),
    ):
        if values.optional_integer(key, minimum=0):
            raise UnsupportedModel(f"{values.where}: the planner does not count {what} ({key})")
    same = values.flag("attention_k_eq_v", default=False)

    def attention(kind: str) -> Attention:
        if kind == SLIDING:
            heads, dim = values.integer("num_key_value_heads"), values.integer("head_dim")
        else:
            dim = values.integer("global_head_dim")
            heads = values.integer("num_global_key_value_heads" if same else "num_key_value_heads")
        return Attention(
            heads=values.integer("num_attention_heads"),
            kv_heads=heads,
            head_dim=dim,
            window=values.integer("sliding_window") if kind == SLIDING else None,
            qk_norm="head",
            keys_are_values=same and kind != SLIDING,
        )

    ffn, norms = _gemma_ffn(values)
    layers = tuple(LayerSpec(attention(kind), ffn, norms=norms) for kind in _kinds(values))
    vision = config.vision()
    extras = () if vision is None else (gemma_tower(vision, values.integer("hidden_size")),)
    return planned_spec(config, values, "gemma4", layers, extra_parameters=extras)


def _gemma_ffn(values: ConfigValues) -> tuple[Ffn, Norms]:
    """(FFN, norms of a layer)."""
    size = values.integer("intermediate_size")
    if not values.flag("enable_moe_block", default=False):
        return Dense(size), Norms(after=True)
    num, hidden = values.integer("num_experts"), values.integer("hidden_size")
    experts = Experts(
        num=num,
        per_token=values.integer("top_k_experts"),
        size=values.integer("moe_intermediate_size"),
        shared_size=size,
        other_vectors=hidden + num,  # scales of the router's input and of its choices
    )
    return experts, Norms(after=True, others=3)


def _kinds(values: ConfigValues) -> list[str]:
    kinds = per_layer(values, "layer_types", layer_count(values))
    if kinds is None or not set(kinds) <= {SLIDING, "full_attention"}:
        raise BrokenModel(f"{values.where}: layer_types must name each layer {SLIDING} or full_attention")
    return kinds
