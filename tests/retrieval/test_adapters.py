"""LangChain's and LlamaIndex's vector stores over a real server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ridgeline.retrieval.client import RequestFailed, VectorStoreClient
from ridgeline.retrieval.errors import BadInput
from tests.conftest import LiveServer, await_ready, start_server
from tests.patience import PATIENCE_S

TEXTS = [
    "Black tea is fully oxidised.",
    "Coffee beans are roasted at about 200 degrees.",
    "Green tea is not oxidised.",
]
KINDS: list[dict[str, Any]] = [
    {"kind": "tea", "year": 2024},
    {"kind": "coffee", "year": 2025, "hot": True},
    {"kind": "tea", "year": 2026},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("adapters")
    started = start_server(folder / "log", "--state-dir", str(folder / "state"), models=("all-minilm-l6-v2",))
    try:
        await_ready(started)
        yield started
    finally:
        started.process.terminate()
        started.process.wait(PATIENCE_S)


def test_langchain_stores_finds_filters_replaces_and_deletes(server: LiveServer) -> None:
    pytest.importorskip("langchain_core", reason="langchain-core is not installed")
    from ridgeline.retrieval.adapters.langchain import RidgelineVectorStore

    store = RidgelineVectorStore.from_texts(
        TEXTS, metadatas=KINDS, ids=["a", "b", "c"], url=server.base_url, store="lc"
    )
    again = RidgelineVectorStore(server.base_url, "lc")
    assert again.store_id == store.store_id
    [found] = store.similarity_search("roasted coffee", k=1)
    assert (found.id, found.page_content, found.metadata) == ("b", TEXTS[1], {**KINDS[1], "year": 2025.0})
    where = {"type": "eq", "key": "kind", "value": "tea"}
    scored = store.similarity_search_with_score("oxidised", k=5, filter=where)
    assert {document.id for document, _ in scored} == {"a", "c"}
    assert [score for _, score in scored] == sorted((score for _, score in scored), reverse=True)
    retriever = store.as_retriever(search_kwargs={"k": 2})
    assert len(retriever.invoke("tea")) == 2
    assert store.add_texts(["White tea is hardly oxidised."], ids=["a"]) == ["a"]
    assert [one.page_content for one in store.get_by_ids(["a", "none"])] == ["White tea is hardly oxidised."]
    assert len(store.similarity_search("tea", k=10)) == 3
    assert store.delete(["a", "b"])
    assert [one.id for one in store.similarity_search("tea", k=10)] == ["c"]
    assert store.delete()
    assert store.similarity_search("tea", k=10) == []
    with pytest.raises(BadInput, match=r"metadata\.tags"):
        store.add_texts(["x"], [{"tags": ["a"]}])


def test_llamaindex_stores_finds_filters_and_deletes(server: LiveServer) -> None:
    pytest.importorskip("llama_index.core", reason="llama-index-core is not installed")
    from llama_index.core import MockEmbedding, VectorStoreIndex
    from llama_index.core.schema import NodeRelationship, RelatedNodeInfo, TextNode
    from llama_index.core.vector_stores.types import (
        FilterOperator,
        MetadataFilter,
        MetadataFilters,
        VectorStoreQuery,
        VectorStoreQueryMode,
    )

    from ridgeline.retrieval.adapters.llamaindex import RidgelineVectorStore

    store = RidgelineVectorStore(server.base_url, "li")
    nodes: Any = [
        TextNode(id_=f"n{i}", text=text, metadata=kind)
        for i, (text, kind) in enumerate(zip(TEXTS, KINDS, strict=True))
    ]
    nodes[0].relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id="doc-of-n0")
    assert store.add(nodes) == ["n0", "n1", "n2"]
    index = VectorStoreIndex.from_vector_store(store, embed_model=MockEmbedding(1))
    [found] = index.as_retriever(similarity_top_k=1).retrieve("roasted coffee")
    assert (found.node_id, found.text, found.node.metadata["kind"]) == ("n1", TEXTS[1], "coffee")
    late = MetadataFilter(key="year", value=2025, operator=FilterOperator.GTE)
    tea = MetadataFilter(key="kind", value="tea")
    query = VectorStoreQuery(
        query_str="oxidised", similarity_top_k=5, filters=MetadataFilters(filters=[late, tea])
    )
    assert store.query(query).ids == ["n2"]
    words = VectorStoreQuery(query_str="beans", similarity_top_k=5, mode=VectorStoreQueryMode.TEXT_SEARCH)
    assert store.query(words).ids == ["n1"]
    store.delete("doc-of-n0")
    store.delete_nodes(["n1"])
    assert store.query(VectorStoreQuery(query_str="tea", similarity_top_k=5)).ids == ["n2"]
    with pytest.raises(BadInput, match="mode"):
        store.query(VectorStoreQuery(query_str="x", mode=VectorStoreQueryMode.MMR))


def test_errors_say_what_happened(server: LiveServer) -> None:
    with pytest.raises(RequestFailed, match="cannot reach http://127"):
        list(VectorStoreClient("http://127.0.0.1:1").stores())
    with pytest.raises(RequestFailed, match="404") as raised:
        VectorStoreClient(server.base_url).search("vs_none", "x")
    assert raised.value.status == 404
