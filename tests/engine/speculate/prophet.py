"""A drafter for tests that knows the answers, and is wrong in every way a guess can be wrong."""

from __future__ import annotations

import random

from ridgeline.engine.client.output import Generation
from ridgeline.engine.schedule.request import Sequence
from ridgeline.engine.schedule.step import StepPlan
from ridgeline.engine.speculate.drafter import MOST_DRAFTS, Draft


class Prophet:
    """wrong: share of guesses that are other tokens: random ones, end tokens, ids the model does not have."""

    name = "prophet"
    waits = False

    def __init__(self, answers: list[Generation], vocab: int, wrong: float, seed: int = 0) -> None:
        self._answers = {
            (tuple(generation.prompt_ids), completion.index): completion.tokens
            for generation in answers
            for completion in generation.completions
        }
        self._vocab = vocab
        self._wrong = wrong
        self._rng = random.Random(seed)
        self.open: set[Sequence] = set()

    def propose(self, seqs: list[Sequence], most: int) -> list[Draft | None]:
        return [self._draft(seq) for seq in seqs]

    def _draft(self, seq: Sequence) -> Draft:
        self.open.add(seq)
        rng = self._rng
        answer = self._answers[tuple(seq.request.prompt_ids), seq.index][seq.num_output :]
        answer += [rng.randrange(self._vocab) for _ in range(MOST_DRAFTS - len(answer))]
        return Draft([self._wrong_token(seq) if rng.random() < self._wrong else token for token in answer])

    def observe(self, plan: StepPlan, reads: bool) -> None:
        pass

    def forget(self, seq: Sequence) -> None:
        self.open.discard(seq)

    def _wrong_token(self, seq: Sequence) -> int:
        rng = self._rng
        kinds = [rng.randrange(self._vocab), seq.tokens[-1], *seq.end_ids, self._vocab + 7, -1]
        return rng.choice(kinds)
