"""Hugging Face checkpoints in safetensors: one file, or shards listed by an index. Memory-mapped.

The family's NameMap has the tensors' names; `safetensors_file` reads the format. A quantized matrix is seen
as one tensor, named like an unquantized one (`quantized.tensors`, `mxfp4`).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ridgeline.models.errors import BrokenModel, UnsupportedModel
from ridgeline.models.files.checkpoint_files import shard_paths
from ridgeline.models.files.safetensors_file import SafetensorsFile, SafetensorsTensor
from ridgeline.models.quantized.packings import KV_SCALES, StoredMatrix, StoredTensor
from ridgeline.models.quantized.tensors import QuantizedTensors
from ridgeline.models.spec.families import FAMILIES
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.weights.dequant import Bytes, Floats, dequantize_chunks
from ridgeline.models.weights.layout import Piece
from ridgeline.models.weights.mxfp4 import TYPE as MXFP4
from ridgeline.models.weights.mxfp4 import joined, mxfp4_pairs
from ridgeline.models.weights.places import Place, find_places

COMPARED_BYTES = 1 << 22  # bytes compared at a time
READABLE_DTYPES = ("F64", "F32", "F16", "BF16")
KEPT_TENSORS = 2  # a layer's experts are two stacks, read expert by expert


class _Recent:
    """The last tensors that were made from stored ones: all experts of a stack read the same."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[str, Bytes] = {}

    def get(self, name: str, make: Callable[[], Bytes]) -> Bytes:
        with self._lock:
            found = self._made.pop(name, None)
            if found is None:
                while len(self._made) >= KEPT_TENSORS:
                    del self._made[next(iter(self._made))]
                found = make()
            self._made[name] = found  # the newest comes last
            return found


class SafetensorsSource:
    """A model.safetensors file, or a model.safetensors.index.json and its shards."""

    def __init__(self, path: Path, spec: ModelSpec) -> None:
        self.path = path
        self.spec = spec
        self._files = {file: SafetensorsFile(file) for file in shard_paths(path)}
        self._places: dict[str, Path] = {}
        self._scales: dict[str, Path] = {}  # of MXFP4 tensors
        self._made = _Recent()
        for file, handle in self._files.items():
            for name in handle.tensors:
                if name in self._places:
                    raise BrokenModel(f"{file}: tensor {name} is also in {self._places[name].name}")
                self._places[name] = file
        self._pairs = mxfp4_pairs({name: self.tensor(name) for name in self._places}, str(path))
        for name, pair in self._pairs.items():
            self._places[name] = self._places.pop(pair.blocks)
            self._scales[name] = self._places.pop(pair.scales)
        self._quantized = self._quantized_tensors()
        names = self._names = FAMILIES[spec.family].hf_names
        embed = names.top["embed"]
        self._prefix = next((p for p in names.prefixes if p + embed in self._places), names.prefixes[0])
        self._head = next((name for name in names.heads if name in self._places), names.heads[0])
        self._harmless = re.compile(names.harmless)
        self._transposed = self._transposed_names()
        self._shapes = {name: self._shape(name) for name in self._places}
        self._check_tied_head()

    def _quantized_tensors(self) -> QuantizedTensors | None:
        if self.spec.quantization is None:
            return None
        elements, files = (
            dict(self._places),
            self._files,
        )  # no cycle through self: mappings end with the source

        def load(name: str) -> StoredTensor:
            file = files[elements[name]]
            tensor = file.tensors[name]
            return StoredTensor(tensor.dtype, tensor.shape, file.raw(name))

        found = QuantizedTensors(self.spec.quantization, elements, load, str(self.path))
        for name in found.taken:
            del self._places[name]
        for name in found.names():
            self._places[name] = elements[found.elements(name)]
        return found

    def places(self) -> dict[Piece, Place]:
        return find_places(self.spec, self._names, self._prefix, self._head)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """As [out, in], also of tensors that are stored transposed."""
        return self._shapes

    def is_verbatim(self, name: str) -> bool:
        """Whether `raw` is a range of the file."""
        return name not in self._transposed and name not in self._pairs and self.matrix(name) is None

    def matrix(self, name: str) -> StoredMatrix | None:
        """The matrix of a quantized tensor; None for any other."""
        return None if self._quantized is None else self._quantized.matrix(name)

    def factors(self, name: str) -> None:
        """A quantized matrix has all of its scales."""

    def where(self, name: str) -> Path:
        return self._places[name]

    def is_harmless(self, name: str) -> bool:
        if name.rpartition(".")[2] in KV_SCALES:  # of files that quantize nothing but the KV cache
            return True
        tied_head = name == self._head and self.spec.tied_embeddings
        if self._quantized is not None and name.endswith(".bias") and self._quantized.is_zero_bias(name):
            return True
        return tied_head or self._harmless.search(name) is not None

    def type_of(self, name: str) -> str:
        if name in self._pairs:
            return MXFP4
        if (matrix := self.matrix(name)) is not None:
            return str(matrix.format)
        dtype = self._files[self._places[name]].tensors[name].dtype
        if dtype not in READABLE_DTYPES:
            raise UnsupportedModel(
                f"{self.where(name)}: tensor {name} is stored as {dtype}; "
                f"safetensors weights are read from {', '.join(READABLE_DTYPES)}"
            )
        return dtype

    def raw(self, name: str) -> Bytes:
        """The tensor's bytes: a view of the file; of a transposed tensor a copy as [out, in], of an MXFP4
        tensor its blocks with their scales."""
        if self.is_verbatim(name):
            return self._files[self._places[name]].raw(name)
        return self._made.get(name, lambda: self._joined(name) if name in self._pairs else self._turned(name))

    def _joined(self, name: str) -> Bytes:
        pair = self._pairs[name]
        blocks = self._files[self._places[name]].raw(pair.blocks)
        return joined(blocks, self._files[self._scales[name]].raw(pair.scales))

    def _turned(self, name: str) -> Bytes:
        shape = self.tensor(name).shape
        elements = self._files[self._places[name]].raw(name).reshape(*shape, -1)
        return np.ascontiguousarray(elements.swapaxes(len(shape) - 2, len(shape) - 1)).reshape(-1)

    def tensor(self, name: str) -> SafetensorsTensor:
        """The location of the tensor's bytes in `where(name)`, for a loader that reads the file itself."""
        return self._files[self._places[name]].tensors[name]

    def stored(self, name: str) -> StoredTensor:
        """A tensor byte for byte as its file has it, also one that is stored transposed."""
        tensor = self.tensor(name)
        return StoredTensor(tensor.dtype, tensor.shape, self._files[self._places[name]].raw(name))

    def drop_pages(self) -> None:
        for file in self._files.values():
            file.drop_pages()

    def rope_divisors(self) -> Floats | None:
        return None

    def _shape(self, name: str) -> tuple[int, ...]:
        if name in self._pairs:
            return self._pairs[name].shape
        if (matrix := self.matrix(name)) is not None:
            return matrix.shape
        shape = self.tensor(name).shape
        return (*shape[:-2], shape[-1], shape[-2]) if name in self._transposed else shape

    def _transposed_names(self) -> set[str]:
        layers = (self._names.layer_prefix.format(layer=layer) for layer in range(self.spec.num_layers))
        stored = self._names.transposed
        found = {self._prefix + layer + name for layer in layers for name in stored}
        plain = {
            name
            for name in found
            if name in self._places and name not in self._pairs and self.matrix(name) is None
        }
        return {name for name in plain if len(self.tensor(name).shape) >= 2}

    def _check_tied_head(self) -> None:
        """Some tied checkpoints store the head as well: it must be identical to the embedding."""
        embed = self._prefix + self._names.top["embed"]
        if not (self.spec.tied_embeddings and self._head in self._places and embed in self._places):
            return
        if not self._same(self._head, embed):
            raise BrokenModel(
                f"{self.where(self._head)}: {self._head} differs from {embed}, but config.json says "
                "they are tied; set tie_word_embeddings to false if the head is separate"
            )

    def _same(self, one: str, other: str) -> bool:
        shapes = self.shapes()
        if shapes[one] != shapes[other] or self.matrix(one) is not None or self.matrix(other) is not None:
            return False
        if self._same_bytes(one, other):  # nearly always; avoids converting to floats
            return True
        first, second = (dequantize_chunks(self.raw(name), self.type_of(name)) for name in (one, other))
        return all(np.array_equal(a, b) for (_, a), (_, b) in zip(first, second, strict=True))

    def _same_bytes(self, one: str, other: str) -> bool:
        first, second = self.raw(one), self.raw(other)
        return self.type_of(one) == self.type_of(other) and all(
            np.array_equal(first[at : at + COMPARED_BYTES], second[at : at + COMPARED_BYTES])
            for at in range(0, len(first), COMPARED_BYTES)
        )
