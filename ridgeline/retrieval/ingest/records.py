"""The rows of the catalog: vector stores, their files, and batches of files."""

from __future__ import annotations

import secrets
from typing import Literal, TypeAlias

import msgspec

from ridgeline.retrieval.chunking.strategy import AUTO, Strategy
from ridgeline.retrieval.parsing.errors import FailureCode

Attribute: TypeAlias = str | float | bool  # as in `retrieval.types`, which imports numpy
DAY_S = 24 * 3600
FileStatus = Literal["in_progress", "completed", "cancelled", "failed"]
STATUSES: tuple[FileStatus, ...] = ("in_progress", "completed", "cancelled", "failed")


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"


class VectorStoreRow(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    name: str
    description: str | None = None
    metadata: dict[str, str] = {}
    created_at: int
    active_at: int
    expires_days: int | None = None
    expired: bool = False
    dimensions: int | None = None  # of the model's vectors, the first ones; None: all

    @property
    def expires_at(self) -> int | None:
        return None if self.expires_days is None else self.active_at + self.expires_days * DAY_S


class FileFailure(msgspec.Struct, frozen=True):
    code: FailureCode
    message: str


class StoreFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file in a vector store: also the job that makes it searchable. `number` tells it from an earlier
    one of the same id.
    """

    number: int = 0
    store_id: str
    file_id: str
    filename: str
    created_at: int
    status: FileStatus = "in_progress"
    attributes: dict[str, Attribute] = {}
    strategy: Strategy = AUTO
    batch_id: str | None = None
    usage_bytes: int = 0
    chunks: int = 0
    failure: FileFailure | None = None


class FileCounts(msgspec.Struct, frozen=True):
    in_progress: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    total: int = 0

    @classmethod
    def of(cls, by_status: dict[str, int]) -> FileCounts:
        return cls(**by_status, total=sum(by_status.values()))


class FileBatch(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    store_id: str
    created_at: int
    cancelled: bool = False


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """Which rows of a list: those after or before an id, at most `limit`."""

    limit: int = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None
    before: str | None = None
