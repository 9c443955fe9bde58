"""ModelSpec from the metadata of a GGUF file, checked against the file's tensors.

Called by `read_spec`. Keys below `<architecture>.` define the computation, so an unknown one is rejected, and
the described parameters must match the tensors. Reads the tensor table, not the weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace

import numpy as np

from ridgeline.models.errors import BrokenModel, ImpossibleShape, UnsupportedModel
from ridgeline.models.files.config_values import ConfigValues, shown
from ridgeline.models.files.gguf import GgufFile
from ridgeline.models.files.gguf_factors import factor_names
from ridgeline.models.spec.declarations.family import Family, gguf_names_of
from ridgeline.models.spec.declarations.llama import LLAMA, MISTRAL
from ridgeline.models.spec.declarations.moe import MIXTRAL
from ridgeline.models.spec.families import BY_GGUF_ARCHITECTURE
from ridgeline.models.spec.ffn import Dense, Experts, Router
from ridgeline.models.spec.layer_spec import LayerSpec
from ridgeline.models.spec.mixers import Attention, QkNorm, QueryScale
from ridgeline.models.spec.model_spec import ModelSpec, NormSpec, longest_context
from ridgeline.models.spec.moe_families import ExpertKeys, check_sparsemixer
from ridgeline.models.spec.names import Fused, NameMap
from ridgeline.models.spec.readers.end_tokens import gguf_end_ids
from ridgeline.models.spec.readers.gguf_rope import ROPE_TENSORS, read_gguf_ropes
from ridgeline.models.spec.readers.hf_config import MAX_LAYERS, ropes_of, unrotated
from ridgeline.models.spec.readers.hf_rope import rope_notes

# Keys that repeat what the tensors say, or that do not affect the computation.
SILENT_KEYS = {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned"}
EPS_KEYS = {"rms": "attention.layer_norm_rms_epsilon", "layer": "attention.layer_norm_epsilon"}

# expert_gating_func → the scores of a router. A softmax over the chosen experts is the softmax over all,
# normalized.
GATING = {1: "softmax", 2: "sigmoid", 3: "softmax"}
SOFTMAX_OF_CHOSEN = 3


def spec_from_gguf(gguf: GgufFile) -> ModelSpec:
    """The model in this file. Its name is the file's, without the suffix."""
    _refuse_partial(gguf)
    values = _architecture_values(gguf)
    family = _find_family(gguf, values)
    hidden_size = values.integer("embedding_length")
    try:
        layers, notes = _read_layers(gguf, values, family, hidden_size)
    except ImpossibleShape as error:
        raise BrokenModel(f"{gguf.path}: {error}") from error
    vocab_size, positions = _vocab_size(gguf, hidden_size), values.integer("context_length")

    def scale(key: str) -> float:
        return values.optional_number(key) or 1.0

    logit_scale = scale("logit_scale")
    bos_id, eos_ids, pad_id = _special_tokens(gguf, vocab_size)
    spec = ModelSpec(
        family=family.name,
        name=gguf.path.stem,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        max_context=longest_context(positions, ropes_of(layers)),
        layers=layers,
        norm=NormSpec(_eps(values, family), family.norm, family.norm_bias),
        embedding_scale=hidden_size**0.5 if family.scaled_embeddings else scale("embedding_scale"),
        residual_scale=scale("residual_scale"),
        logit_scale=1 / logit_scale if family.divides_logits else logit_scale,
        logit_softcap=values.optional_number("final_logit_softcapping"),
        learned_positions=positions if family.learned_positions else 0,
        tied_embeddings="output.weight" not in gguf.tensors,
        head_bias="output.bias" in gguf.tensors,
        bos_id=bos_id,
        eos_ids=eos_ids,
        pad_id=pad_id,
        weight_format=f"gguf:{_dominant_type(gguf)}",
        stored_bytes=sum(tensor.nbytes for tensor in gguf.tensors.values()),
        notes=(*notes, *rope_notes(ropes_of(layers))),
    )
    _refuse_unread(values)
    _check_tensors(gguf, family, spec)
    return spec


def _refuse_partial(gguf: GgufFile) -> None:
    values = ConfigValues(gguf.metadata, str(gguf.path))
    kind, parts = values.optional_text("general.type"), values.optional_integer("split.count", minimum=0)
    if kind not in (None, "model"):
        raise UnsupportedModel(f"{gguf.path}: contains {shown(kind)}, not a complete model (general.type)")
    if parts not in (None, 1):
        raise UnsupportedModel(f"{gguf.path}: is one of {parts} parts; join them with gguf-split --merge")


def _architecture_values(gguf: GgufFile) -> ConfigValues:
    """Keys without the architecture's prefix. Floats are rounded to single precision: 1e-05."""
    values = {
        key: float(str(np.float32(value))) if isinstance(value, float) else value
        for key, value in gguf.metadata.items()
    }
    return ConfigValues.below(f"{gguf.architecture}.", values, str(gguf.path))


def _find_family(gguf: GgufFile, values: ConfigValues) -> Family:
    family = BY_GGUF_ARCHITECTURE.get(gguf.architecture)
    if family is None:
        raise UnsupportedModel(f"{gguf.path}: GGUF architecture {gguf.architecture!r} is not supported")
    experts = values.optional_integer("expert_count", minimum=0)
    values.optional_integer("expert_used_count", minimum=0)
    if experts and family is LLAMA:
        return MIXTRAL
    if bool(experts) != (family.experts is not None):
        raise UnsupportedModel(
            f"{gguf.path}: {experts or 'no'} experts in the GGUF architecture {gguf.architecture!r} "
            "are not supported"
        )
    window = values.optional_integer("attention.sliding_window", minimum=0)
    return MISTRAL if window and family is LLAMA else family


def _head_dim(values: ConfigValues, hidden_size: int, num_heads: int) -> int:
    key, value = (
        values.optional_integer("attention.key_length"),
        values.optional_integer("attention.value_length"),
    )
    if key is not None and value is not None and key != value:
        raise UnsupportedModel(
            f"{values.where}: value heads of another size than keys ({value} and {key}) are not supported"
        )
    if key is None and hidden_size % num_heads:
        raise BrokenModel(
            f"{values.where}: embedding_length {hidden_size} is not a multiple of attention.head_count "
            f"{num_heads}, and attention.key_length is not given"
        )
    return key or hidden_size // num_heads


def _read_layers(
    gguf: GgufFile, values: ConfigValues, family: Family, hidden_size: int
) -> tuple[tuple[LayerSpec, ...], tuple[str, ...]]:
    """The layers, and notes about them."""
    num_heads = values.integer("attention.head_count")
    head_dim = _head_dim(values, hidden_size, num_heads)
    count = values.integer("block_count")
    if count > MAX_LAYERS:
        raise BrokenModel(f"{values.where}: block_count is {count}, more than any known model has")
    full_rope, local_rope, notes = read_gguf_ropes(gguf, values, family, head_dim)
    names, there = gguf_names_of(family, gguf.tensors), gguf.tensors

    def has(role: str) -> bool:
        entry = names.layer[role]
        return "blk.0." + (entry if isinstance(entry, str) else entry.name) in there

    full = Attention(
        heads=num_heads,
        kv_heads=values.optional_integer("attention.head_count_kv") or num_heads,
        head_dim=head_dim,
        rope=full_rope,
        scale=_attention_scale(values, family, hidden_size, num_heads, head_dim, count),
        softcap=values.optional_number("attn_logit_softcapping"),
        qkv_bias=has("q_bias"),
        output_bias=has("o_bias"),
        qk_norm=_qk_norm(values, family, stored=has("q_norm")),
        sinks=has("sinks"),
    )
    dense = Dense(
        values.integer("feed_forward_length"),
        gated=family.gated,
        bias=has("up_bias"),
        activation=family.activation,
    )
    parallel = values.flag("use_parallel_residual", default=family.norms.parallel)
    norms = replace(
        family.norms, after=has("post_ffn_norm"), parallel=parallel, vectors=2 if family.norm_bias else 1
    )
    windows = _windows(values, family, count)
    experts, expert_layers = _read_experts(values, family, names, there, count)
    local = replace(full, rope=local_rope, chunked=family.window_rule == "chunks")
    layers = []
    for index, window in enumerate(windows):
        mixer = full if window is None else replace(local, window=window)
        rotated = window is not None if family.rope_in_windows_only else _is_rotated(family, index)
        ffn = experts if experts is not None and index in expert_layers else dense
        layers.append(LayerSpec(mixer if rotated else unrotated(mixer, _query_scale(family)), ffn, norms))
    return tuple(layers), notes


def _read_experts(
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
    check_sparsemixer(
        values,
        experts,
        per_token="expert_used_count",
        normalized="expert_weights_norm",
        scale="expert_weights_scale",
    )
    return experts, layers


def _read_router(values: ConfigValues, family: Family, keys: ExpertKeys, *, bias: bool) -> Router:
    gating = values.optional_integer("expert_gating_func")
    of_chosen = gating == SOFTMAX_OF_CHOSEN
    router = replace(
        keys.router,
        normalized=values.flag("expert_weights_norm", default=of_chosen or keys.gguf_normalized),
        scale=values.optional_number("expert_weights_scale") or 1.0,
        bias=bias,
        margin=2 * family.defaults[keys.margin] if keys.margin else 0.0,
    )
    gating_key, norm_key = values.shown("expert_gating_func"), values.shown("expert_weights_norm")
    if gating is not None and GATING.get(gating) != router.scores:
        raise UnsupportedModel(
            f"{values.where}: {gating_key} = {gating} in the family {family.name} is not supported"
        )
    if of_chosen and not router.normalized:
        raise UnsupportedModel(f"{values.where}: {norm_key} = false with {gating_key} = 3 is not supported")
    return router


def _name(names: NameMap, role: str) -> str:
    entry = names.layer[role]
    return entry.name if isinstance(entry, Fused) else entry


def _qk_norm(values: ConfigValues, family: Family, *, stored: bool) -> QkNorm:
    """GGUF files do not state Llama 4's norm without weights: all but Maverick, with 128 experts, have it."""
    if family.qk_norm == "unit":
        return "" if values.integer("expert_count") == 128 else "unit"
    return (family.qk_norm or "head") if stored else ""


def _query_scale(family: Family) -> QueryScale | None:
    if not family.scaled_queries:
        return None
    return QueryScale(family.defaults["attn_scale"], family.defaults["floor_scale"])


def _is_rotated(family: Family, index: int) -> bool:
    return not family.no_rope_interval or (index + 1) % family.no_rope_interval != 0


def _windows(values: ConfigValues, family: Family, count: int) -> list[int | None]:
    key = "attention.sliding_window"
    stated = values.optional_integer(key, minimum=0)
    size = stated or None
    if family.window_rule == "chunks":
        chunk: int = family.defaults["attention_chunk_size"]
        if stated not in (None, chunk):
            raise UnsupportedModel(
                f"{values.where}: {values.shown(key)} = {stated} is not supported; {family.name} computes "
                f"chunks of {chunk} tokens"
            )
        return [chunk if _is_rotated(family, index) else None for index in range(count)]
    if family.window_rule == "pattern" and size is None:
        raise BrokenModel(f"{values.where}: {family.name} needs attention.sliding_window, which is missing")
    if family.window_rule in ("from_layer", "never") and size is not None:
        raise UnsupportedModel(
            f"{values.where}: a sliding window ({size} tokens) in a GGUF of {family.name} is not supported"
        )
    pattern = 0
    if family.window_rule == "pattern":
        pattern = values.optional_integer("attention.sliding_window_pattern") or family.window_pattern
    return [None if pattern and (index + 1) % pattern == 0 else size for index in range(count)]


def _eps(values: ConfigValues, family: Family) -> float:
    """Phi-3.5-MoE's LayerNorm has it under the key of RMSNorm."""
    return values.optional_number(EPS_KEYS[family.norm]) or values.number(EPS_KEYS["rms"])


def _vocab_size(gguf: GgufFile, hidden_size: int) -> int:
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None:
        raise BrokenModel(f"{gguf.path}: has no tensor token_embd.weight")
    if len(embedding.shape) != 2 or embedding.shape[1] != hidden_size:
        raise BrokenModel(
            f"{gguf.path}: token_embd.weight has shape {embedding.shape}, not (vocabulary, {hidden_size})"
        )
    return embedding.shape[0]


def _attention_scale(
    values: ConfigValues, family: Family, hidden_size: int, num_heads: int, head_dim: int, num_layers: int
) -> float:
    stated = values.optional_number("attention.scale")
    if stated is not None:
        return stated
    if num_layers == family.gguf_wide_depth:
        return float((hidden_size // num_heads) ** -0.5)
    return float(head_dim**-0.5)


def _special_tokens(gguf: GgufFile, vocab_size: int) -> tuple[int | None, tuple[int, ...], int | None]:
    """(bos, eos, pad). The end tokens of a text, of a turn and of a message all end a generation."""
    values = ConfigValues.below("tokenizer.ggml.", gguf.metadata, str(gguf.path))
    eos_ids = gguf_end_ids(values)
    bos_id = values.optional_integer("bos_token_id", minimum=0)
    for token in (*eos_ids, *(() if bos_id is None else (bos_id,))):
        if token >= vocab_size:
            raise BrokenModel(f"{gguf.path}: special token {token} is outside the vocabulary of {vocab_size}")
    pad_id = values.optional_integer("padding_token_id", minimum=0)
    return bos_id, eos_ids, pad_id if pad_id is not None and pad_id < vocab_size else None


def _dominant_type(gguf: GgufFile) -> str:
    """The type of most weights; embeddings and norms usually have another."""
    elements: Counter[str] = Counter()
    for tensor in gguf.tensors.values():
        elements[tensor.type] += tensor.num_elements
    return elements.most_common(1)[0][0]


def _refuse_unread(values: ConfigValues) -> None:
    unread = [key for key in values.unread() if key not in SILENT_KEYS]
    if unread:
        keys = ", ".join(f"{values.prefix}{key}" for key in unread)
        raise UnsupportedModel(f"{values.where}: the metadata keys {keys} are not supported")


def _check_tensors(gguf: GgufFile, family: Family, spec: ModelSpec) -> None:
    """The tensors must match the family, and their element count must match the metadata."""
    attention = spec.attentions[0]
    expected: list[tuple[str, bool, bool]] = [
        ("norms after attention and FFN", spec.layers[0].norms.after, family.norms.after),
    ]
    if not family.qk_norm_key:
        expected.append(("QK-norm", bool(attention.qk_norm), bool(family.qk_norm)))
    if isinstance(family.qkv_bias, bool):
        expected.append(("biases on q, k and v", attention.qkv_bias, family.qkv_bias))
    for words, found, wanted in expected:
        if found != wanted:
            raise BrokenModel(f"{gguf.path}: {family.name} {'lacks' if wanted else 'has unexpected'} {words}")
    others = {*ROPE_TENSORS, *factor_names(gguf.tensors)}
    held = sum(tensor.num_elements for name, tensor in gguf.tensors.items() if name not in others)
    if held != spec.parameters:
        raise BrokenModel(
            f"{gguf.path}: its tensors have {held:,} parameters, its metadata describes {spec.parameters:,}: "
            "tensors are missing, have another shape, or are unknown to this version"
        )
