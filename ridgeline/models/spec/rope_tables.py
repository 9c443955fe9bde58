"""Cosine and sine tables of a model's rotary embeddings, from its RopeSpecs.

Both decoders, torch and native, use these tables. The arithmetic is in `ops.rope`; this module selects what
a checkpoint needs.
"""

from __future__ import annotations

from ridgeline.models.errors import BrokenModel, UnsupportedModel
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.rope import RopeSpec
from ridgeline.ops import rope as rotary
from ridgeline.ops.rope import Floats


def rope_tables(
    spec: ModelSpec, max_context: int, divisors: Floats | None = None
) -> dict[RopeSpec, tuple[Floats, Floats]]:
    """(cos, sin), each [max_context, rope dim / 2] float32, for every rope the model's layers have.

    divisors: [rope dim / 2], a GGUF file's own form of a scaling its metadata does not name.
    """
    return {
        rope: _tables(rope, max_context, divisors)
        for rope in {mixer.rope for mixer in spec.attentions}
        if rope is not None
    }


def _tables(rope: RopeSpec, max_context: int, divisors: Floats | None) -> tuple[Floats, Floats]:
    frequencies = rotary.rope_frequencies(rope.theta, rope.dim)
    attention_factor = 1.0
    scaling = rope.scaling
    if scaling is None:
        if divisors is not None:
            frequencies = frequencies / divisors
    elif scaling.kind == "linear":
        frequencies = rotary.scale_linear(frequencies, scaling.factor)
    elif scaling.kind == "llama3":
        frequencies = rotary.scale_llama3(
            frequencies,
            scaling.factor,
            _stated(scaling.original_context, "original context"),
            _stated(scaling.low_freq_factor, "low_freq_factor"),
            _stated(scaling.high_freq_factor, "high_freq_factor"),
        )
    elif scaling.kind == "yarn":
        original_context = _stated(scaling.original_context, "original context")
        frequencies = rotary.scale_yarn(
            rope.theta,
            rope.dim,
            scaling.factor,
            original_context,
            scaling.beta_fast,
            scaling.beta_slow,
            truncate=scaling.truncate,
        )
        default = rotary.yarn_attention_factor(scaling.factor)
        attention_factor = default if scaling.attention_factor is None else scaling.attention_factor
    elif scaling.kind == "longrope":
        # One set for all sequences: a sequence that grows past the trained context would need other keys in
        # its cache.
        long = max_context > _stated(scaling.original_context, "original context")
        factors = scaling.long_factors if long else scaling.short_factors
        frequencies = rotary.scale_longrope(rope.theta, rope.dim, factors)
        attention_factor = _stated(scaling.attention_factor, "attention_factor")
        if not long and scaling.short_attention_factor is not None:
            attention_factor = scaling.short_attention_factor
    elif max_context > _stated(scaling.original_context, "original context"):
        # Dynamic scaling changes every cached key when a sequence grows past the trained context; up to
        # there it has no effect.
        raise UnsupportedModel(
            f"dynamic rope scaling works up to the trained context of {scaling.original_context} tokens, "
            f"not up to {max_context}; lower max_context"
        )
    return rotary.rope_tables(frequencies, max_context, attention_factor)


def _stated(value: float | None, name: str) -> float:
    if value is None:
        raise BrokenModel(f"the configuration scales rope but does not state {name}")
    return value
