"""MedusaDrafter: guesses by Medusa heads on the hidden state behind a sequence's last known token but one.

It keeps that state alone: nothing is lost by a preemption, a cached prefix or a pause. All heads of all rows
are computed in one pass.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.engine.run.runner import TapsHidden
from ridgeline.engine.schedule.request import SeqState, Sequence
from ridgeline.engine.schedule.step import StepPlan
from ridgeline.engine.speculate.drafter import ALONG, Draft
from ridgeline.models.drafters.medusa import MedusaHeads


class Hidden(NamedTuple):
    """What the model computed at a sequence's token of this number."""

    place: int
    state: Tensor


class MedusaDrafter:
    name = "medusa"
    waits = True

    def __init__(self, heads: MedusaHeads, runner: TapsHidden, num_layers: int) -> None:
        """num_layers: the model's; its last hidden state is tapped"""
        self.heads = heads
        self._runner = runner
        self._dtype = heads.output(0).weight.dtype
        self._hidden: dict[Sequence, Hidden] = {}
        self.longest = heads.config.length
        runner.tap((num_layers,))

    def __len__(self) -> int:
        return len(self._hidden)

    @torch.inference_mode()
    def observe(self, plan: StepPlan, reads: bool) -> None:
        tapped = self._runner.tapped()
        if len(tapped) != len(plan.rows):  # rows were computed one by one
            for row in plan.rows:
                self.forget(row.seq)
            return
        for row, taps in zip(plan.rows, tapped, strict=True):
            for seq in row.samplers:
                place = len(seq.tokens) - 2  # the states behind it are those of wrong guesses
                if seq.state is SeqState.FINISHED or not row.start <= place < row.start + len(taps):
                    self.forget(seq)
                else:
                    state = taps[place - row.start]
                    # Of a long prompt the other states are not kept alive.
                    self._hidden[seq] = Hidden(place, state.clone() if len(taps) > ALONG else state)

    @torch.inference_mode()
    def propose(self, seqs: list[Sequence], most: int) -> list[Draft | None]:
        ready = [seq for seq in seqs if self._is_ready(seq)]
        if not ready:
            return [None] * len(seqs)
        with self._runner.on_stream():
            states = torch.stack([self._hidden[seq].state for seq in ready]).to(self._dtype)
            found = self.heads.best(states)[:, :most].tolist()
        drafts = {seq: Draft(tokens) for seq, tokens in zip(ready, found, strict=True)}
        return [drafts.get(seq) for seq in seqs]

    def forget(self, seq: Sequence) -> None:
        self._hidden.pop(seq, None)

    def passes(self, length: int) -> int:
        return 1

    def behind(self, seq: Sequence) -> int | None:
        return 0 if self._is_ready(seq) else None

    def catch_up(self, seqs: list[Sequence], tokens: int) -> int:
        return 0

    def _is_ready(self, seq: Sequence) -> bool:
        hidden = self._hidden.get(seq)
        return hidden is not None and hidden.place == len(seq.tokens) - 2
