"""What /v1/embeddings, /v1/rerank and /v1/score answer with, in the shapes of OpenAI, Cohere, Jina, vLLM."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

# How a score was made: by a model trained for it, or from an embedding model's vectors.
Method = Literal["cross_encoder", "cosine"]


class VectorUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct, frozen=True):
    index: int
    embedding: list[float] | str  # base64
    object: str = "embedding"


class EmbeddingList(msgspec.Struct, frozen=True):
    data: list[Embedding]
    model: str
    usage: VectorUsage
    object: str = "list"


class DocumentText(msgspec.Struct, frozen=True):
    text: str


class RerankResult(msgspec.Struct, frozen=True):
    index: int
    relevance_score: float
    document: DocumentText | UnsetType = UNSET
    truncated: bool | UnsetType = UNSET  # ours: true where the model did not read all of it


class BilledUnits(msgspec.Struct, frozen=True):
    search_units: int = 1


class ApiVersion(msgspec.Struct, frozen=True):
    version: str = "2"


class RerankMeta(msgspec.Struct, frozen=True):
    """Cohere's clients read it."""

    api_version: ApiVersion = ApiVersion()
    billed_units: BilledUnits = BilledUnits()


class RerankAnswer(msgspec.Struct, frozen=True):
    id: str
    model: str
    method: Method  # ours
    results: list[RerankResult]
    usage: VectorUsage
    meta: RerankMeta = RerankMeta()


class Score(msgspec.Struct, frozen=True):
    index: int
    score: float
    object: str = "score"


class ScoreList(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    method: Method  # ours
    data: list[Score]
    usage: VectorUsage
    object: str = "list"
