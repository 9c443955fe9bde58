"""The supported family that is nearest to a model that is not supported, and what a user can do about it.

Called by `read_spec` once a reader has refused a model. Compares the structure of its config.json or of its
GGUF tensors with every family of the table. Reads no weights.
"""

from __future__ import annotations

import itertools
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
# A feature or key that a family does not have counts 1. A config that it cannot read counts this, experts in
# a dense family (or none in one that has them) this, and a name of the same line is worth this.
UNREADABLE, EXPERTS, SAME_LINE = 4, 2, 2
SIMILAR = 0.6  # a name of the same line begins with at least this share of the family's name
SHOWN_KEYS = 6


@dataclass(frozen=True, slots=True)
class Nearest:
    """A family, and how a model differs from it."""

    family: Family
    features: tuple[str, ...] = ()  # parts of the computation that the family does not have, in words
    keys: tuple[str, ...] = ()  # config.json keys, or tensors of a layer, that it does not read
    unreadable: bool = False  # a key that the family needs is missing, or has a value that it refuses
    other_ffn: bool = False  # one has routed experts, the other does not

    @property
    def distance(self) -> int:
        parts = len(self.features) + len(self.keys)
        return parts + UNREADABLE * self.unreadable + EXPERTS * self.other_ffn

    def distance_from(self, name: str) -> float:
        """To a model whose family has this name."""
        known = self.family.name if self.family.gguf_architecture is None else self.family.gguf_architecture
        return self.distance - SAME_LINE * max(_likeness(self.family.name, name), _likeness(known, name))


# ---- config.json ----


def config_advice(config: Mapping[str, Any]) -> str:
    """What to do about a config.json that was refused."""
    model_type = str(config.get("model_type"))
    if model_type in BY_MODEL_TYPE:
        own = BY_MODEL_TYPE[model_type]
        readers = [one.family.name for one in _all_compared(config) if one.distance == 0]
        relative = f"; {readers[0]} reads all of its keys" if readers and own.name not in readers else ""
        return f"Other models of the family {own.name} are supported{relative}. {LISTED}"
    near = nearest_to_config(config)
    if near.distance == 0 and TEXT_CONFIG not in config:
        return f"{_same_keys(config, near.family)}. {LISTED}"
    said = f"The nearest supported family is {near.family.name}"
    if near.keys:
        said += f", which does not read {_listed(near.keys)}"
    return f"{said}. {LISTED}"


def nearest_to_config(config: Mapping[str, Any]) -> Nearest:
    """The family that reads most of this config; a name of the same line counts as well."""
    name = str(_language_model(config).get("model_type") or config.get("model_type"))
    return min(_all_compared(config), key=lambda near: near.distance_from(name))


def _all_compared(config: Mapping[str, Any]) -> list[Nearest]:
    text = _language_model(config)
    return [_compared(text, family) for family in FAMILIES.values()]


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
    features = tuple(unreadable_features(text, family.reads))
    other_ffn = (routed_experts(text) is None) != (family.experts is None)
    kept = {key: value for key, value in text.items() if _is_kept(key, value, family)}
    values = ConfigValues(kept, "config.json", defaults=family.defaults, names=family.keys)
    try:
        read_values(values, family, "model", {})
    except ModelError:
        return Nearest(family, features, unreadable=True, other_ffn=other_ffn)
    return Nearest(family, features, tuple(unread_keys(values)), other_ffn=other_ffn)


def _is_kept(key: str, value: Any, family: Family) -> bool:
    """Whether the family's reader gets this key. Features are counted before, so that they do not stop it."""
    if key == "layer_types":
        return isinstance(value, list) and set(map(str, value)) <= set(ORDINARY_LAYER_TYPES)
    return (
        key not in JUDGED_KEYS or key in family.reads or (family.experts is not None and key in EXPERT_KEYS)
    )


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
    return min(found, key=lambda near: near.distance_from(gguf.architecture))


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
    """The share of the name that the other one begins with; 0 if it is too small to mean anything."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(name, other, strict=False))
    share = len(list(same)) / len(name)
    return share if share >= SIMILAR else 0.0


def _listed(words: tuple[str, ...]) -> str:
    more = f" and {len(words) - SHOWN_KEYS} more" if len(words) > SHOWN_KEYS else ""
    return ", ".join(words[:SHOWN_KEYS]) + more
