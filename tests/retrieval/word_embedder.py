"""An embedder without a model, for what does not depend on vectors: a word's vector is made of its hash."""

from __future__ import annotations

import asyncio
import re
import zlib
from array import array
from collections.abc import Sequence

import numpy as np

from ridgeline.retrieval.ingest.embedder import TokenizedText
from ridgeline.retrieval.types import Vector

WORD = re.compile(r"\w+|[^\w\s]")


class WordEmbedder:
    model = "words"
    dimensions = 32
    max_tokens = 50

    def __init__(self, pause_s: float = 0.0) -> None:
        self._pause_s = pause_s
        self.embedded = 0  # texts, queries excluded

    def tokenize(self, text: str) -> TokenizedText:
        found = list(WORD.finditer(text))
        ids = array("i", [zlib.crc32(word[0].lower().encode()) & 0x7FFFFFFF for word in found])
        return TokenizedText(ids, array("i", [word.start() for word in found]))

    async def embed(self, texts: Sequence[Sequence[int]]) -> Vector:
        self.embedded += len(texts)
        if self._pause_s:
            await asyncio.sleep(self._pause_s)
        return np.stack([self._vector(ids) for ids in texts])

    async def embed_query(self, query: str) -> Vector:
        return self._vector(self.tokenize(query).ids)

    def _vector(self, ids: Sequence[int]) -> Vector:
        total = np.zeros(self.dimensions, np.float32)
        for id in ids:
            total += np.random.default_rng(id).standard_normal(self.dimensions).astype(np.float32)
        return total / max(float(np.linalg.norm(total)), 1e-9)
