"""Shapes of Qwen's newer models: Qwen3-VL, and Qwen3.5 and 3.6 with their gated delta nets.

Called by `find_spec` through its table. Qwen3 itself has a ModelSpec and is read through that.
"""

from __future__ import annotations

from dataclasses import replace

from ridgeline.models.errors import BrokenModel
from ridgeline.models.files.config_values import ConfigValues
from ridgeline.models.spec.ffn import Dense, Experts, Ffn
from ridgeline.models.spec.layer_spec import LayerSpec
from ridgeline.models.spec.mixers import Attention, Mixer
from ridgeline.models.spec.model_spec import ExtraWeights, ModelSpec
from ridgeline.models.spec.readers.hf_config import spec_from_hf
from ridgeline.models.spec.readers.planner_config import (
    PlannerConfig,
    layer_count,
    per_layer,
    planned_spec,
    state_bytes,
)
from ridgeline.models.spec.readers.vision import qwen_tower
from ridgeline.models.spec.recurrences import LinearAttention

PLAIN_TYPES = {"qwen3_vl": "qwen3", "qwen3_vl_moe": "qwen3_moe"}


def read_qwen_vl(config: PlannerConfig) -> ModelSpec:
    """The language model is a Qwen3; the vision tower passes it images as tokens."""
    plain = PLAIN_TYPES[str(config.outer["model_type"])]
    text = {**config.text_mapping(), "model_type": plain}
    text.pop("architectures", None)
    text.pop("rope_scaling", None)  # layout of image positions: irrelevant for counting
    spec = spec_from_hf(text, name=config.name)
    return replace(spec, stored=config.storage().precision, extra_parameters=_tower(config))


def read_qwen_hybrid(config: PlannerConfig) -> ModelSpec:
    """Three layers of linear attention to one of full attention, dense or with experts."""
    values = config.text()
    kinds = per_layer(values, "layer_types", layer_count(values))
    if kinds is None or not set(kinds) <= {"linear_attention", "full_attention"}:
        raise BrokenModel(
            f"{values.where}: layer_types must name each layer linear_attention or full_attention"
        )
    ffn = _ffn(values)
    attentions: dict[str, Mixer] = {"linear_attention": _linear(values), "full_attention": _full(values)}
    layers = tuple(LayerSpec(attentions[kind], ffn) for kind in kinds)
    extras = (*_tower(config), *_prediction_heads(values, attentions["full_attention"], ffn))
    return planned_spec(config, values, str(config.outer["model_type"]), layers, extra_parameters=extras)


def _full(values: ConfigValues) -> Attention:
    return Attention(
        heads=values.integer("num_attention_heads"),
        kv_heads=values.integer("num_key_value_heads"),
        head_dim=values.integer("head_dim"),
        qkv_bias=values.flag("attention_bias", default=False),
        output_bias=values.flag("attention_bias", default=False),
        qk_norm="head",
        output_gate=values.flag("attn_output_gate", default=True),
    )


def _linear(values: ConfigValues) -> LinearAttention:
    return LinearAttention(
        key_heads=values.integer("linear_num_key_heads"),
        value_heads=values.integer("linear_num_value_heads"),
        key_dim=values.integer("linear_key_head_dim"),
        value_dim=values.integer("linear_value_head_dim"),
        convolution=values.integer("linear_conv_kernel_dim"),
        state_bytes=state_bytes(values, "mamba_ssm_dtype", "float32"),
    )


def _ffn(values: ConfigValues) -> Ffn:
    if values.optional_integer("num_experts") is None:
        return Dense(values.integer("intermediate_size"))
    return Experts(
        num=values.integer("num_experts"),
        per_token=values.integer("num_experts_per_tok"),
        size=values.integer("moe_intermediate_size"),
        shared_size=values.integer("shared_expert_intermediate_size"),
        shared_gate=True,
    )


def _prediction_heads(values: ConfigValues, attention: Mixer, ffn: Ffn) -> list[ExtraWeights]:
    """Whole layers after one projection from two hidden vectors to one, with three norms."""
    layers = values.optional_integer("mtp_num_hidden_layers", minimum=0) or 0
    if not layers:
        return []
    hidden = values.integer("hidden_size")
    each = LayerSpec(attention, ffn).parameters(hidden)
    return [ExtraWeights("MTP", layers * each + 2 * hidden * hidden + 3 * hidden, resident=False)]


def _tower(config: PlannerConfig) -> tuple[ExtraWeights, ...]:
    vision = config.vision()
    return () if vision is None else (qwen_tower(vision),)
