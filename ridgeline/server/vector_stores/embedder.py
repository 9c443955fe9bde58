"""ServedEmbedder: a served embedding model as retrieval sees it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from ridgeline.engine.client.client import AsyncClient
from ridgeline.engine.errors import EngineDied, QueueFull
from ridgeline.engine.link.packed_texts import pack_texts
from ridgeline.engine.schedule.request import BACKGROUND_PRIORITY
from ridgeline.models.files.registry import find_known
from ridgeline.retrieval.chunking.spans import Span
from ridgeline.retrieval.ingest.embedder import Pieces, TokenizedText, chunk_vectors, pieces_of
from ridgeline.retrieval.ingest.errors import EmbedderUnavailable
from ridgeline.retrieval.types import Vector
from ridgeline.server.errors import ApiError
from ridgeline.server.process.setup import public_name
from ridgeline.server.served_models import Served, ServedModels

_serials = itertools.count(1)


class ServedEmbedder:
    """`model` is the model's own name: what a store records, whatever names the model is served under."""

    def __init__(self, client: AsyncClient) -> None:
        known = find_known(client.hello.model)
        self.model = public_name(client.hello.model) if known is None else known.name
        self._client = client
        self._before, self._after = client.tokenizer.special_ends()
        self.dimensions = client.hello.vector_size
        self.max_tokens = client.hello.max_context - len(self._before) - len(self._after)

    @classmethod
    def of(cls, served_models: ServedModels) -> ServedEmbedder:
        """The first served model that makes embeddings; 503 while its engine is not ready."""
        fitting = [model for model in served_models.models if served_models.task_of(model) in (None, "embed")]
        for model in fitting:
            served = Served(model.names[0], model)
            client = served.ready_client()
            if not client.hello.scores_pairs:
                return cls(client)
        if not fitting:
            message = (
                "this server has no embedding model: start it with one beside the chat model, such as "
                "`ridgeline serve smollm2-135m all-minilm-l6-v2`"
            )
            raise ApiError(404, message, code="model_not_found")
        names = ", ".join(model.names[0] for model in fitting)
        raise ApiError(404, f"{names}: scores pairs and makes no vectors", code="model_not_suitable")

    def tokenize(self, text: str) -> TokenizedText:
        return TokenizedText(*self._client.tokenizer.encode_starts(text))

    async def embed(self, texts: Sequence[Sequence[int]]) -> Vector:
        return await self._ask(self._whole(texts), BACKGROUND_PRIORITY)

    async def embed_query(self, query: str) -> Vector:
        """One that is longer than the model reads as a chunk would be. Ahead of all ingest."""
        ids, _ = self._client.tokenizer.encode_starts(query)
        pieces = pieces_of([Span(0, len(ids))], self.max_tokens)
        vectors = await self._ask(self._whole(_parts(ids, pieces)), 0)
        row: Vector = chunk_vectors(pieces, vectors)[0]
        return row

    async def token_vectors(self, texts: Sequence[Sequence[int]]) -> list[Vector]:
        """For each text a vector of length 1 for each of its tokens; a long text is read in pieces. Ahead of
        all ingest.
        """
        parts = [_parts(ids, pieces_of([Span(0, len(ids))], self.max_tokens)) for ids in texts]
        ends = list(itertools.accumulate(map(len, parts), initial=0))
        rows = await self._rows_of_tokens(list(itertools.chain.from_iterable(parts)))
        return [np.concatenate(rows[begin:end]) for begin, end in itertools.pairwise(ends)]

    def _whole(self, texts: Sequence[Sequence[int]]) -> list[list[int]]:
        return [[*self._before, *ids, *self._after] for ids in texts]

    async def _rows_of_tokens(self, texts: Sequence[Sequence[int]]) -> list[Vector]:
        whole = self._whole(texts)
        try:
            made = await self._client.embed(
                pack_texts(whole), want="tokens", request_id=f"retrieval-{next(_serials)}"
            )
        except (EngineDied, QueueFull) as error:
            raise EmbedderUnavailable(str(error)) from error
        rows = np.split(np.asarray(made, np.float32), np.cumsum([len(ids) for ids in whole])[:-1])
        first, last = len(self._before), len(self._after)
        return [one[first : len(one) - last] for one in rows]  # special tokens match all texts alike

    async def _ask(self, texts: Sequence[Sequence[int]], priority: int) -> Vector:
        try:
            made = await self._client.embed(
                pack_texts(texts), request_id=f"retrieval-{next(_serials)}", priority=priority
            )
        except (EngineDied, QueueFull) as error:
            raise EmbedderUnavailable(str(error)) from error
        return np.asarray(made, np.float32)


def _parts(ids: Sequence[int], pieces: Pieces) -> list[Sequence[int]]:
    return [ids[one.begin : one.end] for one in pieces.ranges]
