"""A vector store of a server or gateway as LangChain's VectorStore. Needs langchain-core.

    store = RidgelineVectorStore("http://127.0.0.1:8000", "notes")
    store.add_texts(["Black tea is fully oxidised."], [{"year": 2026}])
    store.as_retriever(search_kwargs={"k": 4}).invoke("Is black tea oxidised?")

The server embeds: an `embedding` that LangChain gives is not used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import VectorStore

from ridgeline.retrieval.adapters.texts import ID, StoredTexts, metadata_of, new_ids
from ridgeline.retrieval.client import Found, VectorStoreClient


class RidgelineVectorStore(VectorStore):
    """Scores are higher for better texts; `filter` is one of OpenAI's (docs/retrieval.md)."""

    def __init__(
        self, url: str, store: str, *, api_key: str = "", client: VectorStoreClient | None = None
    ) -> None:
        self._texts = StoredTexts(client or VectorStoreClient(url, api_key), store)

    @property
    def store_id(self) -> str:
        return self._texts.store_id

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        given = list(texts)
        named = new_ids(ids, len(given))
        self._texts.add(given, metadatas or [{} for _ in given], named)
        return named

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool | None:
        """All texts without ids."""
        if ids is None:
            files = self._texts.client.files(self.store_id)
            ids = [str(file["attributes"][ID]) for file in files if ID in file["attributes"]]
        self._texts.delete(ids)
        return True

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        found = {file["attributes"][ID]: file for file in self._texts.files(ids)}
        return [
            Document(
                self._texts.text(found[id]),
                id=id,
                metadata={key: value for key, value in found[id]["attributes"].items() if key != ID},
            )
            for id in ids
            if id in found
        ]

    def similarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        return [document for document, _ in self.similarity_search_with_score(query, k, **kwargs)]

    def similarity_search_with_score(
        self, query: str, k: int = 4, filter: dict[str, Any] | None = None, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        """kwargs: weights (vector, text), ranker, threshold."""
        return [(_document(found), found.score) for found in self._texts.search(query, k, filter, **kwargs)]

    def _select_relevance_score_fn(self) -> Any:
        return lambda score: score  # between 0 and 1 with the default ranking

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings | None = None,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        url: str = "http://127.0.0.1:8000",
        store: str = "langchain",
        api_key: str = "",
        **kwargs: Any,
    ) -> RidgelineVectorStore:
        made = cls(url, store, api_key=api_key)
        made.add_texts(texts, metadatas, ids=ids)
        return made


def _document(found: Found) -> Document:
    return Document(found.text, id=str(found.attributes.get(ID, found.file_id)), metadata=metadata_of(found))
