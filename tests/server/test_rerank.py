"""POST /v1/rerank and /v1/score against a real server: an embedding model, and a cross-encoder."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import torch

from tests.patience import PATIENCE_S
from tests.server.conftest import VectorServer

QUERY = "Where do penguins live?"
DOCUMENTS = ["The stock market fell.", {"text": "Penguins live in Antarctica."}, "Bread is baked in ovens."]


@pytest.fixture
def http(vector_server: VectorServer) -> Any:
    with httpx.Client(base_url=vector_server.base_url, timeout=PATIENCE_S) as client:
        yield client


def ask(http: httpx.Client, path: str, **body: Any) -> Any:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_the_fitting_document_comes_first_with_its_own_index(http: httpx.Client, path: str) -> None:
    answer = ask(http, path, query=QUERY, documents=DOCUMENTS, return_documents=True)
    results = answer["results"]
    assert sorted(result["index"] for result in results) == [0, 1, 2]
    assert results[0]["index"] == 1
    assert results[0]["document"] == {"text": "Penguins live in Antarctica."}
    scores = [result["relevance_score"] for result in results]
    assert scores == sorted(scores, reverse=True)
    assert answer["method"] == "cosine"
    assert answer["model"] == "all-minilm-l6-v2"
    assert answer["usage"]["total_tokens"] > 10
    assert "truncated" not in results[0]


def test_top_n_keeps_the_best_and_documents_stay_out_unless_asked_for(http: httpx.Client) -> None:
    (best,) = ask(http, "/v1/rerank", query=QUERY, documents=DOCUMENTS, top_n=1)["results"]
    assert best["index"] == 1
    assert "document" not in best


def test_a_document_that_does_not_fit_is_cut_and_marked(http: httpx.Client) -> None:
    long = "Penguins live in Antarctica. " * 100
    results = ask(http, "/v1/rerank", query=QUERY, documents=["ovens", long])["results"]
    assert [result["index"] for result in results] == [1, 0]
    assert results[0]["truncated"] is True
    short = ask(http, "/v1/rerank", query=QUERY, documents=["ovens", long], max_tokens_per_doc=8)
    assert short["usage"]["total_tokens"] < 30


def test_scores_of_an_embedding_model_are_cosines(http: httpx.Client) -> None:
    texts = ["a cat", "a kitten", "a car"]
    scored = ask(http, "/v1/score", text_1="a cat", text_2=texts)
    first, second, third = (item["score"] for item in scored["data"])
    assert first == pytest.approx(1.0, abs=1e-5)
    assert 1.0 > second > third
    assert scored["method"] == "cosine"
    paired = ask(http, "/score", text_1=texts, text_2=texts)
    assert [item["score"] for item in paired["data"]] == pytest.approx([1.0] * 3, abs=1e-5)


def test_a_cross_encoder_scores_pairs_as_transformers_does(
    http: httpx.Client, vector_server: VectorServer
) -> None:
    # [CLS] 2, [SEP] 3; "where is paris ?" and "paris is in france ." by the tiny vocabulary
    query, document = [37, 34, 33, 38], [33, 34, 35, 36, 39]
    ids = torch.tensor([[2, *query, 3, *document, 3]])
    types = torch.tensor([[0] * 6 + [1] * 6])
    with torch.inference_mode():
        logit = vector_server.reference(ids, token_type_ids=types).logits
    expected = float(torch.sigmoid(logit))
    asked = {"model": vector_server.cross_encoder, "query": "where is paris?"}
    answer = ask(http, "/v1/rerank", documents=["cat dog", "Paris is in France."], **asked)
    scores = {result["index"]: result["relevance_score"] for result in answer["results"]}
    assert answer["method"] == "cross_encoder"
    assert scores[1] == pytest.approx(expected, abs=1e-5)
    assert scores[0] != pytest.approx(expected, abs=1e-3)
    scored = ask(
        http,
        "/v1/score",
        model=vector_server.cross_encoder,
        text_1="where is paris?",
        text_2="paris is in france.",
    )
    assert scored["data"][0]["score"] == pytest.approx(expected, abs=1e-5)


def test_a_pair_that_does_not_fit_a_cross_encoder_is_cut_or_refused(
    http: httpx.Client, vector_server: VectorServer
) -> None:
    model, long = vector_server.cross_encoder, "cat " * 50
    (result,) = ask(http, "/v1/rerank", model=model, query="dog", documents=[long])["results"]
    assert result["truncated"] is True
    answer = http.post("/v1/score", json={"model": model, "text_1": "dog", "text_2": ["cat", long]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "text_2[1]")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"] * 2049}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
        ("/v1/rerank", {"query": "word " * 600, "documents": ["b"]}, "query"),
        ("/v1/rerank", {"documents": ["b"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": [{"txt": "b"}]}, "documents[0].txt"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "rank_fields": ["title"]}, "rank_fields"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/v1/score", {"text_1": "a", "text_2": ["b", "word " * 600]}, "text_2[1]"),
    ],
)
def test_what_cannot_be_scored_is_named(http: httpx.Client, path: str, body: Any, param: str) -> None:
    answer = http.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
