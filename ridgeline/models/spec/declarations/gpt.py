"""Families with LayerNorm, biases and a plain GELU FFN: GPT-2, GPT-NeoX (Pythia), StarCoder2."""

from __future__ import annotations

from types import MappingProxyType

from ridgeline.models.spec.declarations.family import Family
from ridgeline.models.spec.layer_spec import Norms
from ridgeline.models.spec.names import HF_NAMES, Fused, NameMap, with_biases

GPT2 = Family(
    name="gpt2",
    model_types=("gpt2",),
    architectures=("GPT2LMHeadModel",),
    gguf_architecture="gpt2",
    keys=MappingProxyType(
        {
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
            "intermediate_size": "n_inner",
            "rms_norm_eps": "layer_norm_epsilon",
        }
    ),
    fixed=MappingProxyType(
        {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
    ),
    qkv_bias=True,
    output_bias=True,
    learned_positions=True,
    norm="layer",
    norm_bias=True,
    gated=False,
    ffn_bias=True,
    ffn_multiple=4,
    activation_key="activation_function",
    activation="gelu_tanh",
    hf_names=HF_NAMES.changed(
        {
            **NameMap.fused(Fused("attn.c_attn.weight", ("q", "k", "v"))),
            **with_biases(
                {
                    "attn_norm": "ln_1.weight",
                    "o": "attn.c_proj.weight",
                    "ffn_norm": "ln_2.weight",
                    "up": "mlp.c_fc.weight",
                    "down": "mlp.c_proj.weight",
                },
                ("attn_norm", "o", "ffn_norm", "up", "down"),
            ),
        },
        {"embed": "wte.weight", "positions": "wpe.weight", "final_norm": "ln_f.weight"}
        | {"final_norm_bias": "ln_f.bias"},
        prefixes=("transformer.", ""),
        layer_prefix="h.{layer}.",
        transposed=frozenset(
            {"attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"}
        ),
        harmless=r"attn\.(bias|masked_bias)$",
    ),
    defaults=MappingProxyType({"num_key_value_heads": None, "tie_word_embeddings": True}),
)

GPT_NEOX = Family(
    name="gpt_neox",
    model_types=("gpt_neox",),
    architectures=("GPTNeoXForCausalLM",),
    gguf_architecture="gptneox",
    keys=MappingProxyType(
        {
            "rms_norm_eps": "layer_norm_eps",
            "rope_theta": "rotary_emb_base",
            "partial_rotary_factor": "rotary_pct",
        }
    ),
    reads=frozenset({"partial_rotary_factor"}),
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    norm="layer",
    norm_bias=True,
    norms=Norms(parallel=True),
    parallel_key="use_parallel_residual",
    gated=False,
    ffn_bias=True,
    activation="gelu",
    hf_names=HF_NAMES.changed(
        {
            **NameMap.fused(Fused("attention.query_key_value.weight", ("q", "k", "v"), "grouped")),
            **with_biases(
                {
                    "o": "attention.dense.weight",
                    "up": "mlp.dense_h_to_4h.weight",
                    "down": "mlp.dense_4h_to_h.weight",
                },
                ("o", "up", "down"),
            ),
        },
        {
            "embed": "embed_in.weight",
            "final_norm": "final_layer_norm.weight",
            "final_norm_bias": "final_layer_norm.bias",
        },
        prefixes=("gpt_neox.",),
        heads=("embed_out.weight", "lm_head.weight"),
        harmless=r"attention\.(bias|masked_bias|rotary_emb\.inv_freq)$",
    ),
    defaults=MappingProxyType(
        {
            "num_key_value_heads": None,
            "attention_bias": True,
            "partial_rotary_factor": 0.25,
            "rope_theta": 10_000.0,
        }
    ),
)

STARCODER2 = Family(
    name="starcoder2",
    model_types=("starcoder2",),
    architectures=("Starcoder2ForCausalLM",),
    gguf_architecture="starcoder2",
    keys=MappingProxyType({"rms_norm_eps": "norm_epsilon"}),
    qkv_bias="use_bias",
    output_bias="use_bias",
    ffn_bias="use_bias",
    window_rule="every",
    norm="layer",
    norm_bias=True,
    gated=False,
    activation="gelu_tanh",
    hf_names=HF_NAMES.changed(
        with_biases({"up": "mlp.c_fc.weight", "down": "mlp.c_proj.weight"}, ("up", "down"))
    ),
    defaults=MappingProxyType(
        {"use_bias": True, "sliding_window": None, "tie_word_embeddings": True, "rope_theta": 10_000.0}
    ),
)
