"""POST /v1/rerank and /v1/score: how well texts match a query, or each other.

A cross-encoder reads both texts of a pair together and was trained to score them; its logit goes through a
sigmoid. An embedding model was not: its score is the cosine of the two vectors. The answer names the method.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from ridgeline.engine.client.client import AsyncClient
from ridgeline.engine.link.packed_texts import PackedTexts, pack_texts
from ridgeline.server.errors import BadRequest
from ridgeline.server.http.decoding import decode
from ridgeline.server.http.off_loop import off_loop
from ridgeline.server.http.read_body import read_body
from ridgeline.server.http.request_context import RequestContext
from ridgeline.server.openai_api.response_bodies import encode
from ridgeline.server.served_models import Served, ServedModels
from ridgeline.server.vectors.bodies import (
    DocumentText,
    Method,
    RerankAnswer,
    RerankResult,
    Score,
    ScoreList,
    VectorUsage,
)
from ridgeline.server.vectors.protocol import MAX_TEXTS, RerankRequest, ScoreRequest, VectorRequest
from ridgeline.server.vectors.run import compute
from ridgeline.server.vectors.texts import Lengths, cut_texts, encoded


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pairs of texts to score, as the encoder takes them: each pair as one text, or every text once."""

    pairs: list[tuple[int, int]]  # into `texts`; a cross-encoder's are (i, i)
    texts: PackedTexts
    method: Method = "cosine"

    @property
    def usage(self) -> VectorUsage:
        return VectorUsage(self.texts.num_tokens, self.texts.num_tokens)


async def rerank(request: Request) -> Response:
    served_models, context = ServedModels.of(request), RequestContext.of(request)
    raw = await read_body(request, served_models.config)
    served, body, pairs, cut = await off_loop(len(raw), lambda: _read_rerank(served_models, raw))
    scores = await _scores(request, served, body, pairs)
    answer = RerankAnswer(
        f"rerank-{context.request_id}", served.name, pairs.method, _ranked(body, scores, cut), pairs.usage
    )
    return Response(await off_loop(len(raw), lambda: encode(answer)), media_type="application/json")


async def score(request: Request) -> Response:
    served_models, context = ServedModels.of(request), RequestContext.of(request)
    raw = await read_body(request, served_models.config)
    served, body, pairs = await off_loop(len(raw), lambda: _read_score(served_models, raw))
    scores = await _scores(request, served, body, pairs)
    data = [Score(i, value) for i, value in enumerate(scores)]
    answer = ScoreList(
        f"score-{context.request_id}", context.created, served.name, pairs.method, data, pairs.usage
    )
    return Response(encode(answer), media_type="application/json")


# ---- bodies to pairs ----


def _read_rerank(served_models: ServedModels, raw: bytes) -> tuple[Served, RerankRequest, Pairs, set[int]]:
    """Also returns the documents that the model reads only in part."""
    body = decode(raw, RerankRequest)
    served = served_models.served(body.model, "embed")
    client = served.ready_client()
    documents = [each if isinstance(each, str) else each.text for each in body.documents]
    if not documents:
        raise BadRequest("documents", "there are none")
    if len(documents) > MAX_TEXTS:
        raise BadRequest("documents", f"{len(documents)} documents; at most {MAX_TEXTS} in one request")
    if body.top_n is not None and body.top_n < 1:
        raise BadRequest("top_n", f"at least 1, got {body.top_n}")
    lengths = _document_lengths(body, client)
    if client.hello.scores_pairs:
        pairs, cut = _joint(client, [body.query] * len(documents), documents, lengths)
        return served, body, pairs, cut
    query = encoded(client.tokenizer, [body.query], "query", Lengths.of(body, client), single=True)
    texts, cut = cut_texts(client.tokenizer, documents, "documents", lengths)
    return served, body, Pairs([(0, i + 1) for i in range(len(texts))], pack_texts(query + texts)), cut


def _document_lengths(body: RerankRequest, client: AsyncClient) -> Lengths:
    lengths = Lengths.of(body, client, cuts=True)
    asked = body.max_tokens_per_doc
    if asked is None:
        return lengths
    if asked < 3:
        raise BadRequest("max_tokens_per_doc", f"at least 3, got {asked}")
    return Lengths(min(asked, lengths.most), True)


def _read_score(served_models: ServedModels, raw: bytes) -> tuple[Served, ScoreRequest, Pairs]:
    body = decode(raw, ScoreRequest)
    served = served_models.served(body.model, "embed")
    client = served.ready_client()
    first, second = ([given] if isinstance(given, str) else given for given in (body.text_1, body.text_2))
    for field, texts in (("text_1", first), ("text_2", second)):
        if not texts:
            raise BadRequest(field, "the list is empty")
        if len(texts) > MAX_TEXTS:
            raise BadRequest(field, f"{len(texts)} texts; at most {MAX_TEXTS} in one request")
    if len(first) not in (1, len(second)):
        raise BadRequest(
            "text_1", f"{len(first)} texts for {len(second)} of text_2: give 1 or the same number"
        )
    lengths = Lengths.of(body, client)
    if client.hello.scores_pairs:
        paired = first * len(second) if len(first) == 1 else first
        pairs, cut = _joint(client, paired, second, Lengths(lengths.most, True))
        if cut and not lengths.cuts:
            message = f"with its text_1 longer than {lengths.most} tokens; set truncate_prompt_tokens"
            raise BadRequest(f"text_2[{min(cut)}]", message, "context_length_exceeded")
        return served, body, pairs
    left = encoded(client.tokenizer, first, "text_1", lengths, single=isinstance(body.text_1, str))
    right = encoded(client.tokenizer, second, "text_2", lengths, single=isinstance(body.text_2, str))
    places = [(0 if len(left) == 1 else i, len(left) + i) for i in range(len(right))]
    return served, body, Pairs(places, pack_texts(left + right))


def _joint(
    client: AsyncClient, first: Sequence[str], second: Sequence[str], lengths: Lengths
) -> tuple[Pairs, set[int]]:
    """Each pair as one text, and the pairs that were truncated."""
    joined = client.tokenizer.encode_pairs(list(zip(first, second, strict=True)), lengths.most)
    pairs = Pairs(
        [(i, i) for i in range(len(joined))],
        pack_texts([pair.ids for pair in joined], [pair.types for pair in joined]),
        "cross_encoder",
    )
    return pairs, {i for i, pair in enumerate(joined) if pair.is_cut}


# ---- pairs to scores ----


async def _scores(request: Request, served: Served, body: VectorRequest, pairs: Pairs) -> list[float]:
    import numpy as np

    if pairs.method == "cross_encoder":
        logits = await compute(request, served, body, pairs.texts, "score")
        return (1.0 / (1.0 + np.exp(-logits[:, 0].astype(np.float64)))).tolist()  # type: ignore[no-any-return]
    vectors = await compute(request, served, body, pairs.texts)
    vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.float32(1e-12))
    left = vectors[[place for place, _ in pairs.pairs]]
    right = vectors[[place for _, place in pairs.pairs]]
    return np.einsum("ij,ij->i", left, right).astype(np.float64).tolist()  # type: ignore[no-any-return]


def _ranked(body: RerankRequest, scores: list[float], cut: set[int]) -> list[RerankResult]:
    """Best first; of equal scores the one given first."""
    order = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n]
    results = []
    for i in order:
        given = body.documents[i]
        text = given if isinstance(given, str) else given.text
        extra: dict[str, bool | DocumentText] = {"truncated": True} if i in cut else {}
        if body.return_documents:
            extra["document"] = DocumentText(text)
        results.append(RerankResult(i, scores[i], **extra))  # type: ignore[arg-type]
    return results
