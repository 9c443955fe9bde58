"""Routed experts of a GGUF file: counts from its metadata, biases and layers from its tensors.

Called by `gguf_config`. llama.cpp's files leave out what their architecture implies: how the chosen experts'
weights are normalized, the limit of gpt-oss' SwiGLU. The family's declaration has it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ridgeline.models.errors import UnsupportedModel
from ridgeline.models.files.config_values import ConfigValues
from ridgeline.models.spec.declarations.family import Family
from ridgeline.models.spec.ffn import Experts, Router
from ridgeline.models.spec.moe_families import ExpertKeys
from ridgeline.models.spec.names import Fused, NameMap

# expert_gating_func → the scores of a router. 3: a softmax over the chosen experts, the same if normalized.
GATING = {1: "softmax", 2: "sigmoid", 3: "softmax"}


def read_gguf_experts(
    values: ConfigValues, family: Family, names: NameMap, stored: Collection[str], count: int
) -> tuple[Experts | None, set[int]]:
    """The routed experts, and the layers that have them."""
    keys = family.experts
    if keys is None:
        return None, set()
    prefixes = {index: names.layer_prefix.format(layer=index) for index in range(count)}
    layers = {index for index, prefix in prefixes.items() if prefix + _name(names, "router") in stored}
    first = prefixes[min(layers, default=0)]

    def has(role: str) -> bool:
        return first + _name(names, role) in stored

    size = values.optional_integer("expert_feed_forward_length")
    values.optional_integer("interleave_moe_layer_step")  # the tensors show it
    shared = values.optional_integer("expert_shared_feed_forward_length", minimum=0) or 0
    if has("shared_down") and not shared:
        shared = size or 0
    experts = Experts(
        num=values.integer("expert_count"),
        per_token=values.integer("expert_used_count"),
        size=size or values.integer("feed_forward_length"),
        shared_size=shared,
        shared_gate=has("shared_scale"),
        activation=family.activation,
        router=_read_router(values, family, keys, bias=has("router_bias")),
        clamp=family.defaults[keys.clamp] if keys.clamp else None,
        bias=has("expert_up_bias"),
    )
    return experts, layers


def _read_router(values: ConfigValues, family: Family, keys: ExpertKeys, *, bias: bool) -> Router:
    router = replace(
        keys.router,
        normalized=values.flag("expert_weights_norm", default=keys.gguf_normalized),
        scale=values.optional_number("expert_weights_scale") or 1.0,
        bias=bias,
        margin=2 * family.defaults[keys.margin] if keys.margin else 0.0,
    )
    gating = values.optional_integer("expert_gating_func")
    if gating is not None and GATING.get(gating) != router.scores:
        raise UnsupportedModel(
            f"{values.where}: expert_gating_func = {gating} in the family {family.name} is not supported"
        )
    return router


def _name(names: NameMap, role: str) -> str:
    entry = names.layer[role]
    return entry.name if isinstance(entry, Fused) else entry
