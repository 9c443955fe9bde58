"""OpenEmbedding: the client's side of one Embed request: its message, and the array that answers fill.

Made by `AsyncClient.embed`. Holds no socket; numpy is imported only by callers that embed.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import numpy as np

from ridgeline.engine.errors import EngineError
from ridgeline.engine.link.messages import Embed
from ridgeline.engine.link.packed_texts import PackedTexts

Floats = np.ndarray[Any, np.dtype[np.float32]]


class OpenEmbedding:
    def __init__(
        self,
        request_id: str,
        texts: PackedTexts,
        want: Literal["vector", "tokens", "score"],
        priority: int,
        width: int,
    ) -> None:
        self.request_id = request_id
        self.done: asyncio.Future[Floats] = asyncio.get_running_loop().create_future()
        self._texts = texts
        self._want = want
        self._priority = priority
        self.rows_left = texts.num_tokens if want == "tokens" else len(texts.lengths)
        self.values: Floats = np.empty((self.rows_left, width), np.float32)

    def message(self) -> Embed:
        texts = self._texts
        return Embed(self.request_id, texts.tokens, texts.lengths, texts.types, self._want, self._priority)

    def push(self, row: int, values: bytes) -> None:
        rows = np.frombuffer(values, np.float32).reshape(-1, self.values.shape[1])
        self.values[row : row + len(rows)] = rows
        self.rows_left -= len(rows)
        if not self.rows_left and not self.done.done():
            self.done.set_result(self.values)

    def fail(self, error: EngineError) -> None:
        if not self.done.done():
            self.done.set_exception(error)
