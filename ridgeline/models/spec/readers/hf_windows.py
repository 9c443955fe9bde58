"""What differs from layer to layer in a config.json: which layers have a window, and which are rotated.

Called by `hf_config`, with the family's rule. A list in the config takes precedence over the rule.
"""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.models.errors import BrokenModel, UnsupportedModel
from ridgeline.models.files.config_values import ConfigValues
from ridgeline.models.spec.declarations.family import Family

CHUNKED = "chunked_attention"


def read_windows(values: ConfigValues, family: Family, count: int) -> list[int | None]:
    """Each layer's window, by the family's rule and, if given, the config's list of layer types."""
    key = "attention_chunk_size" if family.window_rule == "chunks" else "sliding_window"
    size = values.optional_integer(key, minimum=0) or None
    if not values.flag("use_sliding_window", default=True):
        size = None
    if (
        family.window_rule == "never"
        and size is not None
        and size >= values.integer("max_position_embeddings")
    ):
        size = None
    windowed = _windowed_layers(values, family, count, size)
    if any(windowed) and size is None:
        raise BrokenModel(f"{values.where}: layer_types has windowed layers, but {key} is not set")
    if size is not None and family.window_rule == "never":
        raise UnsupportedModel(
            f"{values.where}: a sliding window ({size} tokens) in the family {family.name} is not supported"
        )
    return [size if is_windowed else None for is_windowed in windowed]


def _windowed_layers(values: ConfigValues, family: Family, count: int, size: int | None) -> list[bool]:
    by_rule = _windows_by_rule(values, family, count, size)
    stated = values.optional_texts("layer_types")
    if stated is None:
        return by_rule
    windowed = [kind in ("sliding_attention", CHUNKED) for kind in stated]
    if len(windowed) != count:
        raise BrokenModel(f"{values.where}: layer_types has {len(windowed)} entries for {count} layers")
    if family.window_rule in ("never", "every") and windowed != by_rule:
        # The reference code of these families ignores the list, so its meaning is undefined.
        raise UnsupportedModel(
            f"{values.where}: mixed layer_types in the family {family.name} are not supported"
        )
    return windowed


def _windows_by_rule(values: ConfigValues, family: Family, count: int, size: int | None) -> list[bool]:
    pattern = values.optional_integer("sliding_window_pattern") or family.window_pattern
    if family.window_rule == "chunks":
        return rotated_layers(values, family, (), count)
    if size is None or family.window_rule == "never":
        return [False] * count
    if family.window_rule == "from_layer":
        first = values.integer("max_window_layers", minimum=0)
        return [index >= first for index in range(count)]
    if family.window_rule == "pattern":
        return [(index + 1) % pattern != 0 for index in range(count)]
    return [True] * count


def rotated_layers(
    values: ConfigValues, family: Family, windows: Sequence[int | None], count: int
) -> list[bool]:
    """Whether each layer rotates queries and keys."""
    if family.rope_in_windows_only:
        return [window is not None for window in windows]
    if not family.no_rope_interval:
        return [True] * count
    listed = values.integers("no_rope_layers")  # 1: rotated
    if not listed:
        interval = values.optional_integer("no_rope_layer_interval") or family.no_rope_interval
        return [(index + 1) % interval != 0 for index in range(count)]
    if len(listed) < count or not set(listed) <= {0, 1}:
        raise BrokenModel(f"{values.where}: no_rope_layers must have a 0 or a 1 for each of {count} layers")
    return [bool(rotated) for rotated in listed[:count]]
