"""The draft head where it is served: it guesses what the unrolled head of its training guesses, and its
guesses change no answer."""

from __future__ import annotations

import torch

from ridgeline.engine.run.drafters.chain_drafter import ChainDrafter
from ridgeline.engine.schedule.intake import make_sequences
from ridgeline.engine.schedule.request import Request, SamplingParams, Sequence
from ridgeline.engine.speculate.drafter import Draft
from ridgeline.engine.speculate.speculation import Speculation
from ridgeline.lab.train_drafter.unroll import unrolled
from ridgeline.models.decoders.reference import Decoder, allocate_kv
from ridgeline.ops.backend import select_backend
from ridgeline.ops.inputs import InputRow, StepInputs
from tests.engine.speculate.option_cases import served, work
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


def chain(head, tokens: list[int]) -> list[int]:
    """What training's form of the head guesses behind these tokens."""
    decoder = Decoder(SPEC, WEIGHTS, select_backend("torch"), 128)
    decoder.taps = head.config.taps
    known, guesses = list(tokens), []
    row = InputRow(known, 0, [0, 1, 2, 3], 0)
    decoder.forward(StepInputs.from_rows([row], 16), allocate_kv(SPEC, 4, 16, torch.float32))
    taps = decoder.tapped[None]
    for number in range(head.config.length):
        ids = torch.tensor([[*tokens, *guesses, 0]])  # a token behind, as training has one to guess
        padded = torch.cat([taps, torch.zeros(1, len(guesses) + 1, taps.shape[2])], 1)
        found = unrolled(head, WEIGHTS.embed.tensor, padded, ids, number + 1, 1.0)
        place = len(tokens) - 2
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
    served(runner, SIZES, work(), speculation)
    served(runner, SIZES, [Request("last", [5, 6, 7], SamplingParams(max_tokens=1))], speculation)
    assert len(watched) <= 1  # of the last one alone: no further plan has retired it


def test_it_begins_behind_a_prefix_that_came_from_the_cache():
    """And a sequence whose positions are full has no guesses."""
    runner = torch_runner(SPEC, WEIGHTS, SIZES)
    fed = ChainDrafter(random_head(), WEIGHTS.embed.tensor, 1.0, runner, 2)
    request = Request("r", list(range(3, 30)), SamplingParams(max_tokens=9))
    (seq,) = make_sequences(request, Sizes().limits(), 0, lambda: 1)
    seq.tokens.append(40)
    width = len(fed.head.config.taps) * SPEC.hidden_size
    fed._note(seq, 16, torch.randn(11, width))
    (draft,) = fed.propose([seq], 9)
    assert draft is not None
    assert len(draft.tokens) == fed.head.config.length
    fed._cap = 20
    fed._note(seq, 27, torch.randn(9, width))
    seq.tokens += [41] * 9
    fed._note(seq, 27, torch.randn(9, width))
    assert fed.propose([seq], 4) == [None]
