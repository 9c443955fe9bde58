"""Embedder: what ingest and search need of an embedding model; and vectors of chunks it cannot read whole.

A chunk longer than the model's context is embedded in pieces; its vector is their mean, weighted by tokens.
Overlapping chunks share pieces, so that no token is embedded twice for an overlap.
"""

from __future__ import annotations

import contextlib
import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ridgeline.retrieval.chunking.spans import Span
from ridgeline.retrieval.errors import NamespaceNotFound, SpecMismatch
from ridgeline.retrieval.stores.protocol import Store
from ridgeline.retrieval.types import Namespace, NamespaceSpec, Vector, check_spec


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """A text's token ids without special tokens, and the character at which each begins."""

    ids: array[int]
    starts: array[int]


class Embedder(Protocol):
    """Raises EmbedderUnavailable while its model restarts or is busy."""

    model: str
    dimensions: int
    max_tokens: int  # of one text, without special tokens

    def tokenize(self, text: str) -> TokenizedText:
        """Takes long for a long text: call it in a thread."""
        ...

    async def embed(self, texts: Sequence[Sequence[int]]) -> Vector:
        """A vector for each text of at most `max_tokens`, as ids without special tokens. Behind all other
        requests.
        """
        ...

    async def embed_query(self, query: str) -> Vector:
        """The vector of one query [d]; that of a long one is made as a chunk's."""
        ...


async def checked_spec(
    store: Store, namespace: Namespace, embedder: Embedder, dimensions: int | None
) -> NamespaceSpec:
    """The spec of a vector store that keeps the first `dimensions` of the model's vectors (None: all).

    SpecMismatch where it has other vectors, or the model has fewer dimensions.
    """
    if dimensions is not None and dimensions > embedder.dimensions:
        raise SpecMismatch(
            f"{namespace.name!r} keeps {dimensions} dimensions, and the vectors of the embedding model "
            f"{embedder.model!r} have {embedder.dimensions}"
        )
    spec = NamespaceSpec(dimensions or embedder.dimensions, embedder.model)
    with contextlib.suppress(NamespaceNotFound):  # no file was added yet
        check_spec(namespace, await store.spec(namespace), spec)
    return spec


@dataclass(frozen=True, slots=True)
class Pieces:
    """What is embedded: token ranges, and for each chunk the indices of its pieces."""

    ranges: list[Span]
    of_chunk: list[list[int]]


def pieces_of(chunks: Sequence[Span], most: int) -> Pieces:
    """chunks: token ranges, in order of their begins. A chunk of at most `most` tokens is one piece; longer
    ones are cut where any of them begins or ends, and then evenly, into pieces of at most `most`.
    """
    long = [chunk for chunk in chunks if chunk.end - chunk.begin > most]
    edges = sorted({edge for chunk in long for edge in chunk})
    cuts = []
    for begin, end in itertools.pairwise(edges):
        parts = -(-(end - begin) // most)
        cuts += [begin + (end - begin) * part // parts for part in range(parts)]
    cuts += edges[-1:]
    place = {cut: i for i, cut in enumerate(cuts)}
    ranges: list[Span] = []
    known: dict[Span, int] = {}

    def index_of(part: Span) -> int:
        if part not in known:
            known[part] = len(ranges)
            ranges.append(part)
        return known[part]

    of_chunk = []
    for chunk in chunks:
        if chunk.end - chunk.begin <= most:
            of_chunk.append([index_of(chunk)])
            continue
        own = cuts[place[chunk.begin] : place[chunk.end] + 1]
        of_chunk.append([index_of(Span(*pair)) for pair in itertools.pairwise(own)])
    return Pieces(ranges, of_chunk)


def chunk_vectors(pieces: Pieces, vectors: Vector) -> Vector:
    """The vector of every chunk, from those of the pieces [pieces, d]."""
    rows = np.empty((len(pieces.of_chunk), vectors.shape[1]), np.float32)
    for i, members in enumerate(pieces.of_chunk):
        if len(members) == 1:
            rows[i] = vectors[members[0]]
            continue
        weights = [pieces.ranges[member].end - pieces.ranges[member].begin for member in members]
        mean = np.average(vectors[members], axis=0, weights=weights)
        rows[i] = mean / max(float(np.linalg.norm(mean)), 1e-12)
    return rows
