"""write_gguf: a checkpoint as a GGUF file in the types of a recipe, one part of a tensor in memory at a time.

The header is written first and read back: a model or tokenizer that GGUF cannot state is refused before the
first weight is encoded. Every encoded part is decoded again, which gives each tensor's error. A source that
is quantized already is refused unless the caller allows it. No other module writes GGUF files.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.models.errors import BrokenModel, ModelError, UnsupportedModel
from ridgeline.models.files.checkpoint_files import weights_file
from ridgeline.models.files.generation_config import GGUF_KEYS, GGUF_PREFIX, sampling_defaults
from ridgeline.models.files.gguf import GgufFile
from ridgeline.models.files.gguf_writer import GgufWriter, RawValue, TensorEntry, Value
from ridgeline.models.gguf_output.keep import kept_types
from ridgeline.models.gguf_output.metadata import QUANTIZATION_VERSION, describe_model, refuse_difference
from ridgeline.models.gguf_output.recipes import (
    FLOAT_TYPES,
    Recipe,
    bits_per_weight,
    choose_type,
    find_recipe,
)
from ridgeline.models.gguf_output.tensors import (
    OutputTensor,
    Part,
    tensors_of_checkpoint,
    tensors_of_gguf,
)
from ridgeline.models.gguf_output.tokenizer_metadata import describe_tokenizer
from ridgeline.models.quantized.block_encoders import encode
from ridgeline.models.spec.ffn import Experts
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.read_spec import read_spec
from ridgeline.models.spec.readers.gguf_config import spec_from_gguf
from ridgeline.models.spec.readers.gguf_rope import ROPE_TENSORS
from ridgeline.models.weights.dequant import dequantize

Floats = np.ndarray[Any, np.dtype[np.float32]]
# Mean squares of each column's inputs, by tensor name: [columns], or [experts, columns] of a stack.
Importance = Mapping[str, Floats]
Progress = Callable[[int, int], None]  # weights written, of all
# From the file with all its tensors: facts that were zeros until now.
Measure = Callable[[Path], Mapping[str, Value]]

SOURCE_FLOATS = (*FLOAT_TYPES, "F64")
MAX_THREADS = 8
# Replaced by the new file's own. Left out: what describes the old weights or how they were made.
_OWN_KEYS = ("general.file_type", "general.quantization_version", "general.alignment")
_OLD_PREFIXES = ("quantize.", "split.")
ERRORS = "quantize.errors"  # of each tensor, in the order of the file's table


@dataclass(frozen=True, slots=True)
class GgufReport:
    """What was written. errors: rms of each quantized tensor's error, relative to the rms of its weights."""

    path: Path
    nbytes: int
    bits_per_weight: float
    types: dict[str, int]  # tensors of each type
    errors: dict[str, float] = field(repr=False)


def write_gguf(
    model: Path,
    recipe: Recipe | str,
    out: Path,
    progress: Progress | None = None,
    *,
    importance: Importance | None = None,
    requantize: bool = False,
    keep: Sequence[str] = (),
    facts: Mapping[str, Value] | None = None,
    measure: Measure | None = None,
    threads: int | None = None,
) -> GgufReport:
    """Write the model at `model` (a directory with safetensors, or a .gguf file) to `out`.

    importance: weights of the columns for the error that is minimized; tensors without an entry have none
    requantize: accept tensors that are quantized already. Their error stays and the new one is added
    keep:       parts of modules' names that stay in the source's float type
    facts:      further metadata, such as a report about the quantization
    measure:    called with the complete file before it has its name; replaces facts by others of the same
                type and length
    """
    recipe = find_recipe(recipe) if isinstance(recipe, str) else recipe
    model, out = Path(model), Path(out)
    spec, tensors, metadata = _read(model)
    if out.exists() and weights_file(model).samefile(out):
        raise UnsupportedModel(f"{out}: is the model itself; choose another name")
    if not requantize:
        _refuse_quantized(model, tensors)
    kept = kept_types(tensors, keep, spec.tied_embeddings)
    entries = _entries(spec, recipe, tensors, kept)
    metadata = {
        **metadata,
        "general.file_type": recipe.number,
        "general.quantization_version": QUANTIZATION_VERSION,
        **(facts or {}),
    }
    if any(entry.type not in FLOAT_TYPES for entry in entries):
        metadata[ERRORS] = [0.0] * len(entries)
    writer = GgufWriter(out, metadata, entries)
    try:
        filler = _Filler(writer, entries, importance or {}, progress, threads)
        described = [tensor for tensor in tensors if tensor.name in ROPE_TENSORS]  # part of the description
        filler.run(described)
        refuse_difference(spec, _read_back(spec, writer))
        errors = filler.run([tensor for tensor in tensors if tensor not in described])
        if ERRORS in metadata:
            writer.replace(ERRORS, [errors.get(entry.name, 0.0) for entry in entries])
        for key, value in (measure(writer.partial) if measure else {}).items():
            writer.replace(key, value)
        writer.finish()
    except BaseException:
        writer.discard()
        raise
    types = dict(Counter(entry.type for entry in entries))
    return GgufReport(out, writer.nbytes, bits_per_weight(entries), types, errors)


def _read(model: Path) -> tuple[ModelSpec, list[OutputTensor], dict[str, Value | RawValue]]:
    """The model, its tensors and its metadata. The metadata of a GGUF file is kept as it is."""
    spec = read_spec(model)
    if weights_file(model).suffix != ".gguf":
        metadata = describe_model(spec)
        metadata |= _sampling(model)
        metadata |= _with_special_ids(describe_tokenizer(model, spec.vocab_size), spec)
        return spec, tensors_of_checkpoint(model, spec), {**metadata}
    file = GgufFile(weights_file(model))
    kept = {
        key: RawValue(file.raw_value(key))
        for key in file.metadata
        if key not in _OWN_KEYS and not key.startswith(_OLD_PREFIXES)
    }
    return spec, tensors_of_gguf(file), {**kept}


def _read_back(spec: ModelSpec, writer: GgufWriter) -> ModelSpec:
    try:
        return spec_from_gguf(GgufFile(writer.partial))
    except ModelError as error:
        reason = str(error).removeprefix(f"{writer.partial}: ")
        raise UnsupportedModel(f"{spec.name}: a GGUF file cannot state this model: {reason}") from error


def _sampling(model: Path) -> dict[str, Value]:
    defaults = sampling_defaults(model).values()
    return {GGUF_PREFIX + key: defaults[name] for key, name in GGUF_KEYS.items() if name in defaults}


def _with_special_ids(metadata: dict[str, Value], spec: ModelSpec) -> dict[str, Value]:
    """The model's own beginning and padding, where the tokenizer has none, and its end tokens: that of the
    tokenizer, then up to two others as those of a turn and a message."""
    prefix = "tokenizer.ggml."
    for key, index in (("bos_token_id", spec.bos_id), ("padding_token_id", spec.pad_id)):
        if index is not None:
            metadata.setdefault(prefix + key, index)
    first = metadata.get(f"{prefix}eos_token_id")
    others = [index for index in spec.eos_ids if index != first]
    if first is None and others:
        metadata[f"{prefix}eos_token_id"] = others.pop(0)
    for key, index in zip(("eot_token_id", "eom_token_id"), others, strict=False):
        metadata[prefix + key] = index
    return metadata


def _refuse_quantized(model: Path, tensors: list[OutputTensor]) -> None:
    for tensor in tensors:
        stored = sorted(tensor.stored.difference(SOURCE_FLOATS))
        if stored:
            raise UnsupportedModel(
                f"{model}: tensor {tensor.name} is quantized already ({', '.join(stored)}). Quantizing it "
                "again adds a second error; use the 16-bit checkpoint, or allow it explicitly (--requantize)"
            )


def _entries(
    spec: ModelSpec, recipe: Recipe, tensors: list[OutputTensor], kept: Mapping[str, str]
) -> list[TensorEntry]:
    experts = next((layer.ffn.num for layer in spec.layers if isinstance(layer.ffn, Experts)), 0)

    def type_of(tensor: OutputTensor) -> str:
        chosen = choose_type(
            recipe,
            tensor.name,
            tensor.shape,
            layers=spec.num_layers,
            tied=spec.tied_embeddings,
            experts=experts,
        )
        return chosen if chosen in FLOAT_TYPES else kept.get(tensor.name, chosen)

    return [TensorEntry(tensor.name, type_of(tensor), tensor.shape) for tensor in tensors]


class _Filler:
    """Encodes tensors into their places in the file, parts of one tensor on several threads."""

    def __init__(
        self,
        writer: GgufWriter,
        entries: list[TensorEntry],
        importance: Importance,
        progress: Progress | None,
        threads: int | None,
    ) -> None:
        self._writer, self._importance = writer, importance
        self._entries = {entry.name: entry for entry in entries}
        self._progress = progress or (lambda done, total: None)
        self._threads = threads or min(MAX_THREADS, os.cpu_count() or 1)
        self._total = sum(entry.rows * entry.shape[-1] for entry in entries)
        self._done = 0
        self._progress(0, self._total)

    def run(self, tensors: list[OutputTensor]) -> dict[str, float]:
        """The relative error of each quantized tensor."""
        errors = {}
        with ThreadPoolExecutor(self._threads, "gguf") as pool:
            for tensor in tensors:
                entry = self._entries[tensor.name]
                error = self._fill(pool, tensor, entry)
                if entry.type not in FLOAT_TYPES:
                    errors[tensor.name] = error
        return errors

    def _fill(self, pool: ThreadPoolExecutor, tensor: OutputTensor, entry: TensorEntry) -> float:
        target = self._writer.rows(tensor.name)
        if (same := tensor.same_bytes(entry.type)) is not None:
            target.reshape(-1)[:] = same
            self._advance(entry.rows * entry.shape[-1])
            return 0.0
        squares = errors = 0.0
        running: deque[Future[tuple[float, float, int]]] = deque()

        def settle() -> None:
            nonlocal squares, errors
            of_weights, of_errors, count = running.popleft().result()
            squares += of_weights
            errors += of_errors
            self._advance(count)

        for part in tensor.parts():
            running.append(pool.submit(self._encode, tensor.name, entry, part, target))
            while len(running) > 2 * self._threads:  # bounds the floats in memory
                settle()
        while running:
            settle()
        return float((errors / squares) ** 0.5) if squares else 0.0

    def _encode(
        self, name: str, entry: TensorEntry, part: Part, target: np.ndarray[Any, np.dtype[np.uint8]]
    ) -> tuple[float, float, int]:
        values = part.values
        if not np.isfinite(values).all():
            raise BrokenModel(f"tensor {name} has values that are not finite; it cannot be quantized")
        try:
            encoded = encode(values, entry.type, self._weights(name, entry, part))
        except ValueError as error:
            raise UnsupportedModel(f"tensor {name} cannot be written as {entry.type}: {error}") from error
        target.reshape(-1, encoded.shape[1])[part.rows] = encoded
        if entry.type in FLOAT_TYPES:
            return 0.0, 0.0, values.size
        difference = dequantize(encoded.reshape(-1), entry.type).reshape(values.shape) - values
        return float(np.vdot(values, values)), float(np.vdot(difference, difference)), values.size

    def _weights(self, name: str, entry: TensorEntry, part: Part) -> Floats | None:
        weights = self._importance.get(name)
        if weights is None or weights.ndim == 1:
            return weights
        first = part.rows.start if isinstance(part.rows, slice) else int(part.rows[0])
        chosen: Floats = weights[first // entry.shape[-2]]
        return chosen

    def _advance(self, count: int) -> None:
        self._done += count
        self._progress(self._done, self._total)
