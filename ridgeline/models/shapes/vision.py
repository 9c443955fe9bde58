"""Parameters of the vision towers that come with language models, as extras outside the decode path.

Called by the families' readers. A tower is counted, not described: it is in memory, and it runs once per
picture.
"""

from __future__ import annotations

from ridgeline.models.config_values import ConfigValues
from ridgeline.models.shapes.shape import ExtraWeights

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
    across, down = values.integers("merge_kernel_size")
    merged = values.integer("mm_hidden_size") * across * down
    projector = LAYER_NORM * values.integer("mm_hidden_size")
    projector += _linear(merged, merged) + _linear(merged, values.integer("text_hidden_size"))
    return ExtraWeights(NAME, embedding + height * width * hidden + blocks + projector, resident=True)


def _linear(inputs: int, outputs: int) -> int:
    """A matrix with its bias."""
    return outputs * (inputs + 1)
