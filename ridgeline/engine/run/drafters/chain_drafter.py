"""ChainDrafter: guesses by a head of one layer that reads the served model's hidden states: EAGLE-3, MTP.

The head has its own keys and values for each sequence: one position for each token whose hidden state the
model has computed and whose next token is known. After a step those of accepted tokens are added; the chain
of guesses writes behind them, and is overwritten. A prefix that came from the cache has no hidden states: the
head then begins behind it. Guesses are the head's best tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.engine.run.runner import TapsHidden
from ridgeline.engine.schedule.request import SeqState, Sequence
from ridgeline.engine.schedule.step import StepPlan
from ridgeline.engine.speculate.drafter import Draft
from ridgeline.models.drafters.eagle3 import Eagle3Head
from ridgeline.models.drafters.mtp import MtpModule

MOST_POSITIONS = 4096  # of a sequence; a longer one has no guesses
PADDED_TOGETHER = 32  # rows with more new positions (prompts) are computed one by one
FIRST_SLOTS = 4


class State:
    """One sequence: its slot in the cache, its positions there, and the head's output at the last of them."""

    __slots__ = ("base", "hidden", "length", "slot", "waiting")

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.base = self.length = 0  # the first position in the cache, and their number
        self.hidden: Tensor | None = None
        self.waiting: list[Tensor] = []

    @property
    def end(self) -> int:
        """The position behind the last one that it has or that waits."""
        return self.base + self.length + sum(map(len, self.waiting))


class ChainDrafter:
    waits = True

    def __init__(
        self, head: Eagle3Head | MtpModule, embed: Tensor, scale: float, runner: TapsHidden, most_running: int
    ) -> None:
        """embed: the model's embedding, and the factor by which the model scales it"""
        config = head.config
        self.name = "eagle3" if isinstance(head, Eagle3Head) else "mtp"
        self.head = head
        self._embed, self._scale = embed, scale
        self._runner = runner
        self._dtype, self._device = head.o_proj.weight.dtype, head.o_proj.weight.device
        self._cap = min(MOST_POSITIONS, config.max_context) + config.length
        self._kv = torch.zeros(
            0, 2, self._cap, config.kv_heads, config.head_dim, dtype=self._dtype, device=self._device
        )
        self._free: list[int] = []
        self._most = most_running
        self._states: dict[Sequence, State] = {}
        runner.tap(config.taps)

    def __len__(self) -> int:
        return len(self._states)

    # ── what the engine asks ─────────────────────────────────────────────────────────────────────────────

    @torch.inference_mode()
    def observe(self, plan: StepPlan) -> None:
        tapped = self._runner.tapped()
        if len(tapped) != len(plan.rows):  # rows were computed one by one: begin again behind them
            for row in plan.rows:
                self._drop(row.seq)
            return
        with self._runner.on_stream():
            for row, taps in zip(plan.rows, tapped, strict=True):
                for seq in row.samplers or (row.seq,):
                    self._note(seq, row.start, taps)

    @torch.inference_mode()
    def propose(self, seqs: list[Sequence], most: int) -> list[Draft | None]:
        with self._runner.on_stream():
            ready = [seq for seq in seqs if self._is_ready(seq)]
            if not ready:
                return [None] * len(seqs)
            self._extend(ready)
            drafts = self._chain(ready, min(most, self.head.config.length))
        return [drafts.get(seq) for seq in seqs]

    def forget(self, seq: Sequence) -> None:
        self._drop(seq)

    # ── states ───────────────────────────────────────────────────────────────────────────────────────────

    def _note(self, seq: Sequence, start: int, taps: Tensor) -> None:
        """Hidden states of the tokens from `start` on. Those behind the last known token's are of wrong
        guesses."""
        if seq.state is SeqState.FINISHED:
            return
        known = min(len(taps), len(seq.tokens) - 1 - start)
        if known <= 0:
            return
        state = self._states.get(seq)
        if state is None or state.end != start:
            state = self._begin(seq, start)
        if state is None or state.end - state.base + known > self._cap - self.head.config.length:
            self._drop(seq)
            return
        state.waiting.append(taps[:known].to(self._dtype))

    def _begin(self, seq: Sequence, start: int) -> State | None:
        self._drop(seq)
        if not self._free:
            have = len(self._kv)
            more = min(max(FIRST_SLOTS, have), self._most - have)
            if more <= 0:
                return None
            self._kv = torch.cat([self._kv, self._kv.new_zeros(more, *self._kv.shape[1:])])
            self._free = list(range(have, have + more))
        state = self._states[seq] = State(self._free.pop())
        state.base = start
        return state

    def _drop(self, seq: Sequence) -> None:
        state = self._states.pop(seq, None)
        if state is not None:
            self._free.append(state.slot)

    def _is_ready(self, seq: Sequence) -> bool:
        state = self._states.get(seq)
        return state is not None and state.end == len(seq.tokens) - 1

    # ── the head ─────────────────────────────────────────────────────────────────────────────────────────

    def _extend(self, seqs: list[Sequence]) -> None:
        """Let the head read what waits."""
        together: list[Sequence] = []
        for seq in seqs:
            new = sum(map(len, self._states[seq].waiting))
            if new > PADDED_TOGETHER:
                self._read([seq])
            elif new:
                together.append(seq)
        if together:
            self._read(together)

    def _read(self, seqs: list[Sequence]) -> None:
        states = [self._states[seq] for seq in seqs]
        new = [torch.cat(state.waiting) for state in states]
        counts = [len(part) for part in new]
        longest = max(counts)
        taps = torch.nn.utils.rnn.pad_sequence(new, batch_first=True)
        following: list[list[int]] = []
        for seq, state, count in zip(seqs, states, counts, strict=True):
            first = state.base + state.length + 1
            following.append(seq.tokens[first : first + count] + [0] * (longest - count))
        tokens = torch.tensor(following, device=self._device)
        out = self._forward(states, self.head.fused(taps), tokens, longest)
        for place, (state, count) in enumerate(zip(states, counts, strict=True)):
            state.hidden = out[place, count - 1]
            state.length += count
            state.waiting = []

    def _chain(self, seqs: list[Sequence], length: int) -> dict[Sequence, Draft]:
        states = [self._states[seq] for seq in seqs]
        hidden = torch.stack([state.hidden for state in states if state.hidden is not None])
        chosen: list[Tensor] = []
        for place in range(length):
            tokens = self.head.tokens(self.head.logits(hidden).argmax(-1))
            chosen.append(tokens)
            if place + 1 < length:
                hidden = self._forward(states, hidden[:, None], tokens[:, None], 1, place)[:, 0]
        found = torch.stack(chosen, 1).tolist()
        return {seq: Draft(tokens) for seq, tokens in zip(seqs, found, strict=True)}

    def _forward(
        self, states: list[State], hidden: Tensor, tokens: Tensor, count: int, ahead: int = 0
    ) -> Tensor:
        """`count` positions of each sequence, behind those in the cache and `ahead` more. Their keys and
        values are written; padding's too, where the next ones will be."""
        config, device = self.head.config, self._device
        slots = torch.tensor([state.slot for state in states], device=device)
        starts = torch.tensor([state.length + ahead for state in states], device=device)
        bases = torch.tensor([state.base for state in states], device=device)
        places = starts[:, None] + torch.arange(count, device=device)
        places = places.clamp(max=self._cap - 1)
        embedded = self._embed[tokens].to(self._dtype) * self._scale
        residual, q, k, v = self.head.project(embedded, hidden, bases[:, None] + places)
        self._kv[slots[:, None], 0, places] = k
        self._kv[slots[:, None], 1, places] = v
        longest = max(state.length for state in states) + ahead + count
        cached = self._kv[slots, :, :longest]
        mask = torch.arange(longest, device=device) <= places[:, :, None]
        attended = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            cached[:, 0].transpose(1, 2),
            cached[:, 1].transpose(1, 2),
            attn_mask=mask[:, None],
            enable_gqa=config.heads != config.kv_heads,
        )
        return self.head.output(attended.transpose(1, 2), residual)
