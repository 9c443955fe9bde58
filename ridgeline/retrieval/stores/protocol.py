"""Store: what every store of chunks does. Tests run one suite on all of them.

Filters are applied before top-k: a search returns k results whenever k rows match. A write is one
transaction: after a crash a document is there with all of its chunks, or as it was before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ridgeline.retrieval.filters import Filter
from ridgeline.retrieval.types import (
    Attributes,
    Chunk,
    Document,
    Namespace,
    NamespaceInfo,
    NamespaceSpec,
    Scored,
    Vector,
)


class Store(Protocol):
    """NamespaceNotFound for a missing namespace, StoreUnavailable while the store cannot be reached."""

    name: str

    async def open(self) -> None:
        """Make or migrate the tables. Called once before all else; several processes may do so at once."""
        ...

    async def create(self, namespace: Namespace, spec: NamespaceSpec) -> None:
        """Make a namespace. Again with the same spec: no change; with another: SpecMismatch."""
        ...

    async def drop(self, namespace: Namespace) -> bool:
        """Remove a namespace and all of its rows; whether it was there."""
        ...

    async def namespaces(self, tenant: str) -> list[NamespaceInfo]:
        """The tenant's namespaces, by name."""
        ...

    async def spec(self, namespace: Namespace) -> NamespaceSpec:
        """What `create` recorded. Asked for by every search, so it counts nothing, unlike `describe`."""
        ...

    async def describe(self, namespace: Namespace) -> NamespaceInfo: ...

    async def put(self, namespace: Namespace, document: Document, chunks: Sequence[Chunk]) -> None:
        """Store a document with its chunks in one transaction; replaces the document of the same id.

        Every chunk needs a vector of the namespace's dimensions and the id of the document. Its attributes
        are the document's: leave them empty or give the same.
        """
        ...

    async def delete(self, namespace: Namespace, document_id: str) -> bool: ...

    async def set_attributes(self, namespace: Namespace, document_id: str, attributes: Attributes) -> bool:
        """Replace the attributes of a document and its chunks; whether it is there."""
        ...

    async def document(self, namespace: Namespace, document_id: str) -> Document | None: ...

    async def documents(self, namespace: Namespace, after: str = "", limit: int = 100) -> list[Document]:
        """Documents in order of id, from the first whose id is above `after`."""
        ...

    async def chunks(self, namespace: Namespace, document_id: str, vectors: bool = False) -> list[Chunk]:
        """A document's chunks by ordinal; empty where it is missing."""
        ...

    async def fetch(
        self, namespace: Namespace, chunk_ids: Sequence[str], vectors: bool = False
    ) -> list[Chunk]:
        """These chunks in the order asked; those that are missing are left out."""
        ...

    async def search_vectors(
        self, namespace: Namespace, queries: Vector, where: Filter | None, k: int
    ) -> list[list[Scored]]:
        """For each row of queries [n, d] the k chunks of highest cosine similarity, best first."""
        ...

    async def search_text(
        self, namespace: Namespace, query: str, where: Filter | None, k: int
    ) -> list[Scored]:
        """The k chunks of highest BM25 score, best first; none without a term of the query."""
        ...

    async def close(self) -> None: ...
