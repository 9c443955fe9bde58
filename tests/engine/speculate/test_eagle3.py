"""The draft head where it is served: it guesses what the unrolled head of its training guesses, and its
guesses change no answer."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from ridgeline.engine.run.core import EngineCore
from ridgeline.engine.run.drafters import chain_drafter
from ridgeline.engine.run.drafters.chain_drafter import ChainDrafter
from ridgeline.engine.schedule.intake import make_sequences
from ridgeline.engine.schedule.request import Request, SamplingParams, Sequence
from ridgeline.engine.schedule.scheduler import Scheduler
from ridgeline.engine.schedule.step import StepPlan, StepRow
from ridgeline.engine.speculate.drafter import Draft
from ridgeline.engine.speculate.speculation import Speculation
from ridgeline.lab.train_drafter.unroll import unrolled
from ridgeline.models.decoders.reference import Decoder, allocate_kv
from ridgeline.ops.backend import select_backend
from ridgeline.ops.inputs import InputRow, StepInputs
from tests.engine.speculate.option_cases import OPTIONS, served, work
from tests.engine.speculate.small_heads import SIZES, SPEC, WEIGHTS, random_head
from tests.gpu.engines import Sizes, torch_runner

BOUND = 2e-4


class Watched(ChainDrafter):
    """Remembers what it proposed behind which tokens."""

    def propose(self, seqs: list[Sequence], most: int) -> list[Draft | None]:
        drafts = super().propose(seqs, most)
        for seq, draft in zip(seqs, drafts, strict=True):
            if draft is not None:
                self.said[tuple(seq.tokens)] = list(draft.tokens)
        return drafts


def drafter(runner, length: int = 4) -> Watched:
    watched = Watched(random_head(length), WEIGHTS.embed.tensor, 1.0, runner, SIZES.max_running)
    watched.said = {}
    return watched


def chain(head, tokens: list[int], begin: int = 0) -> list[int]:
    """What training's form of the head guesses behind these tokens, if it has read those from `begin` on."""
    decoder = Decoder(SPEC, WEIGHTS, select_backend("torch"), 512)
    decoder.taps = head.config.taps
    guesses: list[int] = []
    row = InputRow(list(tokens), 0, list(range(32)), 0)
    decoder.forward(StepInputs.from_rows([row], 16), allocate_kv(SPEC, 32, 16, torch.float32))
    taps = decoder.tapped[None, begin:]
    for number in range(head.config.length):
        ids = torch.tensor([[*tokens[begin:], *guesses, 0]])  # a token behind, as training has one to guess
        padded = torch.cat([taps, torch.zeros(1, len(guesses) + 1, taps.shape[2])], 1)
        found = unrolled(head, WEIGHTS.embed.tensor, padded, ids, number + 1, 1.0)
        place = len(tokens) - 2 - begin
        guesses.append(int(head.draft_ids[found[number].logits[0, place].argmax()]))
    return guesses


def test_it_guesses_what_the_unrolled_head_guesses():
    runner = torch_runner(SPEC, WEIGHTS, SIZES)
    watched = drafter(runner)
    requests = work(["greedy", "sampled", "several"])
    with torch.inference_mode(False):
        served(runner, SIZES, requests, Speculation(watched, SPEC.vocab_size, 3))
    assert len(watched.said) > 10
    for tokens, guesses in list(watched.said.items())[::3]:
        assert chain(watched.head, list(tokens))[: len(guesses)] == guesses


def test_it_keeps_nothing_of_what_has_ended():
    runner = torch_runner(SPEC, WEIGHTS, SIZES)
    watched = drafter(runner)
    speculation = Speculation(watched, SPEC.vocab_size, 2)
    core = EngineCore(Scheduler(SIZES.limits()), runner, speculation=speculation)
    last = Request("last", [5, 6, 7], SamplingParams(max_tokens=1))
    for requests in (work(list(OPTIONS)), [last]):
        for request in requests:
            core.add(request)
        while core.has_work:
            core.step()
    assert len(watched.said) > 10
    assert len(watched) == 0


class Reported:
    """A runner that reports these hidden states."""

    def __init__(self) -> None:
        self.states: list[torch.Tensor] = []

    def tap(self, layers: tuple[int, ...]) -> None:
        pass

    def tapped(self) -> list[torch.Tensor]:
        return self.states

    def on_stream(self) -> nullcontext[None]:
        return nullcontext()


def test_it_begins_behind_a_prefix_that_came_from_the_cache(monkeypatch):
    """And with its own last positions when the head's cache is full."""
    monkeypatch.setattr(chain_drafter, "MOST_POSITIONS", 20)
    runner = Reported()
    fed = ChainDrafter(random_head(), WEIGHTS.embed.tensor, 1.0, runner, 2)
    request = Request("r", list(range(3, 30)), SamplingParams(max_tokens=99))
    (seq,) = make_sequences(request, Sizes().limits(), 0, lambda: 1)
    seq.tokens.append(40)
    width = len(fed.head.config.taps) * SPEC.hidden_size

    def step(start: int, count: int, reads: bool) -> None:
        runner.states = [torch.randn(count, width)]
        fed.observe(StepPlan(0, 0, [StepRow(seq, start, count, (seq,))]), reads)
        (draft,) = fed.propose([seq], 9)
        assert len(draft.tokens) == fed.head.config.length
        assert fed._states[seq].read == len(seq.tokens) - 1

    step(16, 11, True)
    assert fed._states[seq].base == 16
    for start in range(27, 60, 3):
        seq.tokens += [41] * 3
        step(start, 3, start % 2 > 0)
        assert fed._states[seq].length <= 20
    assert fed._states[seq].base > 40
