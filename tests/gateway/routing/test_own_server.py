"""Real vectors: the server that `ridgeline gateway routes` starts for itself, asked in both ways."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import numpy as np
import pytest

from ridgeline.gateway.routing.config import EmbeddingsConfig
from ridgeline.gateway.routing.embedder import Embedder, EmbeddingFailed
from ridgeline.gateway.routing.learned.vectors import VectorServer
from ridgeline.gateway.routing.own_server import OwnServer
from ridgeline.models.files.registry import cached_file, find_known
from ridgeline.proxy.http_client import HttpClient, Timeouts
from ridgeline.proxy.origin import read_url
from tests.patience import PATIENCE_S

MODEL = "all-minilm-l6-v2"
TEXTS = ["What is 17 times 23?", "Which river flows through Rome?", "What is 17 times 24?", "word " * 500]


async def test_vectors_for_a_fit_are_those_of_a_decision_and_the_server_ends_with_its_command() -> None:
    known = find_known(MODEL)
    if known is None or not cached_file(known).is_file():
        pytest.skip(f"{MODEL} is not here: ridgeline models pull {MODEL}")
    with OwnServer(MODEL) as server:
        url = server.start()
        fitted = VectorServer(url, MODEL, 64).fetch(TEXTS)
        client, origin = HttpClient(), read_url(url)

        async def post(body: bytes) -> bytes:
            headers = [(b"content-type", b"application/json")]
            answer = await client.ask(origin, "POST", "/v1/embeddings", headers, body, timeouts=Timeouts())
            return await answer.read(1 << 20)

        embedder = Embedder(EmbeddingsConfig(upstream="own", model=MODEL, timeout_ms=1000 * PATIENCE_S), post)
        asked = await embedder.embed(TEXTS, max_tokens=64)
        client.close()
        with pytest.raises(EmbeddingFailed, match="answered 404"):
            VectorServer(url, "no-such-model", 64).fetch(["a"])
        with urllib.request.urlopen(url + "/health", timeout=PATIENCE_S) as health:
            assert json.load(health)
    assert np.array_equal(fitted, asked)
    assert fitted[0] @ fitted[2] > 0.8 > 0.3 > fitted[0] @ fitted[1]
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url + "/health", timeout=2)


def test_a_server_that_cannot_start_says_why() -> None:
    with (
        OwnServer("no-such-model-anywhere") as server,
        pytest.raises(EmbeddingFailed, match="no-such-model-anywhere"),
    ):
        server.start()
