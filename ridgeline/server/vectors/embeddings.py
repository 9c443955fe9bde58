"""POST /v1/embeddings: texts or token ids in, one vector for each, as floats or base64."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ridgeline.engine.client.client import AsyncClient
from ridgeline.engine.link.packed_texts import PackedTexts, pack_texts
from ridgeline.server.errors import ApiError, BadRequest
from ridgeline.server.http.decoding import decode
from ridgeline.server.http.off_loop import off_loop
from ridgeline.server.http.read_body import read_body
from ridgeline.server.openai_api.response_bodies import encode
from ridgeline.server.served_models import Served, ServedModels
from ridgeline.server.vectors.bodies import Embedding, EmbeddingList, VectorUsage
from ridgeline.server.vectors.protocol import EmbeddingRequest
from ridgeline.server.vectors.run import compute
from ridgeline.server.vectors.texts import embedding_texts

if TYPE_CHECKING:
    from ridgeline.engine.client.open_embedding import Floats

BYTES_PER_NUMBER = 20  # of JSON, approximately; decides whether to encode in a thread
FORMATS = ("float", "base64")


async def embeddings(request: Request) -> Response:
    served_models = ServedModels.of(request)
    raw = await read_body(request, served_models.config)
    read = await off_loop(len(raw), lambda: read_embedding(served_models, decode(raw, EmbeddingRequest)))
    served, body, texts = read
    vectors = await compute(request, served, body, texts)
    answer = await off_loop(
        vectors.size * BYTES_PER_NUMBER, lambda: encode(_answer(body, served.name, vectors, texts.num_tokens))
    )
    return Response(answer, media_type="application/json")


def read_embedding(
    served_models: ServedModels, body: EmbeddingRequest
) -> tuple[Served, EmbeddingRequest, PackedTexts]:
    """The requested model, and the texts as it takes them."""
    served = served_models.served(body.model, "embed")
    client = served.ready_client()
    _check(body, client)
    return served, body, pack_texts(embedding_texts(client, body))


def _check(body: EmbeddingRequest, client: AsyncClient) -> None:
    if client.hello.scores_pairs:
        message = "model: this model scores pairs of texts; use /v1/rerank or /v1/score"
        raise ApiError(400, message, param="model", code="model_not_suitable")
    if body.encoding_format is not None and body.encoding_format not in FORMATS:
        raise BadRequest("encoding_format", f"one of {' and '.join(FORMATS)}, not {body.encoding_format!r}")
    size = client.hello.vector_size
    if body.dimensions is not None and not 1 <= body.dimensions <= size:
        raise BadRequest("dimensions", f"this model's vectors have {size} numbers; got {body.dimensions}")


def _answer(body: EmbeddingRequest, name: str, vectors: Floats, tokens: int) -> EmbeddingList:
    # Row by row: a million floats in one call would block all streams for 100 ms.
    data = [msgspec.Raw(encode(_embedding(i, row, body))) for i, row in enumerate(_asked_size(body, vectors))]
    return EmbeddingList(cast(list[Embedding], data), name, VectorUsage(tokens, tokens))


def rows(body: EmbeddingRequest, vectors: Floats) -> list[msgspec.Raw]:
    """Every vector as a JSON list."""
    return [msgspec.Raw(encode(row.tolist())) for row in _asked_size(body, vectors)]


def _asked_size(body: EmbeddingRequest, vectors: Floats) -> Floats:
    return vectors if body.dimensions is None else shortened(vectors, body.dimensions)


def _embedding(index: int, row: Floats, body: EmbeddingRequest) -> Embedding:
    if body.encoding_format == "base64":
        return Embedding(index, base64.b64encode(row.tobytes()).decode())
    return Embedding(index, row.tolist())


def shortened(vectors: Floats, dimensions: int) -> Floats:
    """The first numbers of each vector, normalized to length 1."""
    import numpy as np

    kept = np.ascontiguousarray(vectors[:, :dimensions])
    lengths = np.maximum(np.linalg.norm(kept, axis=1, keepdims=True), np.float32(1e-12))
    return np.asarray(kept / lengths, np.float32)
