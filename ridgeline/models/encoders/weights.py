"""An encoder's checkpoint as float32 arrays under one set of names for all families.

Used by the native table and the torch reference. Every name, shape and value is checked before it is used.
Numpy only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ridgeline.models.errors import BrokenModel, UnsupportedModel
from ridgeline.models.files.checkpoint_files import shard_paths, weights_file
from ridgeline.models.files.safetensors_file import SafetensorsFile
from ridgeline.models.spec.encoder_spec import EncoderSpec
from ridgeline.models.weights.dequant import Floats, dequantize
from ridgeline.models.weights.safetensors_source import READABLE_DTYPES

# Our name of a layer's part → the family's; each part has .weight and .bias.
_BERT_LAYER = {
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "output": "attention.output.dense",
    "attn_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "ffn_norm": "output.LayerNorm",
}
_DISTILBERT_LAYER = {
    "q": "attention.q_lin",
    "k": "attention.k_lin",
    "v": "attention.v_lin",
    "output": "attention.out_lin",
    "attn_norm": "sa_layer_norm",
    "up": "ffn.lin1",
    "down": "ffn.lin2",
    "ffn_norm": "output_layer_norm",
}


@dataclass(frozen=True, slots=True)
class _Names:
    prefix: str  # of everything except the head, in checkpoints that have one
    layer: str
    parts: dict[str, str]
    dense: str  # in a cross-encoder's head: hidden to hidden, an activation,
    score: str  # hidden to one


_NAMES = {
    "bert": _Names("bert.", "encoder.layer", _BERT_LAYER, "bert.pooler.dense", "classifier"),
    "roberta": _Names("roberta.", "encoder.layer", _BERT_LAYER, "classifier.dense", "classifier.out_proj"),
    "xlm-roberta": _Names(
        "roberta.", "encoder.layer", _BERT_LAYER, "classifier.dense", "classifier.out_proj"
    ),
    "distilbert": _Names(
        "distilbert.", "transformer.layer", _DISTILBERT_LAYER, "pre_classifier", "classifier"
    ),
}
# Tensors that are not needed: heads of other tasks, and buffers that follow from the configuration.
_HARMLESS = re.compile(r"position_ids$|token_type_ids$|(^|\.)pooler\.|^cls\.|^lm_head\.|^vocab_|(^|\.)mlm_")
# The head's activation between its two layers.
HEAD_ACTIVATION = {"bert": "tanh", "roberta": "tanh", "xlm-roberta": "tanh", "distilbert": "relu"}


def load_encoder_weights(path: Path, spec: EncoderSpec) -> dict[str, Floats]:
    """Every tensor: "words", "positions", "types", "norm.weight", "0.q.weight", …, "head.dense.weight"."""
    files = [SafetensorsFile(file) for file in shard_paths(_safetensors(path))]
    places = {name: file for file in files for name in file.tensors}
    expected = dict(_expected(spec, places))
    missing = [stored for stored, _ in expected.values() if stored not in places]
    if missing:
        raise BrokenModel(f"{path}: {len(missing)} tensors are missing: {', '.join(missing[:6])}")
    known = {stored for stored, _ in expected.values()}
    unexpected = [name for name in places if name not in known and not _HARMLESS.search(name)]
    if unexpected:
        raise BrokenModel(
            f"{path}: {len(unexpected)} tensors do not belong to a {spec.family} encoder "
            f"with this configuration: {', '.join(sorted(unexpected)[:6])}"
        )
    return {ours: _read(places[stored], stored, shape) for ours, (stored, shape) in expected.items()}


def _safetensors(path: Path) -> Path:
    file = weights_file(path)
    if file.suffix == ".gguf":
        raise UnsupportedModel(f"{file}: encoders are supported as safetensors, not as GGUF files")
    return file


def _expected(
    spec: EncoderSpec, places: dict[str, SafetensorsFile]
) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    names, hidden, ffn = _NAMES[spec.family], spec.hidden_size, spec.ffn_size
    prefix = names.prefix if f"{names.prefix}embeddings.word_embeddings.weight" in places else ""
    top = f"{prefix}embeddings."
    yield "words", (f"{top}word_embeddings.weight", (spec.vocab_size, hidden))
    yield "positions", (f"{top}position_embeddings.weight", (spec.max_positions, hidden))
    if spec.num_types:
        yield "types", (f"{top}token_type_embeddings.weight", (spec.num_types, hidden))
    yield "norm.weight", (f"{top}LayerNorm.weight", (hidden,))
    yield "norm.bias", (f"{top}LayerNorm.bias", (hidden,))
    shapes = {"up": (ffn, hidden), "down": (hidden, ffn), "attn_norm": (hidden,), "ffn_norm": (hidden,)}
    for index in range(spec.num_layers):
        for part, stored in names.parts.items():
            shape = shapes.get(part, (hidden, hidden))
            full = f"{prefix}{names.layer}.{index}.{stored}"
            yield f"{index}.{part}.weight", (f"{full}.weight", shape)
            yield f"{index}.{part}.bias", (f"{full}.bias", shape[:1])
    if spec.output == "score":
        for part, stored, shape in (
            ("dense", names.dense, (hidden, hidden)),
            ("score", names.score, (1, hidden)),
        ):
            yield f"head.{part}.weight", (f"{stored}.weight", shape)
            yield f"head.{part}.bias", (f"{stored}.bias", shape[:1])


def _read(file: SafetensorsFile, name: str, shape: tuple[int, ...]) -> Floats:
    tensor = file.tensors[name]
    if tensor.shape != shape:
        raise BrokenModel(
            f"{file.path}: tensor {name} has shape {list(tensor.shape)}, "
            f"but the configuration says {list(shape)}"
        )
    if tensor.dtype not in READABLE_DTYPES:
        raise UnsupportedModel(
            f"{file.path}: tensor {name} is stored as {tensor.dtype}, which is not supported"
        )
    values = dequantize(file.raw(name), tensor.dtype).reshape(shape)
    if not np.isfinite(values).all():
        raise BrokenModel(
            f"{file.path}: tensor {name} contains values that are not finite: the file is corrupt"
        )
    return values
