"""What each backend computes beyond the plain decoder layer, as tags. Refusals get their reasons from here.

A plain layer is RMSNorm, attention with rotated heads, RMSNorm, gated FFN with SiLU or tanh-GELU. `kinds_of`
names what a model has besides; a backend that computes a kind has its tag in COMPUTED. Imports no backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from ridgeline.models.spec.ffn import Dense
from ridgeline.models.spec.layer_spec import LayerSpec
from ridgeline.models.spec.mixers import Attention
from ridgeline.models.spec.model_spec import ModelSpec

Backend = Literal["torch", "cuda", "native"]

# tag → its words in a refusal
KINDS = {
    "no_attention": "layers without softmax attention",
    "experts": "mixture of experts",
    "sparsemixer": "routing by sparsemixer",
    "wide_heads": "values of another width than keys, gated outputs or sparse attention",
    "layer_norm": "LayerNorm",
    "no_pre_norm": "layers without a norm before attention and FFN",
    "parallel": "attention and FFN side by side",
    "projection_norm": "QK-norm over the whole projection",
    "head_norms": "QK-norm with separate weights for each head",
    "unit_norm": "QK-norm after the rotation",
    "query_scale": "queries scaled by their position",
    "sinks": "attention sinks",
    "chunked": "attention within chunks",
    "no_rope": "layers without rotary positions",
    "partial_rope": "partly rotated heads",
    "ungated": "an FFN without a gate",
    "other_activation": "an activation other than SiLU and tanh-GELU",
    "residual_scale": "scaled residuals",
    "logit_scale": "scaled logits",
    "learned_positions": "learned positions",
    "head_bias": "a bias on the LM head",
    "mixed_heads": "head shapes that differ between layers",
}
COMPUTED: dict[Backend, frozenset[str]] = {
    "torch": frozenset(KINDS) - {"no_attention", "wide_heads", "mixed_heads"},
    "cuda": frozenset(
        {
            *("experts", "layer_norm", "no_pre_norm", "parallel", "projection_norm", "head_norms", "sinks"),
            *("chunked", "no_rope", "partial_rope", "ungated", "other_activation", "residual_scale"),
            *("logit_scale", "learned_positions", "head_bias", "sparsemixer", "unit_norm", "query_scale"),
        }
    ),
    "native": frozenset(
        {
            *("experts", "layer_norm", "no_pre_norm", "parallel", "projection_norm", "head_norms", "sinks"),
            *("chunked", "no_rope", "partial_rope", "ungated", "other_activation", "residual_scale"),
            *("logit_scale", "learned_positions", "head_bias", "sparsemixer", "unit_norm", "query_scale"),
        }
    ),
}

# The formats that each backend multiplies by: the values of --weights.
WEIGHT_FORMATS: dict[Backend, tuple[str, ...]] = {
    "native": ("float32", "bfloat16", "int8", "int8-channel", "int4"),
    "torch": ("float32", "bfloat16", "float16"),
    "cuda": ("float32", "bfloat16", "float16", "fp8", "int8", "int4"),
}
# Those that the planner proposes: on a GPU, the ones whose speed has been measured.
PLANNED_FORMATS: dict[Backend, tuple[str, ...]] = {
    **WEIGHT_FORMATS,
    "cuda": ("float32", "bfloat16", "float16"),
}


def refusal(spec: ModelSpec, backend: Backend) -> str | None:
    """Why the backend cannot compute this model; None if it can."""
    missing = [words for tag, words in KINDS.items() if tag in kinds_of(spec) - COMPUTED[backend]]
    return f"the {backend} backend does not compute {'; '.join(missing)}" if missing else None


def others_for(spec: ModelSpec, backend: Backend) -> str:
    """The flags of the other backends that compute this model, for a refusal; empty if there is none."""
    flags = [f"--backend {other}" for other in COMPUTED if other != backend and refusal(spec, other) is None]
    return f"; {' and '.join(flags)} {'compute' if len(flags) > 1 else 'computes'} it" if flags else ""


def kinds_of(spec: ModelSpec) -> set[str]:
    """The tags of everything beyond a plain layer."""
    tags = {tag for layer in set(spec.layers) for tag in _of_layer(layer)}
    shapes = {
        (m.heads, m.kv_heads, m.head_dim)
        for m in (layer.mixer for layer in spec.layers)
        if isinstance(m, Attention)
    }
    for tag, there in (
        ("mixed_heads", len(shapes) > 1),
        ("layer_norm", spec.norm.kind == "layer"),
        ("residual_scale", spec.residual_scale != 1.0),
        ("logit_scale", spec.logit_scale != 1.0),
        ("learned_positions", spec.learned_positions > 0),
        ("head_bias", spec.head_bias),
    ):
        if there:
            tags.add(tag)
    return tags


def _of_layer(layer: LayerSpec) -> Iterator[str]:
    mixer, ffn, norms = layer.mixer, layer.ffn, layer.norms
    if not isinstance(mixer, Attention) or ffn is None:
        yield "no_attention"
        return
    gated = mixer.output_gate or mixer.head_gate or mixer.keys_are_values
    found = {
        "wide_heads": mixer.value_width != mixer.head_dim or gated or mixer.index is not None,
        "no_pre_norm": not norms.before,
        "parallel": norms.parallel,
        "projection_norm": mixer.qk_norm == "projection",
        "head_norms": mixer.qk_norm == "heads",
        "unit_norm": mixer.qk_norm == "unit",
        "query_scale": mixer.query_scale is not None,
        "sinks": mixer.sinks,
        "chunked": mixer.chunked,
        "no_rope": mixer.rope is None,
        "partial_rope": mixer.rope is not None and mixer.rope.dim < mixer.head_dim,
        "ungated": not ffn.gated,
        "other_activation": ffn.activation not in ("silu", "gelu_tanh"),
        "experts": not isinstance(ffn, Dense),
        "sparsemixer": not isinstance(ffn, Dense) and ffn.router.scores == "sparsemixer",
    }
    yield from (tag for tag, there in found.items() if there)
