"""A vector store of a server or gateway as LlamaIndex's vector store. Needs llama-index-core.

    store = RidgelineVectorStore(url="http://127.0.0.1:8000", store="notes")
    store.add([TextNode(text="Black tea is fully oxidised.", metadata={"year": 2026})])
    index = VectorStoreIndex.from_vector_store(store, embed_model=MockEmbedding(1))
    index.as_retriever(similarity_top_k=4).retrieve("Is black tea oxidised?")

The server embeds: queries go to it as texts, and embeddings of nodes are not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.schema import BaseNode, MetadataMode, TextNode
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    FilterCondition,
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
    VectorStoreQueryResult,
)

from ridgeline.retrieval.adapters.texts import ID, StoredTexts, metadata_of, new_ids
from ridgeline.retrieval.client import VectorStoreClient
from ridgeline.retrieval.errors import BadInput

_DOCUMENT = "ref_doc_id"
_WEIGHTS = {
    VectorStoreQueryMode.DEFAULT: (1.0, 0.0),
    VectorStoreQueryMode.TEXT_SEARCH: (0.0, 1.0),
    VectorStoreQueryMode.HYBRID: (1.0, 1.0),
}
_OPERATORS = {
    FilterOperator.EQ: "eq",
    FilterOperator.NE: "ne",
    FilterOperator.GT: "gt",
    FilterOperator.GTE: "gte",
    FilterOperator.LT: "lt",
    FilterOperator.LTE: "lte",
    FilterOperator.IN: "in",
    FilterOperator.NIN: "nin",
}


class RidgelineVectorStore(BasePydanticVectorStore):
    stores_text: bool = True
    is_embedding_query: bool = False
    flat_metadata: bool = True
    url: str
    store: str
    _texts: StoredTexts = PrivateAttr()

    def __init__(
        self, url: str, store: str, api_key: str = "", client: VectorStoreClient | None = None
    ) -> None:
        super().__init__(url=url, store=store)  # type: ignore[call-arg]
        self._texts = StoredTexts(client or VectorStoreClient(url, api_key), store)

    @classmethod
    def class_name(cls) -> str:
        return "RidgelineVectorStore"

    @property
    def client(self) -> VectorStoreClient:
        return self._texts.client

    def add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        metadata = []
        for node in nodes:
            named = dict(node.metadata)
            if node.ref_doc_id:
                named[_DOCUMENT] = node.ref_doc_id
            metadata.append(named)
        ids = new_ids([node.node_id for node in nodes], len(nodes))
        self._texts.add([node.get_content(MetadataMode.NONE) for node in nodes], metadata, ids)
        return ids

    def delete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        files = self._texts.client.files(self._texts.store_id)
        self.delete_nodes(
            [str(one["attributes"][ID]) for one in files if one["attributes"].get(_DOCUMENT) == ref_doc_id]
        )

    def delete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **delete_kwargs: Any
    ) -> None:
        if filters is not None:
            raise BadInput("filters", "nodes are deleted by their ids")
        self._texts.delete(node_ids or [])

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        if not query.query_str:
            raise BadInput("query_str", "is missing: the server embeds queries")
        if query.mode not in _WEIGHTS:
            known = ", ".join(mode.value for mode in _WEIGHTS)
            raise BadInput("mode", f"{query.mode!r} is not one of {known}")
        parts = [_filter(query.filters)] if query.filters and query.filters.filters else []
        for key, values in ((ID, query.node_ids), (_DOCUMENT, query.doc_ids)):
            if values:
                parts.append({"type": "in", "key": key, "value": list(values)})
        filters = {"type": "and", "filters": parts} if parts else None
        found = self._texts.search(
            query.query_str, query.similarity_top_k, filters, weights=_WEIGHTS[query.mode]
        )
        nodes = [
            TextNode(
                id_=str(one.attributes.get(ID, one.file_id)),
                text=one.text,
                metadata={key: value for key, value in metadata_of(one).items() if key != _DOCUMENT},
            )
            for one in found
        ]
        return VectorStoreQueryResult(
            nodes=nodes, similarities=[one.score for one in found], ids=[node.node_id for node in nodes]
        )


def _filter(given: MetadataFilters) -> dict[str, Any]:
    if given.condition not in (FilterCondition.AND, FilterCondition.OR, None):
        raise BadInput("filters.condition", f"{given.condition!r} is not one of and, or")
    parts = [_filter(one) if isinstance(one, MetadataFilters) else _compare(one) for one in given.filters]
    return {"type": (given.condition or FilterCondition.AND).value, "filters": parts}


def _compare(one: MetadataFilter) -> dict[str, Any]:
    if one.operator not in _OPERATORS:
        raise BadInput(f"filters.{one.key}", f"the operator {one.operator.value!r} is not served")
    return {"type": _OPERATORS[one.operator], "key": one.key, "value": one.value}
