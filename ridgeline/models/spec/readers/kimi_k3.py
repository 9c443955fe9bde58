"""Shape of Kimi K3: delta attention, every fourth layer latent attention, experts in a narrower space.

Called by `find_spec` through its table. K2 is a DeepSeek V3 and read by `latent`.
"""

from __future__ import annotations

from ridgeline.models.errors import BrokenModel
from ridgeline.models.files.config_values import ConfigValues
from ridgeline.models.spec.ffn import Dense, Experts
from ridgeline.models.spec.layer_spec import LayerSpec, Norms
from ridgeline.models.spec.mixers import Mixer
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.readers.latent import latent_attention
from ridgeline.models.spec.readers.planner_config import PlannerConfig, layer_count, planned_spec
from ridgeline.models.spec.recurrences import LinearAttention

RESIDUAL_VECTORS = 4  # a norm and a score before each half, to weight the outputs of earlier layers


def read_kimi_k3(config: PlannerConfig) -> ModelSpec:
    """The vision tower is left out: it is negligible next to 2.8 trillion parameters."""
    values = config.text()
    count, hidden = layer_count(values), values.integer("hidden_size")
    linear = ConfigValues(
        values.mapping("linear_attn_config") or {}, values.where, prefix="linear_attn_config."
    )
    latent = set(linear.integers("full_attn_layers"))  # 1-based
    if sorted(latent | set(linear.integers("kda_layers"))) != list(range(1, count + 1)):
        raise BrokenModel(
            f"{values.where}: full_attn_layers and kda_layers do not name each of {count} layers"
        )
    first = values.integer("first_k_dense_replace", minimum=0)
    dense, experts = Dense(values.integer("intermediate_size")), _experts(values)
    gate = values.flag("mla_use_output_gate", default=False)
    kinds: dict[bool, Mixer] = {
        True: latent_attention(values, output_gate=gate),
        False: _delta(linear),
    }
    layers = tuple(
        LayerSpec(
            kinds[index + 1 in latent],
            dense if index < first else experts,
            norms=Norms(others=RESIDUAL_VECTORS),
        )
        for index in range(count)
    )
    return planned_spec(config, values, "kimi_k3", layers, other=2 * hidden)


def _delta(values: ConfigValues) -> LinearAttention:
    heads, head_dim = values.integer("num_heads"), values.integer("head_dim")
    if not values.flag("use_full_rank_gate", default=False):
        raise BrokenModel(f"{values.where}: {values.prefix}use_full_rank_gate must be true in a Kimi K3")
    return LinearAttention(
        key_heads=heads,
        value_heads=heads,
        key_dim=head_dim,
        value_dim=head_dim,
        convolution=values.integer("short_conv_kernel_size"),
        decay_rank=head_dim,
    )


def _experts(values: ConfigValues) -> Experts:
    size, latent = values.integer("moe_intermediate_size"), values.integer("routed_expert_hidden_size")
    return Experts(
        num=values.integer("num_experts"),
        per_token=values.integer("num_experts_per_token"),
        size=size,
        shared_size=size * values.integer("num_shared_experts", minimum=0),
        latent_size=latent,
        other_vectors=latent if values.flag("latent_moe_use_norm", default=False) else 0,
    )
