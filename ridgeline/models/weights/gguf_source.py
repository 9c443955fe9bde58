"""GGUF checkpoints as a source of tensors: their names and the format's peculiarities.

GGUF differs from Hugging Face files in three ways: some architectures store q and k for interleaved rotation
(`rope.interleaved`; the places undo it), Gemma's norms already include their 1 (a GGUF file's spec adds
none), and llama3 rope scaling may be a tensor of divisors.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from ridgeline.models.errors import BrokenModel
from ridgeline.models.files.gguf import GgufFile
from ridgeline.models.files.gguf_factors import factor_names, read_factors
from ridgeline.models.spec.declarations.family import gguf_names_of
from ridgeline.models.spec.families import FAMILIES
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.weights.dequant import Bytes, Floats, dequantize
from ridgeline.models.weights.layout import Piece
from ridgeline.models.weights.places import Place, find_places

_ROPE_DIVISORS = "rope_freqs.weight"


class GgufSource:
    """One GGUF file of a model."""

    def __init__(self, path: Path, spec: ModelSpec) -> None:
        self.file = GgufFile(path)
        self._spec = spec
        self._names = gguf_names_of(FAMILIES[spec.family], self.file.tensors)
        self._harmless = re.compile(self._names.harmless)
        self._factors = read_factors(self.file)
        tensors, taken = self.file.tensors, factor_names(self.file.tensors)
        self._shapes = {name: tensor.shape for name, tensor in tensors.items() if name not in taken}

    def places(self) -> dict[Piece, Place]:
        return find_places(self._spec, self._names, head=self._names.heads[0])

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def where(self, name: str) -> Path:
        return self.file.path

    def is_harmless(self, name: str) -> bool:
        return self._harmless.search(name) is not None

    def type_of(self, name: str) -> str:
        return self.file.tensors[name].type

    def matrix(self, name: str) -> None:
        """GGUF's types are blocks: none is a matrix with separate scales."""

    def factors(self, name: str) -> Floats | None:
        return self._factors.get(name)

    def raw(self, name: str) -> Bytes:
        return self.file.raw(name)

    def drop_pages(self) -> None:
        self.file.drop_pages()

    def rope_divisors(self) -> Floats | None:
        if _ROPE_DIVISORS not in self.file.tensors:
            return None
        divisors = dequantize(self.file.raw(_ROPE_DIVISORS), self.type_of(_ROPE_DIVISORS))
        if not (np.isfinite(divisors).all() and (divisors > 0).all()):
            raise BrokenModel(
                f"{self.file.path}: tensor {_ROPE_DIVISORS} contains values that are not positive"
            )
        return divisors
