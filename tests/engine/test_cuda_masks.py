"""Masks from matchers to a device's sampler, with matchers whose languages are sets of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from ridgeline.engine.grammar.masks import Mask, clear_bits
from ridgeline.engine.run.cuda.sampler import NOT_FINITE, DeviceSampler, Pick
from ridgeline.engine.schedule.intake import SchedulerLimits, make_sequences
from ridgeline.engine.schedule.request import Request, SamplingParams, SeqState, Sequence

VOCAB, EOS = 300, 2
LIMITS = SchedulerLimits(64, 64, 8, 8, 16, 64, 512, eos_ids=(EOS,))


@dataclass
class TokenSet:
    """A grammar that lets any of its tokens come, as often as you like."""

    tokens: list[int]

    def matcher(self) -> TokenSet:
        return self

    def permits(self, token: int) -> bool:
        return token in self.tokens

    def fill(self, mask: Mask, barred: frozenset[int], ignores_eos: bool) -> str | None:
        words = mask.view(np.uint32)
        words[:] = 0
        for token in self.tokens:
            words[token >> 5] |= np.uint32(1 << (token & 31))
        clear_bits(mask, barred)
        return None if mask.any() else "nothing may come"


def sequence(tokens: list[int] | None, **options: Any) -> Sequence:
    compiled = None if tokens is None else TokenSet(tokens)
    params = SamplingParams(**{"temperature": 0.0, **options})
    return make_sequences(Request("r", [5, 6], params, compiled=compiled), LIMITS, 0, lambda: 1)[0]


def drawn(sampler: DeviceSampler, seqs: list[Sequence], logits: torch.Tensor):
    picks = [Pick(row, seq, seq.num_output) for row, seq in enumerate(seqs)]
    sampler.flush()
    rows = torch.arange(len(seqs), dtype=torch.int32)
    positions = torch.tensor([pick.position for pick in picks], dtype=torch.int32)
    ticket = sampler.sample(logits, picks, rows, positions, torch.zeros(16, dtype=torch.int32))
    return ticket.collect()


@pytest.fixture
def sampler() -> DeviceSampler:
    return DeviceSampler((EOS,), VOCAB, 16, 8, torch.device("cpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")
def test_each_sequence_chooses_among_what_its_matcher_allows(sampler):
    torch.manual_seed(0)
    logits = torch.randn(4, VOCAB)
    logits[2, EOS] = 50.0
    seqs = [
        sequence([7, 9, 290]),
        sequence(None),
        sequence([EOS, 11], min_tokens=3),
        sequence([]),
    ]
    for row, seq in enumerate(seqs):
        sampler.set_row(row, seq)
    samples = drawn(sampler, seqs, logits)
    assert samples[0].token == max((7, 9, 290), key=lambda token: float(logits[0, token]))
    assert samples[1].token == int(logits[1].argmax())
    assert samples[2].token == 11  # the end may not come yet
    assert samples[3].error == "nothing may come"


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")
def test_a_row_that_changes_hands_has_no_mask_left(sampler):
    logits = torch.randn(1, VOCAB)
    bound, free = sequence([3]), sequence(None)
    sampler.set_row(0, bound)
    assert drawn(sampler, [bound], logits)[0].token == 3
    sampler.clear_row(0)
    sampler.set_row(0, free)
    assert drawn(sampler, [free], logits)[0].token == int(logits[0].argmax())


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")
def test_broken_logits_of_a_constrained_row_are_told_as_such(sampler):
    logits = torch.full((1, VOCAB), float("nan"))
    seq = sequence([3])
    sampler.set_row(0, seq)
    assert drawn(sampler, [seq], logits)[0].error == NOT_FINITE


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")
def test_who_has_ended_meanwhile_is_asked_for_no_mask(sampler):
    torch.manual_seed(0)
    logits = torch.randn(2, VOCAB)
    ended, bound = sequence([]), sequence([3])
    for row, seq in enumerate((ended, bound)):
        sampler.set_row(row, seq)
    ended.state = SeqState.FINISHED
    assert [sample.token for sample in drawn(sampler, [ended, bound], logits)] == [int(logits[0].argmax()), 3]
