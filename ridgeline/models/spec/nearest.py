"""The supported family that is nearest to a model that is not supported, and what a user can do about it.

Called by `read_spec` once a reader has refused a model. Compares the structure of its config.json or of its
GGUF tensors with every family of the table. Reads no weights.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ridgeline.models.errors import ModelError
from ridgeline.models.files.config_values import ConfigValues
from ridgeline.models.files.gguf import GgufFile
from ridgeline.models.spec.declarations.family import Family, gguf_names_of
from ridgeline.models.spec.families import BY_GGUF_ARCHITECTURE, BY_MODEL_TYPE, FAMILIES
from ridgeline.models.spec.readers.hf_config import (
    OUTER_KEYS,
    TEXT_CONFIG,
    read_values,
    unread_keys,
)
from ridgeline.models.spec.readers.hf_features import (
    EXPERT_KEYS,
    JUDGED_KEYS,
    ORDINARY_LAYER_TYPES,
    routed_experts,
    unreadable_features,
)

LISTED = "`ridgeline models support` lists the families"
UNREADABLE = 4  # keys that a family does not read weigh 1 each; a config that it cannot read weighs this much
SHOWN_KEYS = 6


@dataclass(frozen=True, slots=True)
class Nearest:
    """A family, and how a model differs from it."""

    family: Family
    features: tuple[str, ...] = ()  # parts of the computation that the family does not have, in words
    keys: tuple[str, ...] = ()  # config.json keys, or tensors of a layer, that it does not read
    unreadable: bool = False  # a key that the family needs is missing, or has a value that it refuses

    @property
    def distance(self) -> int:
        return len(self.features) + len(self.keys) + UNREADABLE * self.unreadable


# ---- config.json ----


def config_advice(config: Mapping[str, Any]) -> str:
    """What to do about a config.json that was refused."""
    near = nearest_to_config(config)
    family, model_type = near.family.name, str(config.get("model_type"))
    if model_type in BY_MODEL_TYPE:
        relative = f"; {family} reads all of its keys" if near.distance == 0 else ""
        return f"{BY_MODEL_TYPE[model_type].name} without it is supported{relative}. {LISTED}"
    if near.distance == 0:
        return f"{_same_keys(config, near.family)}. {LISTED}"
    said = f"The nearest supported family is {family}"
    if near.keys:
        said += f", which does not read {_listed(near.keys)}"
    return f"{said}. {LISTED}"


def nearest_to_config(config: Mapping[str, Any]) -> Nearest:
    """The family that reads most of this config; among equals, the one with the most similar name."""
    text = _language_model(config)
    model_type = str(text.get("model_type") or config.get("model_type"))
    found = [_compared(text, family) for family in FAMILIES.values()]
    return min(found, key=lambda near: (near.distance, -_likeness(near.family.name, model_type)))


def _same_keys(config: Mapping[str, Any], family: Family) -> str:
    if config.get("auto_map"):
        return (
            f"Its config.json has only keys of the family {family.name}, but the model brings its own code "
            "(auto_map), which may compute something else"
        )
    return (
        f"Its config.json has only keys of the family {family.name}. If it computes the same, set "
        f'"model_type": "{family.model_types[0]}" and "architectures": ["{family.architectures[0]}"] '
        "there to serve it"
    )


def _compared(text: Mapping[str, Any], family: Family) -> Nearest:
    features = unreadable_features(text, family.reads)
    if experts := routed_experts(text):
        features += [] if family.experts else [experts]
    elif family.experts:
        features.append("no routed experts")
    kept = {key: value for key, value in text.items() if _is_kept(key, value, family)}
    values = ConfigValues(kept, "config.json", defaults=family.defaults, names=family.keys)
    try:
        read_values(values, family, "model", {})
    except ModelError:
        return Nearest(family, tuple(features), unreadable=True)
    return Nearest(family, tuple(features), tuple(unread_keys(values)))


def _is_kept(key: str, value: Any, family: Family) -> bool:
    """Whether the family's reader gets this key. Features are counted before, so that they do not stop it."""
    if key == "layer_types":
        return isinstance(value, list) and set(map(str, value)) <= set(ORDINARY_LAYER_TYPES)
    return key not in JUDGED_KEYS or key in family.reads or (family.experts is not None and key in EXPERT_KEYS)


def _language_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get(TEXT_CONFIG)
    if not isinstance(text, dict):
        return config
    return {**text, **{key: config[key] for key in OUTER_KEYS if config.get(key) is not None}}


# ---- GGUF ----


def gguf_advice(gguf: GgufFile) -> str:
    """What to do about a GGUF file of an unknown architecture."""
    near = nearest_to_gguf(gguf)
    said = f"The nearest supported architecture is {near.family.gguf_architecture}"
    if near.features:
        said += f", without {_listed(near.features)}"
    if near.keys:
        said += f"{' and' if near.features else ', which'} does not read {_listed(near.keys)}"
    return f"{said}. {LISTED}"


def nearest_to_gguf(gguf: GgufFile) -> Nearest:
    first = {name.removeprefix("blk.0.") for name in gguf.tensors if name.startswith("blk.0.")}
    found = [
        _compared_tensors(first, family, gguf_names_of(family, gguf.tensors).layer.values())
        for family in BY_GGUF_ARCHITECTURE.values()
    ]
    likeness = gguf.architecture
    return min(
        found, key=lambda near: (near.distance, -_likeness(str(near.family.gguf_architecture), likeness))
    )


def _compared_tensors(stored: set[str], family: Family, names: Any) -> Nearest:
    known = {name if isinstance(name, str) else name.name for name in names}
    is_read = {
        "QK-norm": ("attn_q_norm.weight" in stored, bool(family.qk_norm)),
        "norms after attention and FFN": ("post_ffw_norm.weight" in stored, family.norms.after),
        "biases of norms": ("attn_norm.bias" in stored, family.norm_bias),
        "an FFN without a gate": ("ffn_gate.weight" not in stored, not family.gated),
        "routed experts": (any("_exps." in name for name in stored), family.experts is not None),
    }
    features = [words for words, (there, has) in is_read.items() if there and not has]
    missing = sum(has and not there for there, has in is_read.values())
    return Nearest(family, tuple(features), tuple(sorted(stored - known)), unreadable=missing > 0)


# ---- words ----


def _likeness(name: str, other: str) -> float:
    return difflib.SequenceMatcher(None, name, other).ratio()


def _listed(words: tuple[str, ...]) -> str:
    more = f" and {len(words) - SHOWN_KEYS} more" if len(words) > SHOWN_KEYS else ""
    return ", ".join(words[:SHOWN_KEYS]) + more
