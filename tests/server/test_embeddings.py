"""POST /v1/embeddings against a real server with the real all-minilm-l6-v2."""

from __future__ import annotations

import base64
from typing import Any

import grpc
import httpx
import numpy as np
import pytest

from ridgeline.server.app import ENDPOINTS
from ridgeline.server.http.endpoint import Endpoint
from ridgeline.server.vectors.protocol import EmbeddingRequest, RerankRequest, ScoreRequest
from ridgeline.web.grpc.v1 import inference_pb2 as pb
from ridgeline.web.grpc.v1.inference_pb2_grpc import InferenceStub
from tests.patience import PATIENCE_S
from tests.server.conftest import VectorServer
from tests.server.documented import assert_answer
from tests.server.grpc.rpc_stage import refused

TEXTS = ["a cat sat on the mat", "stock markets fell sharply", "x", "The kitten slept. " * 20]


@pytest.fixture
def http(vector_server: VectorServer) -> Any:
    with httpx.Client(base_url=vector_server.base_url, timeout=PATIENCE_S) as client:
        yield client


def embed(http: httpx.Client, given: Any, **fields: Any) -> Any:
    answer = http.post("/v1/embeddings", json={"input": given, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def vectors(answer: Any) -> Any:
    assert [item["index"] for item in answer["data"]] == list(range(len(answer["data"])))
    return np.array([item["embedding"] for item in answer["data"]], np.float32)


def refusal(http: httpx.Client, **body: Any) -> tuple[int, str | None, str]:
    answer = http.post("/v1/embeddings", json=body)
    error = answer.json()["error"]
    return answer.status_code, error["param"], error["code"]


@pytest.mark.parametrize(
    "endpoint",
    [one for one in ENDPOINTS if one.request in (EmbeddingRequest, RerankRequest, ScoreRequest)],
    ids=lambda one: one.path,
)
def test_answers_are_what_the_openapi_document_says(http: httpx.Client, endpoint: Endpoint) -> None:
    for body in endpoint.examples:
        answer = http.post(endpoint.path, json=body)
        assert answer.status_code == 200, answer.text
        assert_answer(endpoint, answer)


def test_vectors_are_those_of_sentence_transformers(http: httpx.Client) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    from ridgeline.models.files.pull import ensure

    model = sentence_transformers.SentenceTransformer(str(ensure("all-minilm-l6-v2").path), device="cpu")
    answer = embed(http, TEXTS)
    cosines = (vectors(answer) * model.encode(TEXTS)).sum(axis=1)
    assert cosines.min() > 0.9999  # where there are bf16 products; elsewhere the vectors are equal to 1e-6
    assert answer["model"] == "all-minilm-l6-v2"
    tokens = sum(len(ids) for ids in model.tokenizer(TEXTS)["input_ids"])
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


def test_a_text_alone_in_a_list_as_ids_and_in_base64_has_one_vector(http: httpx.Client) -> None:
    together = vectors(embed(http, TEXTS))
    alone = vectors(embed(http, TEXTS[1]))
    assert np.array_equal(alone[0], together[1])
    assert np.array_equal(vectors(embed(http, TEXTS[::-1]))[::-1], together)
    asked = {"prompt": TEXTS[1], "model": "all-minilm-l6-v2"}
    ids = http.post("/tokenize", json=asked).json()["tokens"]
    assert np.array_equal(vectors(embed(http, ids)), alone)
    assert np.array_equal(vectors(embed(http, [ids, ids]))[1], alone[0])
    (item,) = embed(http, TEXTS[1], encoding_format="base64")["data"]
    assert np.array_equal(np.frombuffer(base64.b64decode(item["embedding"]), "<f4"), alone[0])


def test_fewer_dimensions_are_the_first_ones_of_length_one(http: httpx.Client) -> None:
    (whole,), (short,) = vectors(embed(http, "hello")), vectors(embed(http, "hello", dimensions=16))
    assert np.allclose(short, whole[:16] / np.linalg.norm(whole[:16]), atol=1e-6)


def test_a_long_text_is_refused_by_its_place_and_cut_only_when_asked(http: httpx.Client) -> None:
    long = "word " * 600
    assert refusal(http, input=["fine", long]) == (400, "input[1]", "context_length_exceeded")
    assert refusal(http, input=long) == (400, "input", "context_length_exceeded")
    cut = embed(http, ["word", long], truncate_prompt_tokens=-1)
    assert cut["usage"]["prompt_tokens"] == 3 + 256
    assert np.array_equal(vectors(cut)[1], vectors(embed(http, "word " * 254))[0])
    assert embed(http, long, truncate_prompt_tokens=5)["usage"]["prompt_tokens"] == 5
    assert embed(http, long, truncate=True)["usage"]["prompt_tokens"] == 256


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": ["a", 5]}, "input"),
        ({"input": [[1], []]}, "input[1]"),
        ({"input": [[30522]]}, "input[0]"),
        ({"input": [-1]}, "input"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 385}, "dimensions"),
        ({"input": "a", "truncate_prompt_tokens": 999}, "truncate_prompt_tokens"),
        ({"input": "a", "dimension": 4}, "dimension"),
        ({"input": {"a": 1}}, "input"),
        ({}, "input"),
        ({"input": "a", "model": "tiny-cross"}, "model"),
    ],
)
def test_what_cannot_be_embedded_is_named(http: httpx.Client, body: Any, param: str) -> None:
    assert refusal(http, **body)[:2] == (400, param)


def test_an_encoder_does_not_chat_and_says_so(http: httpx.Client) -> None:
    body = {"model": "all-minilm-l6-v2", "messages": [{"role": "user", "content": "hello"}]}
    answer = http.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")


def test_figures_and_logs_count_embeddings(http: httpx.Client) -> None:
    embed(http, "one more")
    shown = http.get("/metrics").text
    assert 'endpoint="/v1/embeddings"' in shown
    cards = {card["id"]: card for card in http.get("/v1/models").json()["data"]}
    assert cards["all-minilm-l6-v2"]["task"] == "embed"
    assert cards["all-minilm-l6-v2"]["max_model_len"] == 256


def test_what_embeddings_used_can_be_asked_for(http: httpx.Client) -> None:
    usage = http.post(
        "/v1/embeddings", json={"input": ["a b", "c"]}, headers={"x-request-id": "req_7"}
    ).json()
    told = http.get("/v1/usage/req_7").json()
    assert told["status"] == "finished"
    assert told["usage"]["prompt_tokens"] == usage["usage"]["prompt_tokens"] > 0
    assert told["usage"]["completion_tokens"] == 0


async def test_grpc_gives_the_vectors_of_http(http: httpx.Client, vector_server: VectorServer) -> None:
    over_http = embed(http, TEXTS, model="all-minilm-l6-v2")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{vector_server.grpc_port}") as channel:
        stub = InferenceStub(channel)
        answer = await stub.Embed(pb.EmbedRequest(model="all-minilm-l6-v2", texts=TEXTS))
        short = await stub.Embed(pb.EmbedRequest(texts=TEXTS[:1], dimensions=8))
        error = await refused(stub.Embed(pb.EmbedRequest(texts=TEXTS[:1], dimensions=1000)))
        empty = await refused(stub.Embed(pb.EmbedRequest()))
    np.testing.assert_allclose([list(one.values) for one in answer.embeddings], vectors(over_http), atol=1e-6)
    assert answer.usage.prompt_tokens == over_http["usage"]["prompt_tokens"]
    assert len(short.embeddings[0].values) == 8
    assert error.code() is empty.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert str(error.details()).startswith("dimensions:")
    assert str(empty.details()).startswith("texts")
