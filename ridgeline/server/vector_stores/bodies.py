"""The bodies /v1/vector_stores sends, as typed structs in OpenAI's shapes.

Fields that OpenAI has not are at the end of a struct: they tell where a result stands in its file.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ridgeline.retrieval.chunking.strategy import AUTO_OVERLAP, AUTO_TOKENS, Strategy
from ridgeline.retrieval.ingest.records import (
    Attribute,
    FileBatch,
    FileCounts,
    FileFailure,
    FileStatus,
    StoreFile,
    VectorStoreRow,
)


class ShownExpiry(msgspec.Struct, frozen=True):
    days: int
    anchor: Literal["last_active_at"] = "last_active_at"


class VectorStoreBody(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["vector_store"] = "vector_store"
    created_at: int
    name: str
    description: str | None
    usage_bytes: int
    file_counts: FileCounts
    status: Literal["expired", "in_progress", "completed"]
    expires_after: ShownExpiry | None
    expires_at: int | None
    last_active_at: int
    metadata: dict[str, str]
    dimensions: int | None

    @classmethod
    def of(cls, row: VectorStoreRow, counts: FileCounts, usage_bytes: int) -> VectorStoreBody:
        return cls(
            id=row.id,
            created_at=row.created_at,
            name=row.name,
            description=row.description,
            usage_bytes=usage_bytes,
            file_counts=counts,
            status="expired" if row.expired else "in_progress" if counts.in_progress else "completed",
            expires_after=None if row.expires_days is None else ShownExpiry(row.expires_days),
            expires_at=row.expires_at,
            last_active_at=row.active_at,
            metadata=row.metadata,
            dimensions=row.dimensions,
        )


class VectorStoreList(msgspec.Struct, frozen=True):
    data: list[VectorStoreBody]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class VectorStoreDeleted(msgspec.Struct, frozen=True):
    id: str
    deleted: bool = True
    object: Literal["vector_store.deleted"] = "vector_store.deleted"


class ShownStatic(msgspec.Struct, frozen=True):
    max_chunk_size_tokens: int = AUTO_TOKENS
    chunk_overlap_tokens: int = AUTO_OVERLAP


class ShownStrategy(msgspec.Struct, frozen=True, omit_defaults=True):
    """`static` as OpenAI shows it, also for `auto`; for our own kinds their name, with the same sizes."""

    type: Literal["static", "sentences", "markdown", "code"] | msgspec.UnsetType = msgspec.UNSET
    static: ShownStatic | msgspec.UnsetType = msgspec.UNSET

    @classmethod
    def of(cls, strategy: Strategy) -> ShownStrategy:
        kind = "static" if strategy.kind == "tokens" else strategy.kind
        return cls(kind, ShownStatic(strategy.size, strategy.overlap))


class ShownProgress(msgspec.Struct, frozen=True):
    """A file is embedded in pieces: chunks, or parts of long ones."""

    pieces_done: int
    pieces_total: int


class StoreFileBody(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["vector_store.file"] = "vector_store.file"
    created_at: int
    vector_store_id: str
    usage_bytes: int
    status: FileStatus
    last_error: FileFailure | None
    attributes: dict[str, Attribute]
    chunking_strategy: ShownStrategy
    filename: str
    chunks: int
    progress: ShownProgress | None  # null before the file is cut, and when it has ended

    @classmethod
    def of(cls, file: StoreFile, progress: ShownProgress | None = None) -> StoreFileBody:
        return cls(
            id=file.file_id,
            created_at=file.created_at,
            vector_store_id=file.store_id,
            usage_bytes=file.usage_bytes,
            status=file.status,
            last_error=file.failure,
            attributes=file.attributes,
            chunking_strategy=ShownStrategy.of(file.strategy),
            filename=file.filename,
            chunks=file.chunks,
            progress=progress if file.status == "in_progress" else None,
        )


class StoreFileList(msgspec.Struct, frozen=True):
    data: list[StoreFileBody]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class StoreFileDeleted(msgspec.Struct, frozen=True):
    id: str
    deleted: bool = True
    object: Literal["vector_store.file.deleted"] = "vector_store.file.deleted"


class TextContent(msgspec.Struct, frozen=True):
    text: str
    type: Literal["text"] = "text"


class FileContent(msgspec.Struct, frozen=True):
    """The parsed text, whole: the offsets of results and citations refer to it."""

    data: list[TextContent]
    object: Literal["vector_store.file_content.page"] = "vector_store.file_content.page"
    has_more: bool = False
    next_page: None = None


class FileBatchBody(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["vector_store.files_batch"] = "vector_store.files_batch"
    created_at: int
    vector_store_id: str
    status: Literal["in_progress", "completed", "cancelled", "failed"]
    file_counts: FileCounts

    @classmethod
    def of(cls, batch: FileBatch, counts: FileCounts) -> FileBatchBody:
        status: Literal["in_progress", "completed", "cancelled", "failed"] = "completed"
        if batch.cancelled:
            status = "cancelled"
        elif counts.in_progress:
            status = "in_progress"
        elif counts.total and counts.failed == counts.total:
            status = "failed"
        return cls(
            id=batch.id,
            created_at=batch.created_at,
            vector_store_id=batch.store_id,
            status=status,
            file_counts=counts,
        )


class ExplainedLeg(msgspec.Struct, frozen=True):
    name: str
    rank: int | None
    score: float | None
    reason: str


class Explained(msgspec.Struct, frozen=True):
    """With `explain`: what each leg and the filter said, and why a candidate was left out."""

    legs: list[ExplainedLeg]
    filter: str
    dropped: str


class SearchResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    file_id: str
    filename: str
    score: float
    attributes: dict[str, Attribute] | msgspec.UnsetType = msgspec.UNSET
    content: list[TextContent] | msgspec.UnsetType = msgspec.UNSET
    begin: int  # characters of the file's parsed text, as `…/content` gives it
    end: int
    explained: Explained | msgspec.UnsetType = msgspec.UNSET


class SearchPage(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["vector_store.search_results.page"] = "vector_store.search_results.page"
    search_query: list[str]
    data: list[SearchResult]
    has_more: bool = False
    next_page: None = None
    files_in_progress: int = 0  # of this store; what they hold is not found yet
    left_out: list[SearchResult] = []  # with `explain`
