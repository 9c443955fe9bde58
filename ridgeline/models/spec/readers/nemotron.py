"""Shapes of NVIDIA's Nemotron models: Mamba hybrids (Nemotron-H, Nemotron 3), and pruned Llamas.

Called by `find_spec` through its table.
"""

from __future__ import annotations

from typing import Any

from ridgeline.models.errors import BrokenModel, UnsupportedModel
from ridgeline.models.files.config_values import ConfigValues
from ridgeline.models.spec.ffn import Dense, Experts
from ridgeline.models.spec.layer_spec import LayerSpec
from ridgeline.models.spec.mixers import Attention
from ridgeline.models.spec.model_spec import ExtraWeights, ModelSpec
from ridgeline.models.spec.readers.planner_config import PlannerConfig, layer_count, planned_spec, state_bytes
from ridgeline.models.spec.recurrences import Mamba2

LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
FFN_MULTIPLE = 256


def read_nemotron_h(config: PlannerConfig) -> ModelSpec:
    """A layer is a single part: a state space, attention, an FFN or experts, each after one norm."""
    values = config.text()
    kinds = _kinds(values)
    known = {kind: _layer(values, kind) for kind in set(kinds)}
    layers = tuple(known[kind] for kind in kinds)
    return planned_spec(config, values, "nemotron_h", layers, extra_parameters=_prediction_heads(values))


def _kinds(values: ConfigValues) -> list[str]:
    pattern = values.optional_text("hybrid_override_pattern")
    if pattern is None:
        stated = list(values.optional_texts("layers_block_type") or ())
        count = values.optional_integer("num_hidden_layers") or len(stated)
    else:
        stated, count = [LETTERS.get(letter, letter) for letter in pattern], layer_count(values)
    if len(stated) != count or not stated or not set(stated) <= set(LETTERS.values()):
        raise BrokenModel(
            f"{values.where}: {count} layers, but hybrid_override_pattern or layers_block_type does not name "
            f"each of them one of {', '.join(LETTERS.values())}"
        )
    return stated


def _layer(values: ConfigValues, kind: str) -> LayerSpec:
    if kind == "mamba":
        return LayerSpec(_mamba(values), None)
    if kind == "attention":
        return LayerSpec(_attention(values), None)
    if kind == "mlp":
        return LayerSpec(None, Dense(values.integer("intermediate_size"), gated=False))
    experts = Experts(
        num=values.integer("n_routed_experts"),
        per_token=values.integer("num_experts_per_tok"),
        size=values.integer("moe_intermediate_size"),
        shared_size=values.integer("moe_shared_expert_intermediate_size")
        * values.integer("n_shared_experts"),
        gated=False,
        latent_size=values.optional_integer("moe_latent_size"),
    )
    return LayerSpec(None, experts)


def _mamba(values: ConfigValues) -> Mamba2:
    return Mamba2(
        heads=values.integer("mamba_num_heads"),
        head_dim=values.integer("mamba_head_dim"),
        state_size=values.integer("ssm_state_size"),
        groups=values.integer("n_groups"),
        convolution=values.integer("conv_kernel"),
        convolution_bias=values.flag("use_conv_bias", default=True),
        projection_bias=values.flag("mamba_proj_bias", default=False),
        # If the config does not say, states have the activations' type.
        state_bytes=state_bytes(values, "mamba_ssm_cache_dtype", "bfloat16"),
    )


def _attention(values: ConfigValues) -> Attention:
    older = values.optional_integer("attention_head_dim")
    return Attention(
        heads=values.integer("num_attention_heads"),
        kv_heads=values.integer("num_key_value_heads"),
        head_dim=older or values.integer("head_dim"),
        qkv_bias=values.flag("attention_bias", default=False),
        output_bias=values.flag("attention_bias", default=False),
    )


def _prediction_heads(values: ConfigValues) -> tuple[ExtraWeights, ...]:
    heads = values.optional_integer("num_nextn_predict_layers", minimum=0) or 0
    pattern = values.optional_text("mtp_hybrid_override_pattern")
    kinds = values.optional_texts("mtp_layers_block_type") or [
        LETTERS.get(letter, letter) for letter in pattern or ""
    ]
    if not heads or not kinds:
        return ()
    hidden = values.integer("hidden_size")
    layers = sum(_layer(values, kind).parameters(hidden) for kind in kinds)
    return (ExtraWeights("MTP", heads * (layers + 2 * hidden * hidden + 3 * hidden), resident=False),)


def read_pruned_llama(config: PlannerConfig) -> ModelSpec:
    """A Llama with searched blocks: attention may be missing, and FFNs differ in size."""
    values = config.text()
    blocks = values.objects("block_configs")
    if len(blocks) != layer_count(values):
        raise BrokenModel(
            f"{values.where}: block_configs has {len(blocks)} entries for {layer_count(values)} layers"
        )
    layers = tuple(_block(values, index, block) for index, block in enumerate(blocks))
    return planned_spec(config, values, "nemotron-nas", layers)


def _block(values: ConfigValues, index: int, block: dict[str, Any]) -> LayerSpec:
    inside = ConfigValues(block, values.where, prefix=f"block_configs[{index}].")
    halves = {
        part: ConfigValues(inside.mapping(part) or {}, values.where, prefix=f"{inside.prefix}{part}.")
        for part in ("attention", "ffn")
    }
    for half in halves.values():
        for key in ("replace_with_linear", "sparsify", "num_sink_tokens", "window_length"):
            if half.has(key):
                raise UnsupportedModel(f"{values.where}: {half.prefix}{key} is not supported by the planner")
    attention, ffn = halves["attention"], halves["ffn"]
    hidden, heads = values.integer("hidden_size"), values.integer("num_attention_heads")
    mixing = None
    if not attention.flag("no_op", default=False):
        mixing = Attention(heads, heads // attention.integer("n_heads_in_group"), hidden // heads)
    feeding = None
    if not ffn.flag("no_op", default=False):
        feeding = Dense(_rounded(int(2 * ffn.number("ffn_mult") * hidden / 3)))
    return LayerSpec(mixing, feeding)


def _rounded(size: int) -> int:
    """Rounded up to a whole multiple."""
    return -(-size // FFN_MULTIPLE) * FFN_MULTIPLE
