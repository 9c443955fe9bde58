"""The records of retrieval: namespaces, documents, chunks and hits. No I/O.

A document's attributes are what filters see; its chunks carry the same ones. `begin` and `end` are character
offsets in the document's text, so that `document.text[chunk.begin : chunk.end]` is the cited passage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ridgeline.retrieval.errors import BadInput, SpecMismatch

Attribute: TypeAlias = str | float | bool
Attributes: TypeAlias = Mapping[str, Attribute]
Vector: TypeAlias = NDArray[np.float32]

MAX_ATTRIBUTES = 16
MAX_KEY_CHARACTERS = 64
MAX_STRING_CHARACTERS = 512


@dataclass(frozen=True, slots=True)
class Namespace:
    """A vector store of one tenant. Every row of a store belongs to exactly one namespace."""

    tenant: str
    name: str


@dataclass(frozen=True, slots=True)
class NamespaceSpec:
    """What the vectors of a namespace are. Recorded at creation and checked at every put and search."""

    dimensions: int
    embedding_model: str


@dataclass(frozen=True, slots=True)
class NamespaceInfo:
    namespace: Namespace
    spec: NamespaceSpec
    documents: int
    chunks: int
    bytes: int  # of texts and vectors, as counted for usage


@dataclass(frozen=True, slots=True)
class Document:
    id: str
    name: str  # a file name, for people
    text: str  # as parsed; the offsets of chunks refer to it
    attributes: Attributes = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Chunk:
    """id is unique in its namespace. Vectors are stored with length 1; they are None where not asked for."""

    id: str
    document_id: str
    ordinal: int
    begin: int
    end: int
    text: str
    attributes: Attributes = field(default_factory=dict)
    vector: Vector | None = None


@dataclass(frozen=True, slots=True)
class Scored:
    """A chunk found by one leg of a search. Scores of different legs have different scales."""

    chunk_id: str
    score: float


@dataclass(frozen=True, slots=True)
class Leg:
    """What one leg said about a candidate. rank counts from 1; None where the leg did not return it."""

    name: str  # "vector", "text", or the reranker's name
    rank: int | None
    score: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class Hit:
    """legs is filled by `explain`; a hit that is not returned says in `dropped` why."""

    chunk: Chunk
    score: float
    legs: tuple[Leg, ...] = ()
    filter: str = ""  # what the filter said, with explain
    dropped: str = ""


def check_attributes(attributes: Mapping[str, object], where: str = "attributes") -> dict[str, Attribute]:
    """The attributes with numbers as floats, or BadInput that names the key."""
    if len(attributes) > MAX_ATTRIBUTES:
        raise BadInput(where, f"has {len(attributes)} keys, at most {MAX_ATTRIBUTES} are allowed")
    return {key: _checked(key, value, where) for key, value in attributes.items()}


def _checked(key: str, value: object, where: str) -> Attribute:
    if not 0 < len(key) <= MAX_KEY_CHARACTERS:
        raise BadInput(where, f"a key has {len(key)} characters, 1 to {MAX_KEY_CHARACTERS} are allowed")
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        number = float(value)
        if not math.isfinite(number):
            raise BadInput(f"{where}.{key}", f"{value} is not a finite number")
        return number
    if not isinstance(value, str):
        raise BadInput(f"{where}.{key}", "must be a string, a number or a boolean")
    if len(value) > MAX_STRING_CHARACTERS:
        raise BadInput(
            f"{where}.{key}", f"has {len(value)} characters, at most {MAX_STRING_CHARACTERS} are allowed"
        )
    return value


def unit_rows(vectors: NDArray[np.floating], spec: NamespaceSpec) -> Vector:
    """Vectors [n, d] as float32 of length 1; a zero vector stays zero. SpecMismatch for another d."""
    rows = np.atleast_2d(np.asarray(vectors, np.float32))
    if rows.ndim != 2 or rows.shape[1] != spec.dimensions:
        raise SpecMismatch(
            f"the vectors have {rows.shape[-1]} dimensions, the namespace was created with "
            f"{spec.dimensions} ({spec.embedding_model}): embed with the same model and dimensions"
        )
    if not np.isfinite(rows).all():
        raise BadInput("vector", "has a value that is not finite")
    lengths = np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
    return (rows / np.where(lengths > 0, lengths, 1.0)).astype(np.float32)


def check_model(namespace: Namespace, spec: NamespaceSpec, model: str) -> None:
    """SpecMismatch where the namespace's vectors are another model's: those of two models have nothing in
    common, even where they have the same number of dimensions.
    """
    if spec.embedding_model != model:
        raise SpecMismatch(
            f"the vectors of {namespace.name!r} were made with {spec.embedding_model!r}, and the embedding "
            f"model is {model!r}: embed with the first, or add the files to another vector store"
        )


def check_spec(namespace: Namespace, there: NamespaceSpec, asked: NamespaceSpec) -> None:
    """SpecMismatch where a namespace exists with other vectors than are asked for."""
    check_model(namespace, there, asked.embedding_model)
    if there.dimensions != asked.dimensions:
        raise SpecMismatch(
            f"the vectors of {namespace.name!r} have {there.dimensions} dimensions of "
            f"{there.embedding_model!r}, not {asked.dimensions}"
        )


def truncated(vectors: NDArray[np.floating], dimensions: int) -> Vector:
    """Matryoshka truncation: the first `dimensions` values of each vector, at length 1 again."""
    if not 0 < dimensions <= vectors.shape[-1]:
        raise BadInput("dimensions", f"must be between 1 and {vectors.shape[-1]}, not {dimensions}")
    return unit_rows(vectors[..., :dimensions], NamespaceSpec(dimensions, "truncated"))
