"""A ModelSpec as GGUF metadata: the inverse of `readers.gguf_config`.

Only what the format can state is written. `refuse_difference` compares the spec that is read from the new
file with the model's own; a model whose computation GGUF cannot state is then refused, never written with
something left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from ridgeline.models.errors import UnsupportedModel
from ridgeline.models.files.gguf_writer import Value
from ridgeline.models.spec.declarations.family import Family
from ridgeline.models.spec.families import FAMILIES
from ridgeline.models.spec.ffn import Dense, Experts
from ridgeline.models.spec.mixers import Attention
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.readers.gguf_config import EPS_KEYS
from ridgeline.models.spec.readers.gguf_rope import LONG_FACTORS, ROPE_DIVISORS, SHORT_FACTORS
from ridgeline.models.spec.rope import RopeScaling, RopeSpec

Floats = np.ndarray[Any, np.dtype[np.float32]]

QUANTIZATION_VERSION = 2  # of the K-quants' layouts
# What both files must say. Names, sizes on disk and special tokens are not part of the computation.
_COMPARED = (
    *("family", "hidden_size", "vocab_size", "max_context", "layers", "norm", "embedding_scale"),
    *("residual_scale", "logit_scale", "logit_softcap", "learned_positions", "tied_embeddings", "head_bias"),
)


def describe_model(spec: ModelSpec) -> dict[str, Value]:
    """The keys `general.*` and those of the architecture."""
    family = gguf_family(spec)
    arch = family.gguf_architecture
    values = {
        **_sizes(spec, family),
        **_attention(spec, family),
        **_ffn(spec, family),
        **_scales(spec, family),
    }
    return {
        "general.architecture": arch or "",
        "general.type": "model",
        "general.name": spec.name,
        **{f"{arch}.{key}": value for key, value in values.items() if value is not None},
    }


def gguf_family(spec: ModelSpec) -> Family:
    family = FAMILIES[spec.family]
    if family.gguf_architecture is None:
        raise UnsupportedModel(f"{spec.name}: GGUF files of the family {spec.family} are not defined")
    return family


def rope_tensors(spec: ModelSpec) -> dict[str, Floats]:
    """Divisors of frequencies, which GGUF stores as tensors."""
    rope = _full(spec).rope
    if rope is None or rope.scaling is None:
        return {}
    scaling = rope.scaling
    if scaling.kind == "longrope":
        return {
            LONG_FACTORS: np.array(scaling.long_factors, np.float32),
            SHORT_FACTORS: np.array(scaling.short_factors, np.float32),
        }
    if scaling.kind == "llama3":
        return {ROPE_DIVISORS: _llama3_divisors(rope, scaling)}
    return {}


def _sizes(spec: ModelSpec, family: Family) -> dict[str, Value | None]:
    return {
        "block_count": spec.num_layers,
        "context_length": spec.learned_positions or spec.max_context,
        "embedding_length": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        # Phi-3.5-MoE's LayerNorm has it under the key of RMSNorm.
        EPS_KEYS["rms" if family.name == "phimoe" else family.norm]: spec.norm.eps,
        "use_parallel_residual": spec.layers[0].norms.parallel if family.parallel_key else None,
    }


def _attention(spec: ModelSpec, family: Family) -> dict[str, Value | None]:
    full = _full(spec)
    windowed = [mixer for mixer in spec.attentions if mixer.window is not None]
    default_scale = (
        (spec.hidden_size // full.heads) ** -0.5
        if spec.num_layers == family.gguf_wide_depth
        else full.head_dim**-0.5
    )
    return {
        "attention.head_count": full.heads,
        "attention.head_count_kv": full.kv_heads,
        "attention.key_length": full.head_dim,
        "attention.value_length": full.head_dim,
        "attention.scale": full.scale if not np.isclose(full.scale, default_scale, rtol=1e-6) else None,
        "attn_logit_softcapping": full.softcap,
        "attention.sliding_window": windowed[0].window if windowed and not windowed[0].chunked else None,
        "attention.sliding_window_pattern": _window_pattern(spec, family),
        **_rope(spec, full, windowed[0] if windowed else None, family),
    }


def _window_pattern(spec: ModelSpec, family: Family) -> int | None:
    """Where it is not the family's own: every n-th layer is full."""
    if family.window_rule != "pattern":
        return None
    first = next((index for index, mixer in enumerate(spec.attentions) if mixer.window is None), -1) + 1
    return first if first not in (0, family.window_pattern) else None


def _rope(
    spec: ModelSpec, full: Attention, local: Attention | None, family: Family
) -> dict[str, Value | None]:
    rope = next((mixer.rope for mixer in (full, *spec.attentions) if mixer.rope is not None), None)
    if rope is None:
        return {}
    values: dict[str, Value | None] = {
        "rope.dimension_count": rope.dim,
        "rope.freq_base": float(rope.theta),
    }
    if family.local_rope and local is not None and local.rope is not None:
        values["rope.freq_base_swa"] = float(local.rope.theta)
    scaling = rope.scaling
    if scaling is None or scaling.kind == "llama3":
        return values
    if scaling.kind == "longrope":
        return values | {
            "rope.scaling.original_context_length": scaling.original_context,
            "rope.scaling.attn_factor": scaling.attention_factor,
        }
    values |= {"rope.scaling.type": scaling.kind, "rope.scaling.factor": float(scaling.factor)}
    if scaling.kind == "yarn":
        values["rope.scaling.original_context_length"] = scaling.original_context
        for key, value, usual in (
            ("yarn_beta_fast", scaling.beta_fast, 32.0),
            ("yarn_beta_slow", scaling.beta_slow, 1.0),
        ):
            values[f"rope.scaling.{key}"] = value if value != usual else None
    return values


def _ffn(spec: ModelSpec, family: Family) -> dict[str, Value | None]:
    dense = next((layer.ffn for layer in spec.layers if isinstance(layer.ffn, Dense)), None)
    experts = next((layer.ffn for layer in spec.layers if isinstance(layer.ffn, Experts)), None)
    if experts is None:
        return {"feed_forward_length": dense.size if dense is not None else 0}
    keys = family.experts
    assert keys is not None
    router = experts.router
    numbers = [
        index for index, layer in enumerate(spec.layers) if layer.ffn is experts or layer.ffn == experts
    ]
    return {
        "feed_forward_length": dense.size if dense is not None else experts.size,
        "expert_count": experts.num,
        "expert_used_count": experts.per_token,
        "expert_feed_forward_length": experts.size,
        "expert_shared_feed_forward_length": experts.shared_size or None,
        "expert_weights_norm": router.normalized if router.normalized != keys.gguf_normalized else None,
        "expert_weights_scale": router.scale if router.scale != 1.0 else None,
        "interleave_moe_layer_step": numbers[0] + 1 if family.name == "llama4" else None,
    }


def _scales(spec: ModelSpec, family: Family) -> dict[str, Value | None]:
    logit_scale = 1 / spec.logit_scale if family.divides_logits else spec.logit_scale
    own_embedding_scale = spec.embedding_scale != 1.0 and not family.scaled_embeddings
    return {
        "embedding_scale": spec.embedding_scale if own_embedding_scale else None,
        "residual_scale": spec.residual_scale if spec.residual_scale != 1.0 else None,
        "logit_scale": logit_scale if logit_scale != 1.0 else None,
        "final_logit_softcapping": spec.logit_softcap,
    }


def _full(spec: ModelSpec) -> Attention:
    """The first layer without a window that is rotated; any other if there is none."""
    ranked = sorted(spec.attentions, key=lambda mixer: (mixer.window is not None, mixer.rope is None))
    return ranked[0]


def _llama3_divisors(rope: RopeSpec, scaling: RopeScaling) -> Floats:
    assert scaling.original_context
    assert scaling.low_freq_factor
    assert scaling.high_freq_factor
    frequencies = rope.theta ** (-np.arange(0, rope.dim, 2) / rope.dim)
    turns = scaling.original_context * frequencies / (2 * np.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - kept) / scaling.factor + kept)).astype(np.float32)


# ---- comparison ----


def refuse_difference(spec: ModelSpec, written: ModelSpec) -> None:
    """UnsupportedModel if the new file would compute something else, with the fields that differ."""
    differing = [
        name for name in _COMPARED if _comparable(getattr(spec, name)) != _comparable(getattr(written, name))
    ]
    if differing:
        raise UnsupportedModel(
            f"{spec.name}: a GGUF file cannot state this model's {', '.join(differing)}; it is not written"
        )
    missing = set(spec.eos_ids) - set(written.eos_ids)
    if missing:
        raise UnsupportedModel(
            f"{spec.name}: a GGUF file cannot name all of this model's end tokens; {sorted(missing)} "
            "would be missing"
        )


def _comparable(value: Any) -> Any:
    """Floats as float32, which GGUF stores; norms without the offset, which GGUF adds to the weights; without
    llama3's scaling, which GGUF stores as divisors."""
    if isinstance(value, float):
        return float(np.float32(value))
    if isinstance(value, tuple):
        return tuple(_comparable(item) for item in value)
    if isinstance(value, RopeScaling) and value.kind == "llama3":
        return None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.compare
        }
        fields.pop("offset", None)
        return {name: _comparable(item) for name, item in fields.items()}
    if isinstance(value, Mapping):
        return {key: _comparable(item) for key, item in value.items()}
    return value
