"""What the router's tests share: requests, an embedder without a server, a small artifact."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import msgspec
import numpy as np

from ridgeline.gateway.body import Fields, read_fields
from ridgeline.gateway.routing.config import EmbeddingsConfig
from ridgeline.gateway.routing.embedder import Embedder
from ridgeline.gateway.routing.learned.artifact import Artifact, ModelCost
from ridgeline.gateway.routing.learned.features import Recipe, feature_rows
from ridgeline.gateway.routing.learned.predictor import fit, random_folds
from ridgeline.gateway.routing.routing_request import RoutingRequest

MODELS = ("small", "large")


def chat(*turns: str, system: str = "", **fields: Any) -> Fields:
    """User and assistant in turns, the user first."""
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(turns)]
    return read_fields(json.dumps({"model": "auto", "messages": messages, **fields}).encode())


def ask(*turns: str, **options: Any) -> RoutingRequest:
    own = {name: options.pop(name) for name in ("tenant", "key_id", "conversation") if name in options}
    return RoutingRequest("auto", "chat", chat(*turns, **options), **own)


class Topics:
    """An embedding server of four numbers: a text's share of sums, of rivers, of other words; its length."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.failure: Exception | None = None

    async def post(self, body: bytes) -> bytes:
        request = msgspec.json.decode(body)
        self.bodies.append(request)
        await asyncio.sleep(0)  # as over a network: others get their turn
        if self.failure is not None:
            raise self.failure
        rows = [vector_of(text) for text in request["input"]]
        data = [
            {"index": n, "embedding": base64.b64encode(row.tobytes()).decode()} for n, row in enumerate(rows)
        ]
        return msgspec.json.encode({"data": data})

    def embedder(self, **options: Any) -> Embedder:
        options = {"timeout_ms": 60_000.0, **options}  # the machine may be busy
        return Embedder(EmbeddingsConfig(upstream="topics", model="topics", **options), self.post)


def vector_of(text: str) -> np.ndarray:
    sums, rivers = text.count("sum"), text.count("river")
    row = np.array([sums, rivers, 0.2, len(text) / 1000], "<f4")
    return row / np.linalg.norm(row)


def artifact(**options: Any) -> Artifact:
    """Of 400 texts: the small model knows rivers and no sums, the large one both."""
    rng = np.random.default_rng(7)
    texts, outcomes = [], []
    for _ in range(400):
        is_sum = bool(rng.integers(2))
        texts.append(
            ("what is the sum of " if is_sum else "which river is ") + "x" * int(rng.integers(5, 40))
        )
        small = rng.random() < (0.1 if is_sum else 0.9)
        outcomes.append((small, rng.random() < 0.95))
    vectors = np.stack([vector_of(text) for text in texts]).astype(np.float16).astype(np.float32)
    labels = np.array(outcomes, np.float32)
    costs = np.tile([0.0, 1.0], (len(texts), 1))
    fitted = fit(vectors, feature_rows(texts), labels, costs, random_folds(len(texts), 5, 0))
    settings: dict[str, Any] = {
        "models": MODELS,
        "embedding_model": "topics",
        "recipe": Recipe(),
        "costs": (ModelCost(0.0), ModelCost(1.0)),
        "cost_span": 1.0,
        "threshold": 0.3,
        "predictor": fitted.predictor,
    }
    return Artifact(**settings | options)
