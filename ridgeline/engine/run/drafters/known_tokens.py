"""KnownTokens: a draft model's drafter for sequences that consist of tokens the draft model has.

Models of one family may have one tokenizer and embeddings of different numbers of rows: padding behind the
last token. A token of the served model's padding is rarely drawn, but a prompt, a bias or a stop id may name
one. Such a sequence has no guesses.
"""

from __future__ import annotations

from ridgeline.engine.schedule.request import Sequence
from ridgeline.engine.schedule.step import StepPlan
from ridgeline.engine.speculate.drafter import ComputingDrafter, Draft


class KnownTokens:
    def __init__(self, drafter: ComputingDrafter, vocab_size: int) -> None:
        """vocab_size: of the draft model"""
        self.drafter = drafter
        self.name, self.waits, self.longest = drafter.name, drafter.waits, drafter.longest
        self._vocab_size = vocab_size
        self._known: dict[Sequence, int] = {}  # how many of its first tokens were compared; -1: not all known

    def __len__(self) -> int:
        return len(self._known)

    def propose(self, seqs: list[Sequence], most: int) -> list[Draft | None]:
        known = [seq for seq in seqs if self._is_known(seq)]
        drafts = dict(zip(known, self.drafter.propose(known, most), strict=True)) if known else {}
        return [drafts.get(seq) for seq in seqs]

    def observe(self, plan: StepPlan, reads: bool) -> None:
        self.drafter.observe(plan, reads)

    def forget(self, seq: Sequence) -> None:
        self._known.pop(seq, None)
        self.drafter.forget(seq)

    def passes(self, length: int) -> int:
        return self.drafter.passes(length)

    def behind(self, seq: Sequence) -> int | None:
        return self.drafter.behind(seq) if self._is_known(seq) else None

    def catch_up(self, seqs: list[Sequence], tokens: int) -> int:
        return self.drafter.catch_up([seq for seq in seqs if self._is_known(seq)], tokens)

    def _is_known(self, seq: Sequence) -> bool:
        compared = self._known.get(seq)
        if compared == -1:
            return False
        new = seq.tokens[compared or 0 :]
        if compared is None:
            new = [*new, *seq.params.logit_bias, *seq.params.stop_token_ids, *seq.end_ids]
        is_known = max(new, default=0) < self._vocab_size
        self._known[seq] = len(seq.tokens) if is_known else -1
        return is_known
