"""Features of a config.json that its family does not read, recognised by the keys that enable them.

Called by `hf_config` to reject a model with its true reason, before any of its numbers is trusted. The table
uses plain words because users read them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ridgeline.models.files.config_values import is_set, shown


@dataclass(frozen=True, slots=True)
class Feature:
    """Required if any of `keys` is set to something other than a value in `harmless`."""

    words: str
    keys: tuple[str, ...]
    harmless: tuple[Any, ...] = ()


FEATURES: tuple[Feature, ...] = (
    Feature("a vision tower", ("vision_config", "vision_tower", "vision_feature_layer", "image_token_id")),
    Feature("an audio encoder", ("audio_config",)),
    Feature("an encoder-decoder structure", ("is_encoder_decoder", "cross_attention_layers")),
    Feature("multi-head latent attention (MLA)", ("kv_lora_rank", "qk_nope_head_dim")),
    Feature("low-rank query and output projections", ("q_lora_rank", "o_lora_rank")),
    Feature("sparse attention", ("index_topk", "index_n_heads", "sparse_attention_config")),
    Feature("compressed attention", ("compress_ratios",)),
    Feature(
        "linear attention layers",
        ("linear_attn_config", "linear_num_key_heads", "linear_key_head_dim", "full_attention_interval"),
    ),
    Feature(
        "Mamba (state-space) layers",
        ("mamba_num_heads", "mamba_d_state", "ssm_state_size", "ssm_cfg", "hybrid_override_pattern"),
    ),
    Feature("blocks that differ from layer to layer", ("block_configs", "layers_block_type")),
    Feature("attention sinks", ("add_swa_attention_sink_bias", "add_full_attention_sink_bias")),
    Feature("a clamped SwiGLU", ("swiglu_limit",)),
    Feature("another gain of the clamped SwiGLU", ("swiglu_alpha",), harmless=(1.702,)),
    Feature("chunked attention", ("attention_chunk_size",)),
    Feature("gated attention outputs", ("attn_output_gate", "attention_output_gate")),
    Feature("scaled attention values", ("attention_value_scale",)),
    Feature(
        "head shapes that differ between layers",
        ("global_head_dim", "num_global_key_value_heads", "swa_num_key_value_heads", "swa_head_dim"),
    ),
    Feature("value heads of another size", ("v_head_dim",)),
    Feature("keys that serve as values", ("attention_k_eq_v",)),
    Feature("KV shared between layers", ("num_kv_shared_layers",)),
    Feature("per-layer embeddings", ("hidden_size_per_layer_input",)),
    Feature("bidirectional attention", ("use_bidirectional_attention",)),
    Feature("hyper-connections", ("hc_mult",)),
    Feature("QK-norm over whole projections", ("qk_norm_type",), harmless=("per_head",)),
    Feature("partial rotation of heads", ("partial_rotary_factor", "rotary_dim"), harmless=(1.0,)),
    Feature("multi-axis rotary positions (M-RoPE)", ("use_mrope", "mrope_section")),
    Feature("interleaved rotary pairs", ("rope_interleaved", "rope_interleave")),
    Feature("layers without rotary positions", ("no_rope_layers", "no_rope_layer_interval")),
    Feature("ALiBi positions", ("alibi", "use_alibi")),
    Feature("attention soft-capping", ("attn_logit_softcapping",)),
    Feature("a bias on the LM head", ("lm_head_bias",)),
    Feature("clipped projections", ("clip_qkv",)),
    Feature(
        "scaled residuals, embeddings or logits",
        (
            "residual_multiplier",
            "embedding_multiplier",
            "attention_multiplier",
            "logits_scaling",
            "logit_scale",
        ),
        harmless=(1.0,),
    ),
    Feature(
        "expert routing other than plain softmax",
        ("scoring_func", "use_routing_bias", "use_moe_router_bias", "topk_method"),
        harmless=("softmax", "greedy"),
    ),
    Feature("latent experts", ("moe_latent_size",)),
    Feature(
        "multi-token-prediction layers",
        ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers"),
    ),
)

# Keys that do not affect the computation: training, tooling, generation settings, serialization.
SILENT_KEYS = {
    "architectures",
    "model_type",
    "auto_map",
    "transformers_version",
    "transformers.js_config",
    "is_llama_config",
    "use_cache",
    "initializer_range",
    "attention_dropout",
    "attn_pdrop",
    "classifier_dropout",
    "embd_pdrop",
    "embedding_dropout",
    "hidden_dropout",
    "resid_pdrop",
    "residual_dropout",
    "pretraining_tp",
    "use_bfloat16",
    "torchscript",
    "output_router_logits",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "input_jitter_noise",
    "experts_per_token",  # gpt-oss states it twice
    "initial_context_length",
    "max_window_layers",
    "reorder_and_upcast_attn",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    "task_specific_params",
    "id2label",
    "label2id",
    "return_dict",
    "chunk_size_feed_forward",
    "cache_implementation",
    "max_length",
    "min_length",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
    "repetition_penalty",
    "length_penalty",
    "diversity_penalty",
    "num_beams",
    "num_beam_groups",
    "num_return_sequences",
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
}

ORDINARY_LAYER_TYPES = ("full_attention", "sliding_attention")
CHUNK_SIZE = "attention_chunk_size"
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "enable_moe_block")
# Keys handled by `unreadable_features` and `routed_experts`.
JUDGED_KEYS = {*EXPERT_KEYS, *(key for feature in FEATURES for key in feature.keys)}


def unreadable_features(config: Mapping[str, Any], read: Collection[str] = ()) -> list[str]:
    """Everything in this config that cannot be described, as text, with its key.

    read: the keys that the config's family reads.
    """
    unread = {key: value for key, value in config.items() if key not in read}
    found = [words for feature in FEATURES if (words := _asked_for(feature, unread))]
    layer_types = config.get("layer_types")
    if isinstance(layer_types, list):
        known = {*ORDINARY_LAYER_TYPES, *(("chunked_attention",) if CHUNK_SIZE in read else ())}
        for kind in sorted({str(kind) for kind in layer_types} - known):
            words = f"{kind.replace('_', ' ')} layers"
            if not any(other.startswith(words) for other in found):
                found.append(f"{words} (layer_types)")
    return found


def routed_experts(config: Mapping[str, Any]) -> str | None:
    """The text for routed experts, if the config has them; a dense family must not."""
    return _asked_for(Feature("routed experts", EXPERT_KEYS), config)


def _asked_for(feature: Feature, config: Mapping[str, Any]) -> str | None:
    for key in feature.keys:
        value = config.get(key)
        if is_set(value) and value not in feature.harmless:
            detail = "" if isinstance(value, dict | list) else f" = {shown(value)}"
            return f"{feature.words} ({key}{detail})"
    return None
