"""The endpoints of this package, for the table in `server.app`."""

from __future__ import annotations

from typing import Any

from ridgeline.server.http.endpoint import Endpoint
from ridgeline.server.vectors.bodies import EmbeddingList, RerankAnswer, ScoreList
from ridgeline.server.vectors.embeddings import embeddings
from ridgeline.server.vectors.protocol import EmbeddingRequest, RerankRequest, ScoreRequest
from ridgeline.server.vectors.scores import rerank, score

_RERANK: dict[str, Any] = {"query": "Where is Paris?", "documents": ["Paris is in France.", {"text": "No."}]}
_SCORE: dict[str, Any] = {"text_1": "a cat", "text_2": ["a kitten", "a car"]}
ERRORS = (429, 504)

ENDPOINTS = [
    Endpoint(
        "POST",
        "/v1/embeddings",
        embeddings,
        "A vector for each text",
        request=EmbeddingRequest,
        response=EmbeddingList,
        errors=ERRORS,
        examples=({"input": "hello"}, {"input": ["a", "b"], "encoding_format": "base64", "dimensions": 64}),
    ),
    *(
        Endpoint(
            "POST",
            path,
            rerank,
            "Documents in the order in which they fit a query",
            request=RerankRequest,
            response=RerankAnswer,
            errors=ERRORS,
            examples=(_RERANK, {**_RERANK, "top_n": 1, "return_documents": True}),
        )
        for path in ("/v1/rerank", "/v2/rerank", "/rerank")
    ),
    *(
        Endpoint(
            "POST",
            path,
            score,
            "How well pairs of texts fit",
            request=ScoreRequest,
            response=ScoreList,
            errors=ERRORS,
            examples=(_SCORE,),
        )
        for path in ("/v1/score", "/score")
    ),
]
