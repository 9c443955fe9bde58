"""QueryEmbeddings: one embedding per query string, whatever the number of stores and searches that use it."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

import numpy as np

from ridgeline.retrieval.types import NamespaceSpec, Vector, truncated

Embed: TypeAlias = Callable[[Sequence[str]], Awaitable[Vector]]


class QueryEmbeddings:
    """`model` names whose vectors they are. `embedded` counts the strings that went to the embedder."""

    def __init__(self, embed: Embed, model: str, kept: int = 1024) -> None:
        self.model = model
        self._embed, self._most = embed, kept
        self._kept: OrderedDict[str, Vector] = OrderedDict()
        self._one_at_a_time = asyncio.Lock()  # two searches for one string: the second finds it kept
        self.embedded = 0

    async def of(self, queries: Sequence[str], spec: NamespaceSpec) -> Vector:
        """The queries' vectors [n, dimensions of the spec]; longer ones are truncated (Matryoshka)."""
        async with self._one_at_a_time:
            missing = [query for query in dict.fromkeys(queries) if query not in self._kept]
            if missing:
                vectors = await self._embed(missing)
                self.embedded += len(missing)
                self._kept |= dict(zip(missing, vectors, strict=True))
            rows = []
            for query in queries:
                self._kept.move_to_end(query)
                rows.append(self._kept[query])
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)
        found = np.stack(rows)
        return truncated(found, spec.dimensions) if found.shape[1] > spec.dimensions else found
