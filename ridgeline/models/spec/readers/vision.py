"""Parameters of the vision towers of language models, as extras outside the decode path.

Called by the families' readers. A tower is counted, not described: it is in memory, and runs once per image.
"""

from __future__ import annotations

from ridgeline.models.errors import BrokenModel
from ridgeline.models.files.config_values import ConfigValues
from ridgeline.models.spec.model_spec import ExtraWeights

NAME = "vision tower"
LAYER_NORM = 2  # vectors of a LayerNorm: weight and bias


def qwen_tower(values: ConfigValues) -> ExtraWeights:
    """Qwen3-VL and later: patches, learned positions, blocks, and mergers of 2·2 patches into a token."""
    hidden, inner = values.integer("hidden_size"), values.integer("intermediate_size")
    patch = values.integer("patch_size") ** 2 * values.integer("temporal_patch_size")
    embedding = hidden * (values.integer("in_channels") * patch + 1)
    positions = values.integer("num_position_embeddings") * hidden
    block = _linear(hidden, 3 * hidden) + _linear(hidden, hidden)
    block += _linear(hidden, inner) + _linear(inner, hidden) + 2 * LAYER_NORM * hidden
    merged = hidden * values.integer("spatial_merge_size") ** 2
    merging = _linear(merged, merged) + _linear(merged, values.integer("out_hidden_size"))
    deep = len(values.integers("deepstack_visual_indexes"))
    mergers = (1 + deep) * merging + LAYER_NORM * (hidden + deep * merged)
    total = embedding + positions + values.integer("depth") * block + mergers
    return ExtraWeights(NAME, total, resident=True)


def kimi_tower(values: ConfigValues) -> ExtraWeights:
    """Kimi K2.5: patches, learned positions, blocks, and a projector to the language model's width."""
    hidden, inner = values.integer("vt_hidden_size"), values.integer("vt_intermediate_size")
    embedding = hidden * (3 * values.integer("patch_size") ** 2 + 1)
    height, width = values.integer("init_pos_emb_height"), values.integer("init_pos_emb_width")
    block = _linear(hidden, 3 * hidden) + _linear(hidden, hidden)
    block += _linear(hidden, inner) + _linear(inner, hidden) + 2 * LAYER_NORM * hidden
    blocks = values.integer("vt_num_hidden_layers") * block + LAYER_NORM * hidden
    merging = values.integers("merge_kernel_size")
    if len(merging) != 2 or min(merging) < 1:
        raise BrokenModel(f"{values.where}: {values.prefix}merge_kernel_size must contain two sizes")
    merged = values.integer("mm_hidden_size") * merging[0] * merging[1]
    projector = LAYER_NORM * values.integer("mm_hidden_size")
    projector += _linear(merged, merged) + _linear(merged, values.integer("text_hidden_size"))
    return ExtraWeights(NAME, embedding + height * width * hidden + blocks + projector, resident=True)


def gemma_tower(values: ConfigValues, text_hidden: int) -> ExtraWeights:
    """Gemma 4: patches, two tables of positions, gated blocks with four norms, and one projection."""
    hidden, inner = values.integer("hidden_size"), values.integer("intermediate_size")
    width = values.integer("num_attention_heads") * values.integer("head_dim")
    embedding = hidden * 3 * values.integer("patch_size") ** 2
    positions = 2 * values.integer("position_embedding_size") * hidden
    block = 4 * hidden * width + 2 * values.integer("head_dim") + 3 * hidden * inner + 4 * hidden
    total = embedding + positions + values.integer("num_hidden_layers") * block + hidden * text_hidden
    return ExtraWeights(NAME, total, resident=True)


def _linear(inputs: int, outputs: int) -> int:
    """A matrix with its bias."""
    return outputs * (inputs + 1)
