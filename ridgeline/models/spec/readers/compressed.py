"""Shape of DeepSeek V4: a window plus compressed attention, several residual streams, experts throughout.

Called by `find_spec` through its table.
"""

from __future__ import annotations

from ridgeline.models.errors import BrokenModel
from ridgeline.models.files.config_values import ConfigValues
from ridgeline.models.spec.layer_spec import LayerSpec
from ridgeline.models.spec.mixers import CompressedAttention, SparseIndex
from ridgeline.models.spec.model_spec import ExtraWeights, ModelSpec
from ridgeline.models.spec.readers.latent import deepseek_experts
from ridgeline.models.spec.readers.planner_config import PlannerConfig, layer_count, planned_spec

SPARSE_RATIO = 4  # entries this fine are selected by an index, and overlap


def read_deepseek_v4(config: PlannerConfig) -> ModelSpec:
    values = config.text()
    count, hidden = layer_count(values), values.integer("hidden_size")
    heads = values.optional_integer("num_nextn_predict_layers", minimum=0) or 0
    ratios = values.integers("compress_ratios")
    if len(ratios) != count + heads:
        raise BrokenModel(
            f"{values.where}: compress_ratios has {len(ratios)} entries for {count} layers and {heads} "
            "prediction heads"
        )
    streams = values.integer("hc_mult")
    # Reading the streams into a layer, mixing them and writing back uses a small matrix twice per layer.
    mixing = 2 * ((2 + streams) * streams * (streams * hidden + 1) + 3)
    joining = streams * (streams * hidden + 1) + 1
    experts = deepseek_experts(values)
    layers = tuple(LayerSpec(_attention(values, ratio), experts, other=mixing) for ratio in ratios)
    extra = sum(layer.parameters(hidden) for layer in layers[count:])
    extra += heads * (2 * hidden * hidden + 3 * hidden + joining)
    extras = (ExtraWeights("MTP", extra, resident=False),) if heads else ()
    return planned_spec(config, values, "deepseek_v4", layers[:count], extra_parameters=extras, other=joining)


def _attention(values: ConfigValues, ratio: int) -> CompressedAttention:
    sparse = ratio == SPARSE_RATIO
    index = None
    if sparse:
        heads, head_dim = values.integer("index_n_heads"), values.integer("index_head_dim")
        index = SparseIndex(heads, head_dim, values.integer("index_topk"))
    return CompressedAttention(
        heads=values.integer("num_attention_heads"),
        head_dim=values.integer("head_dim"),
        q_lora_rank=values.integer("q_lora_rank"),
        window=values.integer("sliding_window"),
        ratio=ratio,
        output_groups=values.integer("o_groups"),
        output_rank=values.integer("o_lora_rank"),
        index=index,
        overlapping=sparse,
    )
