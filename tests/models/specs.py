"""ModelSpecs of decoders whose layers differ in rope, window or FFN at most, from flat arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ridgeline.models.spec.ffn import Activation, Dense, Experts
from ridgeline.models.spec.layer_spec import LayerSpec, Norms
from ridgeline.models.spec.mixers import Attention
from ridgeline.models.spec.model_spec import ModelSpec, NormSpec
from ridgeline.models.spec.rope import RopeSpec

Place = tuple[RopeSpec, int | None]  # a layer's rope and window


def decoder_spec(
    *,
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    ffn_size: int,
    layers: Sequence[Place],
    name: str = "small",
    family: str = "llama",
    norm_eps: float = 1e-5,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    post_norms: bool = False,
    softcap: float | None = None,
    activation: Activation = "silu",
    experts: Experts | None = None,
    dense_layers: Sequence[int] = (),
    **rest: Any,
) -> ModelSpec:
    """`experts`: in place of the dense FFN, except in `dense_layers`. `rest`: fields of ModelSpec."""
    dense = Dense(ffn_size, bias=mlp_bias, activation=activation)
    built = tuple(
        LayerSpec(
            Attention(
                num_heads,
                num_kv_heads,
                head_dim,
                rope=rope,
                window=window,
                softcap=softcap,
                qkv_bias=qkv_bias,
                output_bias=output_bias,
                qk_norm="head" if qk_norm else "",
            ),
            dense if experts is None or index in dense_layers else experts,
            Norms(after=post_norms),
        )
        for index, (rope, window) in enumerate(layers)
    )
    norm = NormSpec(norm_eps)
    return ModelSpec(family=family, name=name, hidden_size=hidden_size, layers=built, norm=norm, **rest)
