"""PromptMaker: words for planned requests, with an exact number of tokens.

Equal prefix blocks get equal words; all other words are unique to the request, so that a server's prefix
cache finds exactly what the plan intends. Words depend only on seed, salt and the request, not on the order
of creation.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ridgeline.lab.errors import BadInput
from ridgeline.lab.traffic.request import PlannedRequest
from ridgeline.lab.traffic.seeds import stream
from ridgeline.lab.traffic.vocabulary import Vocabulary

Form = Literal["ids", "text", "chat"]  # /v1/completions with token ids or text; /v1/chat/completions

KEPT_BLOCKS = 4096  # cache of shared words, so that frequent ones are not drawn again


@dataclass(frozen=True, slots=True)
class Prompt:
    """fields: of the request's body. tokens: the expected count at the server; more than planned if the plan
    has less than the template around one word.
    """

    fields: dict[str, Any]
    tokens: int


class PromptMaker:
    """salt: different words for the same plan. Without a new salt per run, a server finds the previous run's
    prompts in its prefix cache.
    """

    def __init__(
        self, vocabulary: Vocabulary, *, form: Form, seed: int = 0, block_tokens: int = 0, salt: str = ""
    ) -> None:
        if form == "ids" and not vocabulary.ids:
            raise BadInput("token ids of this server's words are unknown: send text or messages")
        if form == "chat" and vocabulary.chat_overhead is None:
            raise BadInput("this model or server does not support chat: use the completions API")
        self.form = form
        self.vocabulary = vocabulary
        self._seed, self._salt, self._block_tokens = seed, salt, block_tokens
        self._ids = np.array(vocabulary.ids, dtype=np.int64)
        self._words = np.array(vocabulary.words, dtype=object)
        self._block = lru_cache(KEPT_BLOCKS)(self._drawn_block)

    @property
    def overhead(self) -> int:
        """Tokens of a prompt that are not our words."""
        if self.form == "ids":
            return 0
        return self.vocabulary.text_overhead if self.form == "text" else self.vocabulary.chat_overhead or 0

    def prompt(self, index: int, planned: PlannedRequest) -> Prompt:
        """The prompt of request number `index`, a single one or the first turn."""
        return self.of_words(self.places(index, planned, planned.input_tokens - self.overhead))

    def of_words(self, places: NDArray[np.int64]) -> Prompt:
        tokens = len(places) + self.overhead
        if self.form == "ids":
            return Prompt({"prompt": self._ids[places].tolist()}, tokens)
        text = self.text(places)
        if self.form == "text":
            return Prompt({"prompt": text}, tokens)
        return Prompt({"messages": [{"role": "user", "content": text}]}, tokens)

    def text(self, places: NDArray[np.int64]) -> str:
        return " ".join(self._words[places].tolist())

    def places(self, index: int, planned: PlannedRequest, count: int) -> NDArray[np.int64]:
        """`count` words, at least one, as vocabulary indices: shared blocks first, then unique ones."""
        count = max(count, 1)
        parts: list[NDArray[np.int64]] = []
        left = count
        for block in planned.prefix if self._block_tokens else ():
            if left <= 0:
                break
            parts.append(self._block(block)[:left])
            left -= len(parts[-1])
        if left > 0:
            parts.append(self.own_words(index, planned.turn, left))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def own_words(self, index: int, turn: int, count: int) -> NDArray[np.int64]:
        """Words in an order that no other request has, at least one."""
        return self._draw(max(count, 1), "own", index, turn)

    def _drawn_block(self, block: int) -> NDArray[np.int64]:
        return self._draw(self._block_tokens, "block", block)

    def _draw(self, count: int, *what: str | int) -> NDArray[np.int64]:
        random = stream(self._seed, "words", self._salt, *what)
        return random.integers(0, len(self._words), count, dtype=np.int64)
