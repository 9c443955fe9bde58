"""StoredTexts: texts with an id and metadata in a vector store, as both adapters need them.

A text is a file of one chunk where it fits (4096 tokens), else of several. Its id is the attribute `id`; its
other metadata are attributes: up to 15 keys with strings of up to 512 characters, numbers or booleans.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from ridgeline.retrieval.client import Found, VectorStoreClient
from ridgeline.retrieval.errors import BadInput, RetrievalError

ID = "id"
STRATEGY = {"type": "static", "static": {"max_chunk_size_tokens": 4096, "chunk_overlap_tokens": 0}}
MOST_RESULTS = 50


class StoredTexts:
    def __init__(self, client: VectorStoreClient, store: str) -> None:
        """store: name or id of a vector store; a new one is made for a name that there is not."""
        self.client = client
        found = client.store(store) or client.create_store(store)
        self.store_id: str = found["id"]

    def add(self, texts: Sequence[str], metadata: Sequence[Mapping[str, Any]], ids: Sequence[str]) -> None:
        """Searchable when this returns. A text with an id that is there replaces it."""
        for one in metadata:
            for key, value in one.items():
                if key == ID or not isinstance(value, str | int | float | bool):
                    why = "is the text's own" if key == ID else f"is {type(value).__name__}, not a scalar"
                    raise BadInput(f"metadata.{key}", why)
        old = self.files(ids)
        files = [
            {
                "file_id": self.client.upload("text.txt", text.encode()),
                "attributes": {**one, ID: id},
                "chunking_strategy": STRATEGY,
            }
            for text, one, id in zip(texts, metadata, ids, strict=True)
        ]
        batches = self.client.add(self.store_id, files)
        self.client.wait(self.store_id, batches)
        failed = self.client.failed(self.store_id, batches)
        if failed:
            told = failed[0]["last_error"]["message"]
            raise RetrievalError(f"{len(failed)} of {len(files)} texts could not be stored: {told}")
        self._forget(old)

    def delete(self, ids: Sequence[str]) -> int:
        """How many were there."""
        old = self.files(ids)
        self._forget(old)
        return len(old)

    def files(self, ids: Sequence[str]) -> list[dict[str, Any]]:
        wanted = set(ids)
        if not wanted:
            return []
        there = self.client.files(self.store_id)
        return [file for file in there if file["attributes"].get(ID) in wanted]

    def text(self, file: Mapping[str, Any]) -> str:
        return self.client.text(self.store_id, file["id"])

    def search(
        self, query: str, k: int, filters: Mapping[str, Any] | None = None, **options: Any
    ) -> list[Found]:
        if not 1 <= k <= MOST_RESULTS:
            raise BadInput("k", f"must be 1 to {MOST_RESULTS}, not {k}")
        return self.client.search(self.store_id, query, k=k, filters=filters, **options).found

    def _forget(self, files: Sequence[Mapping[str, Any]]) -> None:
        for file in files:
            self.client.remove(self.store_id, file["id"])
            self.client.delete_file(file["id"])


def new_ids(given: Sequence[str | None] | None, count: int) -> list[str]:
    """The ids given; a new one where there is none."""
    return [one or uuid.uuid4().hex for one in (given or [None] * count)]


def metadata_of(found: Found) -> dict[str, Any]:
    """Its attributes without the id."""
    return {key: value for key, value in found.attributes.items() if key != ID}
