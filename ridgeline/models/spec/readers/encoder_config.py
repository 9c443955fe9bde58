"""EncoderSpec from a Hugging Face directory: config.json and the files of sentence-transformers next to it.

Called by the engine's start and `models inspect`, after `is_encoder` returned true. As in `hf_config`, values
are typed and never guessed; unsupported features are rejected with a readable reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.models.errors import BrokenModel, UnsupportedModel
from ridgeline.models.files.config_values import ConfigValues, read_json_object, shown
from ridgeline.models.files.registry import refuse_pickles_alone
from ridgeline.models.spec.encoder_spec import EncoderActivation, EncoderOutput, EncoderSpec, PoolingMode
from ridgeline.models.spec.readers.hf_quantization import read_weight_format

MAX_LAYERS = 10_000
SERVED_FORMATS = ("float32", "bfloat16", "float16")
ACTIVATIONS: dict[str, EncoderActivation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
POOLINGS: dict[str, PoolingMode] = {
    "cls": "cls",
    "mean": "mean",
    "max": "max",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "lasttoken": "last",
}
# The flags of older 1_Pooling/config.json files, by their newer names.
POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    """A family's config.json keys, where they differ from BERT's."""

    name: str
    model_type: str
    class_prefix: str  # of its class names: BertModel, BertForMaskedLM, …
    hidden: str = "hidden_size"
    heads: str = "num_attention_heads"
    layers: str = "num_hidden_layers"
    ffn: str = "intermediate_size"
    activation: str = "hidden_act"
    norm_eps: float | None = None  # fixed; else layer_norm_eps
    has_types: bool = True
    positions_after_padding: bool = False  # positions start after the padding token's id


FAMILIES = (
    EncoderFamily("bert", "bert", "Bert"),
    EncoderFamily("roberta", "roberta", "Roberta", positions_after_padding=True),
    EncoderFamily("xlm-roberta", "xlm-roberta", "XLMRoberta", positions_after_padding=True),
    EncoderFamily(
        "distilbert", "distilbert", "DistilBert", "dim", "n_heads", "n_layers", "hidden_dim", "activation",
        norm_eps=1e-12, has_types=False,
    ),
)  # fmt: skip
# Known encoder families that are not supported, with the reason.
REFUSED_TYPES = {
    "deberta": "attention with relative positions",
    "deberta-v2": "attention with relative positions",
    "mpnet": "attention with relative position buckets",
    "modernbert": "rotary positions and gated layers in an encoder",
    "nomic_bert": "rotary positions and gated layers in an encoder",
    "new": "custom code",
    "albert": "layers that share their weights",
    "electra": "a separate embedding size",
    "t5": "the encoder of an encoder-decoder model",
}
_BODIES = ("Model", "ForMaskedLM", "ForPreTraining")


def is_encoder(path: Path) -> bool:
    """Whether `path` (a directory or config.json) is an encoder, by its model_type only."""
    config = path / "config.json" if path.is_dir() else path
    if config.suffix != ".json" or not config.is_file():
        return False
    kind = read_json_object(config).get("model_type")
    return kind in REFUSED_TYPES or any(kind == family.model_type for family in FAMILIES)


def read_encoder_spec(path: Path) -> EncoderSpec:
    """The encoder at `path`, a directory or its config.json."""
    directory = path if path.is_dir() else path.parent
    if path.is_dir():
        refuse_pickles_alone(directory)
    name = directory.resolve().name
    where = f"{name}: config.json"
    values = ConfigValues(read_json_object(directory / "config.json"), where)
    family = _family(values)
    output = _output(values, family)
    _refuse_features(values)
    first = values.integer("pad_token_id", minimum=0) + 1 if family.positions_after_padding else 0
    positions = values.integer("max_position_embeddings")
    layers = values.integer(family.layers)
    if layers > MAX_LAYERS:
        raise BrokenModel(f"{where}: {family.layers} is {layers}; no model has more than {MAX_LAYERS}")
    pooling, normalize, notes = ("cls", False, ()) if output == "score" else _modules(directory, name)
    weight_format = read_weight_format(values, None)
    if weight_format not in SERVED_FORMATS:
        raise UnsupportedModel(f"{where}: weights quantized as {weight_format} are not supported")
    weights = sorted(directory.glob("*.safetensors"))
    return EncoderSpec(
        family=family.name,
        name=name,
        hidden_size=values.integer(family.hidden),
        num_heads=values.integer(family.heads),
        num_layers=layers,
        ffn_size=values.integer(family.ffn),
        vocab_size=values.integer("vocab_size"),
        max_positions=positions,
        first_position=first,
        num_types=values.integer("type_vocab_size") if family.has_types else 0,
        norm_eps=family.norm_eps or values.number("layer_norm_eps"),
        max_tokens=_longest_text(directory, name, positions - first),
        activation=_activation(values, family),
        pooling=pooling,
        normalize=normalize,
        output=output,
        pad_id=values.optional_integer("pad_token_id", minimum=0),
        weight_format=weight_format,
        stored_bytes=sum(file.stat().st_size for file in weights) if weights else None,
        notes=notes,
    )


def _family(values: ConfigValues) -> EncoderFamily:
    kind = values.text("model_type")
    if kind in REFUSED_TYPES:
        raise UnsupportedModel(
            f"{values.where}: the encoder family {kind!r} is not supported: it has {REFUSED_TYPES[kind]}. "
            f"Supported: {', '.join(family.name for family in FAMILIES)}"
        )
    return next(family for family in FAMILIES if family.model_type == kind)


def _output(values: ConfigValues, family: EncoderFamily) -> EncoderOutput:
    """From the class the checkpoint was saved from. A classifier with one label is a cross-encoder."""
    classes = values.optional_texts("architectures") or [f"{family.class_prefix}Model"]
    if any(each == f"{family.class_prefix}{body}" for each in classes for body in _BODIES):
        return "vector"
    if f"{family.class_prefix}ForSequenceClassification" not in classes:
        raise UnsupportedModel(
            f"{values.where}: {', '.join(classes)} is not a text encoder; supported are "
            f"{family.class_prefix}Model and, for scores, {family.class_prefix}ForSequenceClassification"
        )
    labels = values.mapping("id2label")
    count = len(labels) if labels else values.optional_integer("num_labels") or 2
    if count != 1:
        raise UnsupportedModel(
            f"{values.where}: a classifier with {count} labels; only those with one score are supported"
        )
    return "score"


def _refuse_features(values: ConfigValues) -> None:
    if (kind := values.optional_text("position_embedding_type")) not in (None, "absolute"):
        raise UnsupportedModel(f"{values.where}: {kind} position embeddings are not supported")
    for key in ("is_decoder", "add_cross_attention"):
        if values.flag(key, default=False):
            raise UnsupportedModel(f"{values.where}: {key} is set: this is not an encoder")


def _activation(values: ConfigValues, family: EncoderFamily) -> EncoderActivation:
    name = values.text(family.activation)
    if name not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise UnsupportedModel(f"{values.where}: activation {name!r} is not supported; supported are {known}")
    return ACTIVATIONS[name]


# ---- sentence-transformers' files ----


def _modules(directory: Path, name: str) -> tuple[PoolingMode, bool, tuple[str, ...]]:
    """(pooling, whether vectors are normalized, notes), from modules.json."""
    file = directory / "modules.json"
    if not file.is_file():
        return "mean", True, ("no modules.json: the mean of the token vectors, normalized",)
    try:
        listed = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise BrokenModel(f"{file}: is not readable JSON: {error}") from error
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        raise BrokenModel(f"{file}: is not a list of modules")
    pooling: PoolingMode = "mean"
    normalize = False
    readers: dict[str, Callable[[Path], Any]] = {"Transformer": lambda folder: None, "Pooling": _pooling}
    for entry in listed:
        values = ConfigValues(entry, f"{name}: modules.json")
        kind, folder = values.text("type").rpartition(".")[2], _inside(directory, values.text("path"), name)
        if kind == "Normalize":
            normalize = True
        elif kind not in readers:
            raise UnsupportedModel(f"{values.where}: the module {kind} is not supported")
        elif (found := readers[kind](folder)) is not None:
            pooling = found
    return pooling, normalize, ()


def _inside(directory: Path, path: str, name: str) -> Path:
    if path.startswith("/") or ".." in Path(path).parts:
        raise BrokenModel(f"{name}: modules.json names {path!r}, which is outside the model's directory")
    return directory / path


def _pooling(folder: Path) -> PoolingMode:
    file = folder / "config.json"
    content = read_json_object(file)
    values = ConfigValues(content, str(file))
    several = isinstance(content.get("pooling_mode"), list)
    newer = values.optional_texts("pooling_mode") if several else values.optional_text("pooling_mode")
    flagged = [mode for flag, mode in POOLING_FLAGS.items() if values.flag(flag, default=False)]
    modes = flagged if newer is None else [newer] if isinstance(newer, str) else list(newer)
    if len(modes) != 1 or modes[0] not in POOLINGS:
        found = " + ".join(modes) or "none"
        raise UnsupportedModel(
            f"{file}: pooling by {found} is not supported; supported are {', '.join(POOLINGS)}"
        )
    return POOLINGS[modes[0]]


def _longest_text(directory: Path, name: str, positions: int) -> int:
    """sentence-transformers' max_seq_length, else the tokenizer's, else the number of positions."""
    for file, key in (
        ("sentence_bert_config.json", "max_seq_length"),
        ("tokenizer_config.json", "model_max_length"),
    ):
        if (directory / file).is_file():
            content = read_json_object(directory / file)
            stated = content.get(key)
            if stated is None or isinstance(stated, float):  # tokenizers write 1e30 for "unknown"
                continue
            if not isinstance(stated, int) or isinstance(stated, bool) or stated < 1:
                raise BrokenModel(f"{name}: {file}: {key} is {shown(stated)}; expected a length")
            return min(stated, positions)
    return positions
