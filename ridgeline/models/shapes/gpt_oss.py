"""Shape of gpt-oss: windowed and full attention in turn, sinks, and experts with biases.

Called by `shapes.read` through its table.
"""

from __future__ import annotations

from ridgeline.models.errors import BrokenModel
from ridgeline.models.shapes.attention import FullAttention
from ridgeline.models.shapes.config import ShapeConfig, build_shape, layer_count, per_layer
from ridgeline.models.shapes.ffn import Experts
from ridgeline.models.shapes.shape import LayerShape, ModelShape


def read_gpt_oss(config: ShapeConfig) -> ModelShape:
    values = config.text()
    window = values.integer("sliding_window")
    kinds = per_layer(values, "layer_types", layer_count(values))
    if kinds is None:
        raise BrokenModel(f"{values.where}: layer_types is missing; it says which layers have a window")
    experts = Experts(
        num=values.integer("num_local_experts"),
        per_token=values.integer("num_experts_per_tok"),
        size=values.integer("intermediate_size"),
        bias=True,
    )
    bias = values.flag("attention_bias", default=True)

    def attention(kind: str) -> FullAttention:
        return FullAttention(
            heads=values.integer("num_attention_heads"),
            kv_heads=values.integer("num_key_value_heads"),
            head_dim=values.integer("head_dim"),
            window=window if kind == "sliding_attention" else None,
            qkv_bias=bias,
            output_bias=bias,
            sinks=True,
        )

    layers = tuple(LayerShape(attention(kind), experts) for kind in kinds)
    return build_shape(config, values, "gpt_oss", layers)
