"""ScriptedSubject: answers by a rule, so that every outcome and every difference is known. No model."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np

from ridgeline.lab.evaluate.scoring.likelihood import Likelihood, Pair
from ridgeline.lab.evaluate.statistics.divergence import TokenScores
from ridgeline.lab.evaluate.subjects.subject import Completion, Prompt, Scored
from ridgeline.lab.evaluate.verdicts import ServedFormat


class ScriptedSubject:
    """prefers(pair): the log-probability of a continuation. shift: how far its distributions are moved."""

    most_top = 4
    prefix: int | None = 0
    chat_only = False
    served: ServedFormat | None = None

    def __init__(
        self,
        prefers: Callable[[Pair], float],
        shift: float = 0.0,
        says: Callable[[str], str] = lambda prompt: "",
        name: str = "scripted",
    ) -> None:
        self.name = name
        self.facts = {"engine": name}
        self.asked: list[str] = []
        self._prefers, self._shift, self._says = prefers, shift, says

    def refuse_scoring(self) -> str | None:
        return None

    def score(self, pairs: Sequence[Pair], top: int, concurrency: int) -> list[Scored]:
        self.asked += [pair.context + pair.continuation for pair in pairs]
        found = []
        for pair in pairs:
            value = self._prefers(pair)
            tokens = self._tokens(pair.continuation) if top else None
            if tokens is not None:
                value = float(tokens.logprobs.sum())
            count = 1 if tokens is None else len(tokens.tokens)
            found.append(Scored(Likelihood(value, value > -1, count), tokens))
        return found

    def complete(self, prompts: Sequence[Prompt], concurrency: int) -> list[Completion]:
        self.asked += [prompt.text for prompt in prompts]
        return [Completion(self._says(prompt.text), 3) for prompt in prompts]

    def close(self) -> None:
        pass

    def _tokens(self, text: str) -> TokenScores:
        words = text.split()
        ids = np.array([zlib.crc32(word.encode()) % 4 for word in words], np.int64)
        logits = np.array([[(one + place) % 3 for place in range(4)] for one in ids], np.float64)
        logits[:, 0] += self._shift
        logprobs = (logits - np.log(np.exp(logits).sum(1, keepdims=True))).astype(np.float32)
        order = np.argsort(-logprobs, 1, kind="stable")
        own = np.take_along_axis(logprobs, ids[:, None], 1)[:, 0]
        prefix = -1 if self.prefix is None else self.prefix
        return TokenScores(ids, own, order, np.take_along_axis(logprobs, order, 1), prefix)
