"""An EncoderSpec as labelled lines and as figures, for `ridgeline models inspect`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ridgeline.models.spec.describe import bytes_text, count_text, flops_text
from ridgeline.models.spec.encoder_spec import EncoderSpec

SHORT_TOKENS = 32  # a sentence


def describe_encoder(spec: EncoderSpec) -> list[tuple[str, str]]:
    """(label, value) in reading order, like `describe` for decoders."""
    stored = "" if spec.stored_bytes is None else f", {bytes_text(spec.stored_bytes)}"
    short, long = min(SHORT_TOKENS, spec.max_tokens), spec.max_tokens
    return [
        ("name", spec.name),
        ("family", f"{spec.family}, an encoder"),
        ("parameters", count_text(spec.parameters)),
        ("stored as", f"{spec.weight_format}{stored}"),
        ("weights in memory", f"{bytes_text(spec.weight_bytes('float32'))} (float32)"),
        ("served", _served(spec)),
        ("layers", f"{spec.num_layers}"),
        ("hidden", f"{spec.hidden_size:,}"),
        ("heads", f"{spec.num_heads} of {spec.head_dim}"),
        ("FFN", f"{spec.ffn_size:,} ({spec.activation})"),
        (
            "longest text",
            f"{spec.max_tokens:,} tokens, of {spec.max_positions - spec.first_position:,} positions",
        ),
        ("vocabulary", f"{spec.vocab_size:,}"),
        (
            "a text",
            f"{flops_text(spec.flops(short))} for {short} tokens, {flops_text(spec.flops(long))} for {long}",
        ),
        *(("note", note) for note in spec.notes),
    ]


def encoder_figures(spec: EncoderSpec) -> dict[str, Any]:
    """The numbers behind the lines, exact and unrounded."""
    return {
        "task": "embed",
        "parameters": spec.parameters,
        "stored_bytes": spec.stored_bytes,
        "weight_bytes": {name: spec.weight_bytes(name) for name in ("float32", "bfloat16")},
        "flops": {str(tokens): spec.flops(tokens) for tokens in (1, spec.max_tokens)},
        "spec": asdict(spec),
    }


def _served(spec: EncoderSpec) -> str:
    if spec.output == "score":
        return "yes, scores of pairs: /v1/rerank, /v1/score"
    normalized = ", normalized" if spec.normalize else ""
    return f"yes, vectors of {spec.hidden_size} ({spec.pooling} of the tokens{normalized}): /v1/embeddings"
