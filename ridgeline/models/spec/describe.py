"""A ModelSpec as labelled lines, for `ridgeline models inspect`. Pure data: no colours, no layout."""

from __future__ import annotations

from collections import Counter

from ridgeline.models.errors import UnsupportedModel
from ridgeline.models.spec.cache_layout import CacheLayout
from ridgeline.models.spec.families import check_servable
from ridgeline.models.spec.ffn import Experts, Ffn
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.rope import RopeSpec

PROMPT_TOKENS = 512  # the prompt whose mean prefill cost is shown
FEW_TOKENS = 1024  # the context whose decode cost is shown
QK_NORMS = {
    "": "no",
    "head": "yes",
    "heads": "with separate weights for each head",
    "projection": "over the whole projection",
    "unit": "after the rotation, without weights",
}


def describe(spec: ModelSpec) -> list[tuple[str, str]]:
    """(label, value) in reading order: identity, shape, costs, notes."""
    return [*_identity(spec), *_shape(spec), *_costs(spec), *(("note", note) for note in spec.notes)]


def _identity(spec: ModelSpec) -> list[tuple[str, str]]:
    lines = [("name", spec.name), ("family", spec.family), ("parameters", count_text(spec.parameters))]
    if spec.is_mixture:
        lines.append(("active per token", count_text(spec.active_parameters)))
    lines.append(("stored as", _stored(spec)))
    for label, precision in (("at bf16", "bfloat16"), ("at 8 bits", "int8"), ("at 4 bits", "int4")):
        lines.append((f"weights {label}", bytes_text(spec.weight_bytes(precision))))
    lines.append(("served", _servable(spec)))
    return lines


def _shape(spec: ModelSpec) -> list[tuple[str, str]]:
    attention = spec.attentions[0]
    heads = f"{spec.num_heads} query, {spec.num_kv_heads} KV, of {spec.head_dim}"
    tied = "tied to the embeddings" if spec.tied_embeddings else "separate"
    biases = [
        words
        for words, there in (
            ("q, k, v", attention.qkv_bias),
            ("output", attention.output_bias),
            ("FFN", any(layer.ffn is not None and layer.ffn.bias for layer in spec.layers)),
        )
        if there
    ]
    return [
        ("layers", f"{spec.num_layers}"),
        ("hidden", f"{spec.hidden_size:,}"),
        ("heads", heads),
        ("FFN", "; ".join(dict.fromkeys(_ffn(layer.ffn) for layer in spec.layers))),
        ("QK-norm", QK_NORMS[attention.qk_norm]),
        ("biases", ", ".join(biases) or "none"),
        ("attention", _attention(spec)),
        ("rope", "; ".join(dict.fromkeys(_rope(mixer.rope) for mixer in spec.attentions))),
        ("context", f"{spec.max_context:,} tokens"),
        ("vocabulary", f"{spec.vocab_size:,}, LM head {tied}"),
        ("special tokens", _special_tokens(spec)),
    ]


def _costs(spec: ModelSpec) -> list[tuple[str, str]]:
    full, few = spec.max_context, min(spec.max_context, FEW_TOKENS)
    prompt = min(full, PROMPT_TOKENS)
    per_token = CacheLayout.of(spec).token_bytes
    return [
        ("KV per token", f"{bytes_text(per_token)} at 16 bits"),
        ("KV at full context", f"{bytes_text(full * per_token)} at 16 bits"),
        (
            "prefill per token",
            f"{flops_text(spec.prefill_flops_per_token(prompt))}, mean of a {prompt}-token prompt",
        ),
        (
            "decode per token",
            f"{flops_text(spec.decode_flops(few))} at {few:,} tokens of context, "
            f"{flops_text(spec.decode_flops(full))} at {full:,}",
        ),
    ]


def _stored(spec: ModelSpec) -> str:
    formats = spec.quantization.formats() if spec.quantization is not None else ()
    kinds = f": {' and '.join(map(str, formats))}" if formats else ""
    size = "" if spec.stored_bytes is None else f", {bytes_text(spec.stored_bytes)}"
    return spec.weight_format + kinds + size


def _servable(spec: ModelSpec) -> str:
    try:
        check_servable(spec)
    except UnsupportedModel as reason:
        return f"no: {str(reason).removeprefix(f'{spec.name}: ')}"
    return "yes"


def _attention(spec: ModelSpec) -> str:
    layers = Counter(mixer.window for mixer in spec.attentions)
    if len(layers) == 1:
        return _window(spec.attentions[0].window)
    return ", ".join(f"{count} layers {_window(window)}" for window, count in layers.items())


def _window(window: int | None) -> str:
    return "full" if window is None else f"window of {window:,} tokens"


def _ffn(ffn: Ffn | None) -> str:
    if ffn is None:
        return "none"
    if isinstance(ffn, Experts):
        return f"{ffn.per_token} of {ffn.num} experts of {ffn.size:,} ({ffn.activation})"
    return f"{ffn.size:,} ({ffn.activation})"


def _rope(rope: RopeSpec | None) -> str:
    if rope is None:
        return "none"
    text = f"theta {rope.theta:,.0f}"
    if rope.scaling is None:
        return text
    since = f" from {rope.scaling.original_context:,}" if rope.scaling.original_context else ""
    return f"{text}, {rope.scaling.kind} × {rope.scaling.factor:g}{since}"


def _special_tokens(spec: ModelSpec) -> str:
    ends = ", ".join(str(token) for token in spec.eos_ids) or "none"
    begin = "none" if spec.bos_id is None else str(spec.bos_id)
    pad = "none" if spec.pad_id is None else str(spec.pad_id)
    return f"begin {begin}, end {ends}, pad {pad}"


def count_text(number: int) -> str:
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if number >= size:
            return f"{number:,} ({number / size:.3g} {unit})"
    return f"{number:,}"


def bytes_text(number: float) -> str:
    for size, unit in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number:.0f} B"


def flops_text(number: float) -> str:
    for size, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if number >= size:
            return f"{number / size:.2f} {unit}FLOP"
    return f"{number:.0f} FLOP"
