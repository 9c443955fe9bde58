"""Shared by the readers of families that are planned, not served: a config with its neighbouring files, and
the common parts of a spec.

`PlannerConfig` is made by `find_spec` and passed to one family's reader. Nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ridgeline.models.errors import BrokenModel, UnsupportedModel
from ridgeline.models.files.config_values import ConfigValues
from ridgeline.models.spec.layer_spec import LayerSpec
from ridgeline.models.spec.model_spec import ExtraWeights, ModelSpec
from ridgeline.models.spec.readers.hf_config import MAX_LAYERS
from ridgeline.models.spec.readers.stored import Storage, read_storage

STATE_TYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
# These keys of an outer, multimodal config apply to the language model inside it.
OUTER_KEYS = ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config")


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    name: str
    outer: Mapping[str, Any]  # the whole config.json
    quantization: Mapping[str, Any] | None  # hf_quant_config.json, if there is one

    @property
    def where(self) -> str:
        return f"{self.name}: config.json"

    def text(self, *, defaults: Mapping[str, Any] | None = None) -> ConfigValues:
        """The language model's values: the config itself, or its text_config with the outer keys."""
        return ConfigValues(self.text_mapping(), self.where, defaults=defaults)

    def text_mapping(self) -> dict[str, Any]:
        nested = ConfigValues(self.outer, self.where).mapping("text_config")
        if nested is None:
            return dict(self.outer)
        inherited = {key: self.outer[key] for key in OUTER_KEYS if self.outer.get(key) is not None}
        return {**nested, **inherited}

    def vision(self) -> ConfigValues | None:
        settings = ConfigValues(self.outer, self.where).mapping("vision_config")
        return None if settings is None else ConfigValues(settings, self.where, prefix="vision_config.")

    def storage(self) -> Storage:
        values = self.text()
        return read_storage(values, self.quantization, values.optional_integer("num_hidden_layers") or 1)


def layer_count(values: ConfigValues, key: str = "num_hidden_layers") -> int:
    count = values.integer(key)
    if count > MAX_LAYERS:
        raise BrokenModel(f"{values.where}: {key} is {count}; no model has more than {MAX_LAYERS}")
    return count


def per_layer(values: ConfigValues, key: str, count: int) -> list[str] | None:
    """A list of names with one entry for each layer; None when absent."""
    stated = values.optional_texts(key)
    if stated is not None and len(stated) != count:
        raise BrokenModel(f"{values.where}: {key} has {len(stated)} entries for {count} layers")
    return None if stated is None else list(stated)


def flags_per_layer(values: ConfigValues, key: str, count: int) -> list[bool]:
    """A list of 0 and 1 with one entry for each layer."""
    stated = values.integers(key)
    if len(stated) != count or not set(stated) <= {0, 1}:
        raise BrokenModel(f"{values.where}: {key} must contain 0 or 1 for each of {count} layers")
    return [entry == 1 for entry in stated]


def state_bytes(values: ConfigValues, key: str, default: str) -> int:
    """Bytes of one number of a recurrent state, by the name of its type."""
    name = values.optional_text(key) or default
    if name not in STATE_TYPES:
        raise UnsupportedModel(f"{values.where}: {key} is {name!r}; supported: {', '.join(STATE_TYPES)}")
    return STATE_TYPES[name]


def planned_spec(
    config: PlannerConfig,
    values: ConfigValues,
    family: str,
    layers: tuple[LayerSpec, ...],
    *,
    extra_parameters: tuple[ExtraWeights, ...] = (),
    other: int = 0,
) -> ModelSpec:
    storage = config.storage()
    return ModelSpec(
        name=config.name,
        family=family,
        hidden_size=values.integer("hidden_size"),
        vocab_size=values.integer("vocab_size"),
        max_context=values.integer("max_position_embeddings"),
        tied_embeddings=values.flag("tie_word_embeddings", default=False),
        layers=layers,
        weight_format=storage.weight_format,
        stored=storage.precision,
        extra_parameters=extra_parameters,
        other=other,
    )
