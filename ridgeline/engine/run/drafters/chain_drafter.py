"""ChainDrafter: guesses by a head of one layer that reads the served model's hidden states: EAGLE-3, MTP.

The head has its own keys and values for each sequence: one position for each token whose hidden state the
model has computed and whose next token is known. After a step those of accepted tokens are added; the chain
of guesses writes behind them, and is overwritten. Guesses are the head's best tokens.

Of each sequence the newest hidden states are kept, `window` at most. While the drafter is not in use nothing
is computed: a sequence with more unread states begins anew with the kept ones. So does one that is longer
than the head's cache. A prefix that came from the cache has no hidden states: the head begins behind it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.engine.run.runner import TapsHidden
from ridgeline.engine.schedule.request import SeqState, Sequence
from ridgeline.engine.schedule.step import StepPlan
from ridgeline.engine.speculate.drafter import ALONG, Draft
from ridgeline.models.drafters.eagle3 import Eagle3Head
from ridgeline.models.drafters.eagle3_config import Eagle3Config
from ridgeline.models.drafters.mtp import MtpModule
from ridgeline.models.drafters.mtp_config import MtpConfig

MOST_POSITIONS = 4096  # of a sequence
WINDOW = 64  # hidden states that are kept of each sequence
FIRST_SLOTS = 4


def most_positions(config: Eagle3Config | MtpConfig) -> int:
    return min(MOST_POSITIONS, config.max_context)


def kept_states(config: Eagle3Config | MtpConfig) -> int:
    return min(WINDOW, most_positions(config) // 2)


def bytes_per_sequence(config: Eagle3Config | MtpConfig, element_bytes: int) -> int:
    """Its keys and values, with those of a chain of guesses, and its kept hidden states."""
    kv = 2 * (most_positions(config) + config.length) * config.kv_heads * config.head_dim
    return element_bytes * (kv + kept_states(config) * len(config.taps) * config.hidden_size)


class Slots:
    """A tensor with a part for each of up to `most` sequences; it grows as they come."""

    def __init__(self, empty: Tensor, most: int) -> None:
        """empty [0, ...]: of the shape of the parts"""
        self.tensor = empty
        self._most = most
        self._free: list[int] = []

    def take(self) -> int | None:
        if not self._free:
            have = len(self.tensor)
            more = min(max(FIRST_SLOTS, have), self._most - have)
            if more <= 0:
                return None
            self.tensor = torch.cat([self.tensor, self.tensor.new_zeros(more, *self.tensor.shape[1:])])
            self._free = list(range(have, have + more))
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        self._free.append(slot)


class State:
    """One sequence.

    since, end:   positions whose hidden states were seen; the last `window` are kept, in slot `kept`
    base, length: the first position that the head has read, and their number
    slot:         of its keys and values, while there are any; hidden: the head's output at the last position
    """

    __slots__ = ("base", "end", "hidden", "kept", "length", "since", "slot")

    def __init__(self, kept: int) -> None:
        self.kept = kept
        self.since = self.end = self.base = self.length = 0
        self.slot: int | None = None
        self.hidden: Tensor | None = None

    @property
    def read(self) -> int:
        """The first position that the head has not read."""
        return self.base + self.length

    @property
    def waiting(self) -> int:
        return self.end - self.base - self.length


class ChainDrafter:
    waits = True

    def __init__(
        self, head: Eagle3Head | MtpModule, embed: Tensor, scale: float, runner: TapsHidden, most_running: int
    ) -> None:
        """embed: the model's embedding, and the factor by which the model scales it"""
        config = head.config
        self.name = "eagle3" if isinstance(head, Eagle3Head) else "mtp"
        self.head = head
        self.longest = config.length
        self._embed, self._scale = embed, scale
        self._runner = runner
        self._dtype, self._device = head.o_proj.weight.dtype, head.o_proj.weight.device
        self._most_positions = most_positions(config)
        self.window = kept_states(config)
        cap = self._most_positions + config.length
        self._kv = Slots(self._zeros(0, 2, cap, config.kv_heads, config.head_dim), most_running)
        self._kept = Slots(self._zeros(0, self.window, len(config.taps) * config.hidden_size), most_running)
        self._states: dict[Sequence, State] = {}
        runner.tap(config.taps)

    def __len__(self) -> int:
        return len(self._states)

    @property
    def cache_bytes(self) -> int:
        """It grows with the sequences that run together, up to `bytes_per_sequence` of each."""
        return self._kv.tensor.nbytes + self._kept.tensor.nbytes

    # ── what the engine asks ─────────────────────────────────────────────────────────────────────────────

    @torch.inference_mode()
    def observe(self, plan: StepPlan, reads: bool) -> None:
        tapped = self._runner.tapped()
        if len(tapped) != len(plan.rows):  # rows were computed one by one: begin again behind them
            for row in plan.rows:
                self._drop(row.seq)
            return
        parts: list[Tensor] = []
        places: list[int] = []
        with self._runner.on_stream():
            for row, taps in zip(plan.rows, tapped, strict=True):
                for seq in row.samplers or (row.seq,):
                    self._note(seq, row.start, taps, reads, parts, places)
            if places:  # a copy, in one piece for all rows: the step's own tensor is not kept alive
                kept = self._kept.tensor
                kept.view(-1, kept.shape[2])[self._ints(places)] = torch.cat(parts).to(self._dtype)

    @torch.inference_mode()
    def propose(self, seqs: list[Sequence], most: int) -> list[Draft | None]:
        ready = [seq for seq in seqs if self.behind(seq) is not None and self._has_slot(self._states[seq])]
        if not ready:
            return [None] * len(seqs)
        with self._runner.on_stream():
            behind = {seq: count for seq in ready if (count := self._states[seq].waiting)}
            if behind:
                self._read_kept(behind)
            drafts = self._chain(ready, min(most, self.longest))
        return [drafts.get(seq) for seq in seqs]

    def passes(self, length: int) -> int:
        return length

    def behind(self, seq: Sequence) -> int | None:
        state = self._states.get(seq)
        if state is None or state.end != len(seq.tokens) - 1:
            return None
        return state.waiting if state.waiting > ALONG else 0

    @torch.inference_mode()
    def catch_up(self, seqs: list[Sequence], tokens: int) -> int:
        counts: dict[Sequence, int] = {}
        room = tokens
        for seq in seqs:
            if room and self.behind(seq) and self._has_slot(self._states[seq]):
                counts[seq] = min(room, self._states[seq].waiting)
                room -= counts[seq]
        if counts:
            with self._runner.on_stream():
                self._read_kept(counts)
                if self._device.type == "cuda":  # the caller measures the time
                    torch.cuda.current_stream(self._device).synchronize()
        return tokens - room

    def forget(self, seq: Sequence) -> None:
        self._drop(seq)

    # ── states ───────────────────────────────────────────────────────────────────────────────────────────

    def _note(
        self, seq: Sequence, start: int, taps: Tensor, reads: bool, parts: list[Tensor], places: list[int]
    ) -> None:
        """Hidden states of the tokens from `start` on. Those behind the last known token's are of wrong
        guesses. parts, places: what is kept of them is added, and where"""
        if seq.state is SeqState.FINISHED:
            return
        known = min(len(taps), len(seq.tokens) - 1 - start)
        if known <= 0:
            return
        state = self._states.get(seq)
        if state is None or state.end != start:
            state = self._begin(seq, start)
            if state is None:
                return
        end = start + known
        if end - state.read > self.window or end - state.base > self._most_positions:
            if not (reads and end - state.base <= self._most_positions and self._has_slot(state)):
                self._begin_anew(state, max(state.since, end - self.window))
            elif state.waiting:
                self._read_kept({seq: state.waiting})
        state.end = end
        if end - state.read > self.window:
            self._read({seq: known}, taps[None, :known].to(self._dtype))
        first = max(start, end - self.window)
        parts.append(taps[first - start : known])
        places += [state.kept * self.window + place % self.window for place in range(first, end)]

    def _begin(self, seq: Sequence, start: int) -> State | None:
        self._drop(seq)
        kept = self._kept.take()
        if kept is None:
            return None
        state = self._states[seq] = State(kept)
        state.since = state.end = state.base = start
        return state

    def _begin_anew(self, state: State, base: int) -> None:
        """Forget what the head has read, and read from `base` on."""
        if state.slot is not None:
            self._kv.give_back(state.slot)
        state.slot = state.hidden = None
        state.base, state.length = base, 0

    def _has_slot(self, state: State) -> bool:
        if state.slot is None:
            state.slot = self._kv.take()
        return state.slot is not None

    def _drop(self, seq: Sequence) -> None:
        state = self._states.pop(seq, None)
        if state is not None:
            self._kept.give_back(state.kept)
            if state.slot is not None:
                self._kv.give_back(state.slot)

    # ── the head ─────────────────────────────────────────────────────────────────────────────────────────

    def _read_kept(self, counts: dict[Sequence, int]) -> None:
        """Let the head read the kept hidden states. counts: how many of each sequence"""
        longest = max(counts.values())
        states = [self._states[seq] for seq in counts]
        places = [
            [state.kept * self.window + (state.read + ahead) % self.window for ahead in range(longest)]
            for state in states
        ]
        kept = self._kept.tensor
        self._read(counts, kept.view(-1, kept.shape[2])[self._ints(places)])

    def _read(self, counts: dict[Sequence, int], taps: Tensor) -> None:
        """taps [sequences, most of the counts, taps · hidden]"""
        states = [self._states[seq] for seq in counts]
        longest = taps.shape[1]
        following: list[list[int]] = []
        for (seq, count), state in zip(counts.items(), states, strict=True):
            first = state.read + 1
            following.append(seq.tokens[first : first + count] + [0] * (longest - count))
        out = self._forward(states, self.head.fused(taps), self._ints(following), longest)
        for place, (state, count) in enumerate(zip(states, counts.values(), strict=True)):
            state.hidden = out[place, count - 1].clone()
            state.length += count

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
        config, kv = self.head.config, self._kv.tensor
        slots = self._ints([state.slot for state in states])
        starts = self._ints([state.length + ahead for state in states])
        bases = self._ints([state.base for state in states])
        places = starts[:, None] + torch.arange(count, device=self._device)
        places = places.clamp(max=kv.shape[2] - 1)
        embedded = self._embed[tokens].to(self._dtype) * self._scale
        residual, q, k, v = self.head.project(embedded, hidden, bases[:, None] + places)
        kv[slots[:, None], 0, places] = k
        kv[slots[:, None], 1, places] = v
        longest = max(state.length for state in states) + ahead + count
        cached = kv[slots, :, :longest]
        mask = torch.arange(longest, device=self._device) <= places[:, :, None]
        attended = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            cached[:, 0].transpose(1, 2),
            cached[:, 1].transpose(1, 2),
            attn_mask=mask[:, None],
            enable_gqa=config.heads != config.kv_heads,
        )
        return self.head.output(attended.transpose(1, 2), residual)

    # ── tensors ──────────────────────────────────────────────────────────────────────────────────────────

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=self._dtype, device=self._device)

    def _ints(self, values: list[Any]) -> Tensor:
        """On the device, without waiting for its work in flight."""
        made = torch.tensor(values)
        return made if made.device == self._device else made.pin_memory().to(self._device, non_blocking=True)
