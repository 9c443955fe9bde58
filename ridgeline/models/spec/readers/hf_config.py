"""ModelSpec from the config.json of a Hugging Face checkpoint.

Called by `read_spec`. Required keys are typed and named in errors; features that a ModelSpec cannot describe
are rejected with a readable reason; keys without effect are listed in `notes`. Opens no files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ridgeline.models.errors import BrokenModel, ImpossibleShape, UnsupportedModel
from ridgeline.models.files.config_values import ConfigValues, is_set, shown
from ridgeline.models.spec.families import BY_MODEL_TYPE, SERVED_FAMILIES, Family
from ridgeline.models.spec.ffn import Activation, Dense, Experts
from ridgeline.models.spec.layer_spec import LayerSpec, Norms
from ridgeline.models.spec.mixers import Attention
from ridgeline.models.spec.model_spec import ModelSpec, NormSpec, longest_context
from ridgeline.models.spec.readers.hf_features import (
    JUDGED_KEYS,
    SILENT_KEYS,
    routed_experts,
    unreadable_features,
)
from ridgeline.models.spec.readers.hf_quantization import read_weight_format
from ridgeline.models.spec.readers.hf_rope import read_ropes
from ridgeline.models.spec.rope import RopeSpec

MAX_LAYERS = 10_000  # a layer is an object here: a corrupt count must not exhaust memory
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
# A multimodal config nests its language model here; these keys of the outer config still apply to it.
TEXT_CONFIG = "text_config"
OUTER_KEYS = (
    "dtype",
    "torch_dtype",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "tie_word_embeddings",
    "quantization_config",
)


def spec_from_hf(
    config: dict[str, Any],
    *,
    name: str,
    generation_config: dict[str, Any] | None = None,
    quantization: dict[str, Any] | None = None,
    tokenizer_end: int | None = None,
) -> ModelSpec:
    """The model `config` describes.

    `quantization` is the content of hf_quant_config.json, `tokenizer_end` the tokenizer's own end token.
    """
    where = f"{name}: config.json"
    config, notes = _language_model(config, where)
    family = _find_family(config, where)
    values = ConfigValues(config, where, defaults=family.defaults)
    hidden_size = values.integer("hidden_size")
    try:
        layers = _read_layers(values, family, hidden_size)
    except ImpossibleShape as error:
        raise BrokenModel(f"{where}: {error}") from error
    vocab_size = values.integer("vocab_size")
    bos_id, eos_ids, pad_id = _special_tokens(values, generation_config or {}, vocab_size, name)
    if tokenizer_end is not None and tokenizer_end not in eos_ids and tokenizer_end < vocab_size:
        eos_ids += (tokenizer_end,)
    spec = ModelSpec(
        family=family.name,
        name=name,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        max_context=longest_context(values.integer("max_position_embeddings"), ropes_of(layers)),
        layers=layers,
        norm=NormSpec(values.number("rms_norm_eps"), offset=family.norm_offset),
        embedding_scale=hidden_size**0.5 if family.scaled_embeddings else 1.0,
        logit_softcap=_logit_softcap(values, family),
        tied_embeddings=values.flag("tie_word_embeddings", default=False),
        bos_id=bos_id,
        eos_ids=eos_ids,
        pad_id=pad_id,
        weight_format=read_weight_format(values, quantization),
        notes=notes,
    )
    return _with_unread_keys(spec, values)


def _language_model(config: dict[str, Any], where: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The config of the language model itself, and notes about what was left out."""
    outer = ConfigValues(config, where)
    if outer.optional_text("model_type") != "gemma3" or TEXT_CONFIG not in config:
        return config, ()
    text = outer.mapping(TEXT_CONFIG) or {}
    if text.get("model_type", "gemma3_text") != "gemma3_text":
        raise BrokenModel(
            f"{where}: {TEXT_CONFIG}.model_type is {shown(text['model_type'])}, not gemma3_text"
        )
    inherited = {key: config[key] for key in OUTER_KEYS if config.get(key) is not None}
    notes = (
        ("the vision tower is left out: text in, text out",) if is_set(config.get("vision_config")) else ()
    )
    architectures = {"architectures": config.get("architectures")}
    return {"model_type": "gemma3_text", **text, **inherited, **architectures}, notes


def _find_family(config: dict[str, Any], where: str) -> Family:
    """The family of this config, which must not require anything the family does not have."""
    values = ConfigValues(config, where)
    model_type = values.text("model_type")
    nested = values.mapping(TEXT_CONFIG) or {}
    features = unreadable_features(config)
    features += [feature for feature in unreadable_features(nested) if feature not in features]
    family = BY_MODEL_TYPE.get(model_type)
    experts = routed_experts(config) or routed_experts(nested)
    if experts and (family is None or not family.experts):
        features.append(experts)
    if family is None:
        asks = f": it needs {'; '.join(features)}" if features else ""
        raise UnsupportedModel(
            f"{where}: the family {model_type!r} is not supported{asks}. "
            f"Supported: {', '.join(SERVED_FAMILIES)}"
        )
    if features:
        raise UnsupportedModel(f"{where}: {model_type} with {'; '.join(features)} is not supported")
    architectures = values.optional_texts("architectures")
    if architectures and not set(architectures) & set(family.architectures):
        raise UnsupportedModel(
            f"{where}: {', '.join(architectures)} is not a text generator of the family {model_type}; "
            f"expected {' or '.join(family.architectures)}"
        )
    return family


def _head_dim(values: ConfigValues, hidden_size: int, num_heads: int) -> int:
    stated = values.optional_integer("head_dim")
    if stated is not None:
        return stated
    if hidden_size % num_heads:
        raise BrokenModel(
            f"{values.where}: hidden_size {hidden_size} is not a multiple of num_attention_heads "
            f"{num_heads}, and head_dim is not given"
        )
    return hidden_size // num_heads


def _kv_heads(values: ConfigValues, num_heads: int) -> int:
    """null, and for Llama also absence, means one KV head per head, as before KV heads were shared."""
    if values.is_null("num_key_value_heads"):
        return num_heads
    return values.integer("num_key_value_heads")


def ropes_of(layers: Iterable[LayerSpec]) -> list[RopeSpec | None]:
    return [layer.mixer.rope for layer in layers if isinstance(layer.mixer, Attention)]


def _read_layers(values: ConfigValues, family: Family, hidden_size: int) -> tuple[LayerSpec, ...]:
    count = values.integer("num_hidden_layers")
    if count > MAX_LAYERS:
        raise BrokenModel(
            f"{values.where}: num_hidden_layers is {count}; no model has more than {MAX_LAYERS}"
        )
    num_heads = values.integer("num_attention_heads")
    head_dim = _head_dim(values, hidden_size, num_heads)
    full_rope, local_rope = read_ropes(values, family, head_dim)
    bias = _bias(values, "attention_bias", family.attention_bias_key)
    _expect(values, "qkv_bias", family.qkv_bias)
    _expect(values, "use_qk_norm", family.qk_norm)
    attention = Attention(
        heads=num_heads,
        kv_heads=_kv_heads(values, num_heads),
        head_dim=head_dim,
        rope=full_rope,
        scale=(values.optional_number("query_pre_attn_scalar") or head_dim) ** -0.5,
        qkv_bias=family.qkv_bias or bias,
        output_bias=bias,
        qk_norm="head" if family.qk_norm else "",
    )
    dense_size = "intermediate_size" if family.experts is None else family.experts.dense_size
    dense = Dense(
        values.integer(dense_size),
        bias=_bias(values, "mlp_bias", family.mlp_bias_key),
        activation=_activation(values, family),
    )
    experts, dense_layers = _read_experts(values, family, count, dense.activation)
    return tuple(
        LayerSpec(
            attention if window is None else replace(attention, window=window, rope=local_rope),
            dense if experts is None or index in dense_layers else experts,
            Norms(after=family.post_norms),
        )
        for index, window in enumerate(_read_windows(values, family, count))
    )


def _read_windows(values: ConfigValues, family: Family, count: int) -> list[int | None]:
    """Each layer's window, by the family's rule and, if given, the config's list of layer types."""
    size = values.optional_integer("sliding_window", minimum=0) or None
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
        raise BrokenModel(f"{values.where}: layer_types has windowed layers, but sliding_window is not set")
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
    windowed = [kind == "sliding_attention" for kind in stated]
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
    if size is None or family.window_rule == "never":
        return [False] * count
    if family.window_rule == "from_layer":
        first = values.integer("max_window_layers", minimum=0)
        return [index >= first for index in range(count)]
    if family.window_rule == "pattern":
        return [(index + 1) % pattern != 0 for index in range(count)]
    return [True] * count


def _activation(values: ConfigValues, family: Family) -> Activation:
    # Older Gemma files have the name of an unused activation in the other key.
    name = values.text(family.activation_key)
    if name not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise UnsupportedModel(f"{values.where}: activation {name!r} is not supported; supported are {known}")
    return ACTIVATIONS[name]


def _bias(values: ConfigValues, key: str, in_family: bool) -> bool:
    wanted = values.flag(key, default=False)
    if wanted and not in_family:
        raise UnsupportedModel(f"{values.where}: {key.replace('_', ' ')} is not supported in this family")
    return wanted


def _expect(values: ConfigValues, key: str, in_family: bool) -> None:
    """A key that is fixed for the family: it may be stated, but only with that value."""
    if values.flag(key, default=in_family) != in_family:
        stated = shown(not in_family)
        raise UnsupportedModel(f"{values.where}: {key} = {stated} is not supported in this family")


def _logit_softcap(values: ConfigValues, family: Family) -> float | None:
    softcap = values.optional_number("final_logit_softcapping")
    if softcap is not None and family.name != "gemma3":
        raise UnsupportedModel(
            f"{values.where}: logit soft-capping is not supported in the family {family.name}"
        )
    return softcap


def _special_tokens(
    values: ConfigValues, generation_config: Mapping[str, Any], vocab_size: int, name: str
) -> tuple[int | None, tuple[int, ...], int | None]:
    """(bos, eos, pad). generation_config.json has the end of a turn, config.json only that of a text."""
    generation = ConfigValues(generation_config, f"{name}: generation_config.json")
    begins = values.integers("bos_token_id") or generation.integers("bos_token_id")
    bos = begins[0] if begins else None
    eos = generation.integers("eos_token_id") or values.integers("eos_token_id")
    for key, token in [("bos_token_id", bos), *(("eos_token_id", token) for token in eos)]:
        if token is not None and not 0 <= token < vocab_size:
            raise BrokenModel(f"{values.where}: {key} {token} is outside the vocabulary of {vocab_size}")
    pads = values.integers("pad_token_id") or generation.integers("pad_token_id")
    pad = pads[0] if pads and 0 <= pads[0] < vocab_size else None  # -1 commonly means none
    return bos, tuple(dict.fromkeys(eos)), pad


def _read_experts(
    values: ConfigValues, family: Family, num_layers: int, activation: Activation
) -> tuple[Experts | None, set[int]]:
    """The routed experts, and the layers that have a dense FFN instead."""
    keys = family.experts
    if keys is None:
        return None, set()
    router = keys.router
    if keys.normalized:
        router = replace(router, normalized=values.flag(keys.normalized, default=False))
    if keys.jitter:
        router = replace(router, jitter=values.number(keys.jitter))
    shared = (values.optional_integer(keys.shared_size, minimum=0) or 0) if keys.shared_size else 0
    experts = Experts(
        num=_first_integer(values, keys.num),
        per_token=values.integer("num_experts_per_tok"),
        size=values.integer(keys.size),
        shared_size=shared,
        shared_gate=keys.shared_gate and shared > 0,
        activation=activation,
        router=router,
        bias=keys.bias,
        clamp=values.number(keys.clamp) if keys.clamp else None,
    )
    every = (values.optional_integer(keys.every) or 1) if keys.every else 1
    dense = set(values.integers(keys.dense_layers)) if keys.dense_layers else set()
    return experts, {index for index in range(num_layers) if index in dense or (index + 1) % every}


def _first_integer(values: ConfigValues, keys: tuple[str, ...]) -> int:
    stated = (values.optional_integer(key) for key in keys)
    return next((value for value in stated if value is not None), 0) or values.integer(keys[0])


def _with_unread_keys(spec: ModelSpec, values: ConfigValues) -> ModelSpec:
    """List the keys without effect: the family's reference code does not read them either."""
    quiet = SILENT_KEYS | JUDGED_KEYS
    unread = [key for key in values.unread() if key not in quiet and not key.startswith("_")]
    if not unread:
        return spec
    return replace(spec, notes=(*spec.notes, f"config.json keys without effect: {', '.join(unread)}"))
