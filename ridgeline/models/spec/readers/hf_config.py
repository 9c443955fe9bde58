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
from ridgeline.models.spec.declarations.family import Bias, Family
from ridgeline.models.spec.families import BY_MODEL_TYPE
from ridgeline.models.spec.ffn import Activation, Dense, Experts, Router
from ridgeline.models.spec.layer_spec import LayerSpec, Norms
from ridgeline.models.spec.mixers import Attention, QkNorm, QueryScale
from ridgeline.models.spec.model_spec import ExtraWeights, ModelSpec, NormSpec, longest_context
from ridgeline.models.spec.moe_families import ExpertKeys, check_sparsemixer
from ridgeline.models.spec.readers.hf_features import (
    JUDGED_KEYS,
    SILENT_KEYS,
    routed_experts,
    unreadable_features,
)
from ridgeline.models.spec.readers.hf_quantization import read_kv_type, read_quantization, read_weight_format
from ridgeline.models.spec.readers.hf_rope import read_ropes, rope_notes
from ridgeline.models.spec.readers.hf_windows import read_windows, rotated_layers
from ridgeline.models.spec.rope import RopeSpec

PREDICTION_MODULES = "num_nextn_predict_layers"
MAX_LAYERS = 10_000  # a layer is an object here: a corrupt count must not exhaust memory
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
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
    values = ConfigValues(config, where, defaults=family.defaults, names=family.keys)
    spec = read_values(values, family, name, generation_config or {}, quantization, tokenizer_end)
    return _with_unread_keys(replace(spec, notes=(*notes, *spec.notes)), values)


def read_values(
    values: ConfigValues,
    family: Family,
    name: str,
    generation_config: Mapping[str, Any],
    quantization: dict[str, Any] | None = None,
    tokenizer_end: int | None = None,
) -> ModelSpec:
    """The model that these values describe as one of the family."""
    where = values.where
    hidden_size = values.integer("hidden_size")
    try:
        layers = _read_layers(values, family, hidden_size)
    except ImpossibleShape as error:
        raise BrokenModel(f"{where}: {error}") from error
    vocab_size, positions = values.integer("vocab_size"), values.integer("max_position_embeddings")
    bos_id, eos_ids, pad_id = _special_tokens(values, generation_config, vocab_size, name)
    if tokenizer_end is not None and tokenizer_end not in eos_ids and tokenizer_end < vocab_size:
        eos_ids += (tokenizer_end,)
    return ModelSpec(
        family=family.name,
        name=name,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        max_context=longest_context(_stated_context(values, family) or positions, ropes_of(layers)),
        layers=layers,
        norm=NormSpec(values.number("rms_norm_eps"), family.norm, family.norm_bias, family.norm_offset),
        embedding_scale=_embedding_scale(values, family, hidden_size),
        residual_scale=_scale(values, family, "residual_multiplier"),
        logit_scale=_scale(values, family, "logit_scale") / _scale(values, family, "logits_scaling"),
        logit_softcap=_logit_softcap(values, family),
        learned_positions=positions if family.learned_positions else 0,
        tied_embeddings=values.flag("tie_word_embeddings", default=False),
        head_bias=_bias(values, family.head_bias),
        bos_id=bos_id,
        eos_ids=eos_ids,
        pad_id=pad_id,
        weight_format=read_weight_format(values, quantization),
        quantization=read_quantization(values, quantization),
        kv_asked=read_kv_type(values, quantization),
        extra_parameters=_prediction_modules(values, family, layers[-1], hidden_size),
        notes=rope_notes(ropes_of(layers)),
    )


def _prediction_modules(
    values: ConfigValues, family: Family, layer: LayerSpec, hidden_size: int
) -> tuple[ExtraWeights, ...]:
    """Modules that guess further tokens: a layer, a product of two states and three norms each."""
    if PREDICTION_MODULES not in family.reads:
        return ()
    count = values.optional_integer(PREDICTION_MODULES, minimum=0) or 0
    each = layer.parameters(hidden_size) + 2 * hidden_size * hidden_size + 3 * hidden_size
    return (ExtraWeights("MTP", count * each, resident=False),) if count else ()


def _language_model(config: dict[str, Any], where: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The config of the language model itself, and notes about what was left out."""
    outer = ConfigValues(config, where)
    family = BY_MODEL_TYPE.get(outer.optional_text("model_type") or "")
    if family is None or not family.nested or TEXT_CONFIG not in config:
        return config, ()
    text = outer.mapping(TEXT_CONFIG) or {}
    expected = family.model_types[0]
    if text.get("model_type", expected) != expected and text.get("model_type") not in BY_MODEL_TYPE:
        raise BrokenModel(f"{where}: {TEXT_CONFIG}.model_type is {shown(text['model_type'])}, not {expected}")
    inherited = {key: config[key] for key in OUTER_KEYS if config.get(key) is not None}
    notes = (
        ("the vision tower is left out: text in, text out",) if is_set(config.get("vision_config")) else ()
    )
    architectures = {"architectures": config.get("architectures")}
    return {"model_type": expected, **text, **inherited, **architectures}, notes


def _find_family(config: dict[str, Any], where: str) -> Family:
    """The family of this config, which must not require anything the family does not have."""
    values = ConfigValues(config, where)
    model_type = values.text("model_type")
    nested = values.mapping(TEXT_CONFIG) or {}
    family = BY_MODEL_TYPE.get(model_type)
    read = frozenset() if family is None else family.reads
    features = unreadable_features(config, read)
    features += [feature for feature in unreadable_features(nested, read) if feature not in features]
    experts = routed_experts(config) or routed_experts(nested)
    if experts and (family is None or not family.experts):
        features.append(experts)
    if family is None:
        asks = f": it needs {'; '.join(features)}" if features else ""
        raise UnsupportedModel(f"{where}: the family {model_type!r} is not supported{asks}")
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
    full_rope, local_rope = (None, None) if family.learned_positions else read_ropes(values, family, head_dim)
    _refuse_other_flags(values, family)
    attention = Attention(
        heads=num_heads,
        kv_heads=_kv_heads(values, num_heads),
        head_dim=head_dim,
        rope=full_rope,
        scale=_attention_scale(values, family, head_dim),
        softcap=_softcap(values, family, "attn_logit_softcapping"),
        qkv_bias=_bias(values, family.qkv_bias),
        output_bias=_bias(values, family.output_bias),
        qk_norm=_qk_norm(values, family),
        sinks=family.sinks,
    )
    dense = Dense(
        _ffn_size(values, family, hidden_size),
        gated=family.gated,
        bias=_bias(values, family.ffn_bias),
        activation=_activation(values, family),
    )
    norms = _norms(values, family)
    windows = read_windows(values, family, count)
    rotated = rotated_layers(values, family, windows, count)
    experts, dense_layers = _read_experts(values, family, count, dense.activation)
    local = replace(attention, rope=local_rope, chunked=family.window_rule == "chunks")
    scale = _query_scale(values, family)
    layers = []
    for index, window in enumerate(windows):
        mixer = attention if window is None else replace(local, window=window)
        ffn = dense if experts is None or index in dense_layers else experts
        layers.append(LayerSpec(mixer if rotated[index] else unrotated(mixer, scale), ffn, norms))
    return tuple(layers)


def unrotated(mixer: Attention, scale: QueryScale | None) -> Attention:
    """The same attention without rotation, and so without the norm that follows it."""
    norm: QkNorm = "" if mixer.qk_norm == "unit" else mixer.qk_norm
    return replace(mixer, rope=None, qk_norm=norm, query_scale=scale)


def _query_scale(values: ConfigValues, family: Family) -> QueryScale | None:
    """Of layers without rotation. Older configs have a number in place of the flag."""
    if not family.scaled_queries or not values.has("attn_temperature_tuning"):
        return None
    return QueryScale(values.number("attn_scale"), values.number("floor_scale"))


def _stated_context(values: ConfigValues, family: Family) -> int | None:
    return values.optional_integer(family.context_key) if family.context_key else None


def _ffn_size(values: ConfigValues, family: Family, hidden_size: int) -> int:
    key = "intermediate_size" if family.experts is None else family.experts.dense_size
    if family.ffn_multiple:
        return values.optional_integer(key) or family.ffn_multiple * hidden_size
    return values.integer(key)


def _norms(values: ConfigValues, family: Family) -> Norms:
    parallel = family.norms.parallel
    if family.parallel_key:
        parallel = values.flag(family.parallel_key, default=parallel)
    return replace(family.norms, parallel=parallel, vectors=2 if family.norm_bias else 1)


def _activation(values: ConfigValues, family: Family) -> Activation:
    # Older Gemma files have the name of an unused activation in the other key.
    name = values.text(family.activation_key)
    if name not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise UnsupportedModel(f"{values.where}: activation {name!r} is not supported; supported are {known}")
    return ACTIVATIONS[name]


def _bias(values: ConfigValues, bias: Bias) -> bool:
    return values.flag(bias, default=False) if isinstance(bias, str) else bias


def _qk_norm(values: ConfigValues, family: Family) -> QkNorm:
    if family.qk_norm_key and not values.flag(family.qk_norm_key, default=False):
        return ""
    return family.qk_norm


def _refuse_other_flags(values: ConfigValues, family: Family) -> None:
    """Biases and norms that the family does not have."""
    read = {family.qkv_bias, family.output_bias, family.ffn_bias, family.qk_norm_key}
    for key in ("attention_bias", "mlp_bias", "use_bias", "bias"):
        if key not in read and values.flag(key, default=False):
            raise UnsupportedModel(f"{values.where}: {key.replace('_', ' ')} is not supported in this family")
    implied = {"qkv_bias": family.qkv_bias is True, "use_qk_norm": bool(family.qk_norm)}
    for key, value in (implied | dict(family.fixed)).items():
        if key not in read and values.flag(key, default=value) != value:
            raise UnsupportedModel(
                f"{values.where}: {key} = {shown(not value)} is not supported in this family"
            )


def _scale(values: ConfigValues, family: Family, key: str) -> float:
    """A multiplier that the family reads; `hf_features` refuses it in others."""
    return (values.optional_number(key) or 1.0) if key in family.reads else 1.0


def _embedding_scale(values: ConfigValues, family: Family, hidden_size: int) -> float:
    if family.scaled_embeddings:
        return float(hidden_size**0.5)
    return _scale(values, family, "embedding_multiplier")


def _attention_scale(values: ConfigValues, family: Family, head_dim: int) -> float:
    if "attention_multiplier" in family.reads:
        return _scale(values, family, "attention_multiplier")
    return float((values.optional_number("query_pre_attn_scalar") or head_dim) ** -0.5)


def _softcap(values: ConfigValues, family: Family, key: str) -> float | None:
    return values.optional_number(key) if key in family.reads else None


def _logit_softcap(values: ConfigValues, family: Family) -> float | None:
    key = "final_logit_softcapping"
    if key not in family.reads and values.optional_number(key) is not None:
        raise UnsupportedModel(
            f"{values.where}: logit soft-capping is not supported in the family {family.name}"
        )
    return _softcap(values, family, key)


def _special_tokens(
    values: ConfigValues, generation_config: Mapping[str, Any], vocab_size: int, name: str
) -> tuple[int | None, tuple[int, ...], int | None]:
    """(bos, eos, pad). generation_config.json has the end of a turn, config.json only that of a text."""
    generation = ConfigValues(generation_config, f"{name}: generation_config.json")
    begins = values.integers("bos_token_id") or generation.integers("bos_token_id")
    bos = begins[0] if begins else None
    stated = values.integers("eos_token_id")
    eos = generation.integers("eos_token_id") or stated
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
    shared = (values.optional_integer(keys.shared_size, minimum=0) or 0) if keys.shared_size else 0
    experts = Experts(
        num=_first_integer(values, keys.num),
        per_token=values.integer("num_experts_per_tok"),
        size=values.integer(keys.size),
        shared_size=shared,
        shared_gate=keys.shared_gate and shared > 0,
        activation=activation,
        router=_read_router(values, keys),
        clamp=values.number(keys.clamp) if keys.clamp else None,
        bias=keys.bias,
    )
    check_sparsemixer(values, experts, per_token="num_experts_per_tok", normalized=keys.normalized)
    return experts, _dense_layers(values, keys, num_layers)


def _read_router(values: ConfigValues, keys: ExpertKeys) -> Router:
    router = keys.router
    if keys.normalized:
        router = replace(router, normalized=values.flag(keys.normalized, default=False))
    return replace(router, margin=2 * values.number(keys.margin)) if keys.margin else router


def _dense_layers(values: ConfigValues, keys: ExpertKeys, num_layers: int) -> set[int]:
    every = (values.optional_integer(keys.every) or 1) if keys.every else 1
    if keys.expert_layers and values.states(keys.expert_layers):
        return set(range(num_layers)) - set(values.integers(keys.expert_layers))
    dense = set(values.integers(keys.dense_layers)) if keys.dense_layers else set()
    return {index for index in range(num_layers) if index in dense or (index + 1) % every}


def _first_integer(values: ConfigValues, keys: tuple[str, ...]) -> int:
    stated = (values.optional_integer(key) for key in keys)
    return next((value for value in stated if value is not None), 0) or values.integer(keys[0])


def _with_unread_keys(spec: ModelSpec, values: ConfigValues) -> ModelSpec:
    """List the keys without effect: the family's reference code does not read them either."""
    unread = unread_keys(values)
    if not unread:
        return spec
    return replace(spec, notes=(*spec.notes, f"config.json keys without effect: {', '.join(unread)}"))


def unread_keys(values: ConfigValues) -> list[str]:
    """The keys that the family did not read, without those that never have an effect."""
    quiet = SILENT_KEYS | JUDGED_KEYS
    return [key for key in values.unread() if key not in quiet and not key.startswith("_")]
