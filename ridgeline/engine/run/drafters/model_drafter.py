"""ModelDrafter: guesses by a second, smaller model with the same tokenizer.

It drives a runner of its own over plans of its own: for each sequence a shadow with the same options and
random numbers, whose tokens are the sequence's and then the guesses. A shadow draws with the noise that the
served model will use at the same place, so that both choose the same token as often as they can. Grammars and
thinking budgets are left to the verification.
"""

from __future__ import annotations

from copy import copy

from ridgeline.engine.run.runner import Runner
from ridgeline.engine.schedule.request import Sequence
from ridgeline.engine.schedule.step import StepPlan, StepRow
from ridgeline.engine.speculate.drafter import ALONG, Draft

LONGEST = 7  # tokens of a draft


class Shadow:
    """A sequence as the draft model sees it.

    computed: its first tokens whose KV are in the model's cache; confirmed: those that are no guesses
    """

    __slots__ = ("computed", "confirmed", "seq")

    def __init__(self, seq: Sequence) -> None:
        self.seq = copy(seq)
        self.seq.tokens, self.seq.block_table = [], []
        self.seq.matcher = self.seq.thinking = None
        self.computed = self.confirmed = 0

    def follow(self, tokens: list[int]) -> None:
        """Its tokens become these, which begin with those that were confirmed; what was computed of others is
        computed again."""
        own = self.seq.tokens
        most = min(self.computed, len(tokens) - 1)  # the last one is computed, for what follows it
        agreed = min(self.confirmed, most)
        while agreed < most and own[agreed] == tokens[agreed]:
            agreed += 1
        self.computed = agreed
        own[self.confirmed :] = tokens[self.confirmed :]
        self.confirmed = len(tokens)

    @property
    def missing(self) -> int:
        return len(self.seq.tokens) - self.computed


class ModelDrafter:
    name = "draft_model"
    waits = True
    longest = LONGEST

    def __init__(
        self, runner: Runner, num_blocks: int, block_size: int, step_tokens: int, max_context: int
    ) -> None:
        self._runner = runner
        self._block_size = block_size
        self._step_tokens, self._max_context = step_tokens, max_context
        self._free = list(range(num_blocks - 1, -1, -1))
        self._shadows: dict[Sequence, Shadow] = {}
        self._retired: list[Sequence] = []
        self._steps = 0

    def __len__(self) -> int:
        return len(self._shadows)

    def observe(self, plan: StepPlan, reads: bool) -> None:
        pass

    def propose(self, seqs: list[Sequence], most: int) -> list[Draft | None]:
        length = min(most, LONGEST)
        shadows = {seq: shadow for seq in seqs if (shadow := self._shadow(seq, length)) is not None}
        for _ in range(length):
            self._draw(list(shadows.values()))
        return [Draft(shadows[seq].seq.tokens[len(seq.tokens) :]) if seq in shadows else None for seq in seqs]

    def passes(self, length: int) -> int:
        return length

    def behind(self, seq: Sequence) -> int | None:
        shadow = self._shadows.get(seq)
        if self._missing_blocks(seq, shadow, LONGEST) is None:
            return None
        if shadow is None:
            missing = len(seq.tokens)
        else:
            shadow.follow(seq.tokens)
            missing = shadow.missing
        return missing if missing > ALONG else 0

    def catch_up(self, seqs: list[Sequence], tokens: int) -> int:
        """One step. Of each sequence the last token is left to `propose`."""
        rows: list[StepRow] = []
        shadows: list[Shadow] = []
        room = most = min(tokens, self._step_tokens)
        for seq in seqs:
            shadow = self._shadow(seq, LONGEST) if room and self.behind(seq) else None
            if shadow is not None:
                count = min(room, shadow.missing - 1)
                rows.append(StepRow(shadow.seq, shadow.computed, count))
                shadows.append(shadow)
                room -= count
        if rows:
            self._run(rows, shadows)
        return most - room

    def forget(self, seq: Sequence) -> None:
        shadow = self._shadows.pop(seq, None)
        if shadow is not None:
            self._free += shadow.seq.block_table
            self._retired.append(shadow.seq)

    def _shadow(self, seq: Sequence, length: int) -> Shadow | None:
        """With its tokens, and blocks for `length` guesses. None if there is no room for them."""
        shadow = self._shadows.get(seq)
        missing = self._missing_blocks(seq, shadow, length)
        if missing is None:
            return None
        if shadow is None:
            shadow = self._shadows[seq] = Shadow(seq)
        shadow.seq.block_table += [self._free.pop() for _ in range(missing)]
        shadow.follow(seq.tokens)
        return shadow

    def _missing_blocks(self, seq: Sequence, shadow: Shadow | None, length: int) -> int | None:
        """None if the text is too long for the model or for the blocks that are left."""
        needed = len(seq.tokens) + length
        held = 0 if shadow is None else len(shadow.seq.block_table)
        missing = max(0, -(-needed // self._block_size) - held)
        return None if needed > self._max_context or missing > len(self._free) else missing

    def _draw(self, shadows: list[Shadow]) -> None:
        """One more token for each; first the few tokens that the model lacks, in steps that fit."""
        waiting = shadows
        while waiting:
            rows: list[StepRow] = []
            room = self._step_tokens
            for shadow in waiting:
                count = min(room, shadow.missing)
                if not count:
                    break
                is_last = count == shadow.missing
                rows.append(StepRow(shadow.seq, shadow.computed, count, (shadow.seq,) if is_last else ()))
                room -= count
            self._run(rows, waiting)
            waiting = waiting[sum(bool(row.samplers) for row in rows) :]

    def _run(self, rows: list[StepRow], shadows: list[Shadow]) -> None:
        plan = StepPlan(self._steps, self._step_tokens, rows, retired=self._retired)
        self._steps += 1
        self._retired = []
        result = self._runner.execute(plan)
        for row, shadow, outcome in zip(rows, shadows, result.rows, strict=False):
            shadow.computed += row.count
            for sampled in outcome.samples:
                # A failed sample ends no sequence here: any token may be guessed.
                shadow.seq.tokens.append(max(0, sampled.token))
