"""Scores of prompts against the sampler's specification: the decoder's hidden states are logits already."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; the CUDA runner cannot be imported")

from ridgeline.engine.run import prompt_scores
from ridgeline.engine.run.prompt_scores import PromptScores
from ridgeline.ops.sampling import log_normalizer, top_tokens

VOCAB = 301


def scored(hidden, targets, count, logit_rows=24):
    buffers = SimpleNamespace(logits=torch.empty(logit_rows, VOCAB))
    return PromptScores.of(hidden, targets, count, SimpleNamespace(buffers=buffers, logits=lambda rows: rows))


def some_logits(rows):
    """With many equal ones: few different values."""
    generator = torch.Generator().manual_seed(rows)
    return torch.randint(-9, 9, (rows, VOCAB), generator=generator).to(torch.bfloat16) / 4


@pytest.mark.parametrize("rows", [1, 16, 17, 53])
def test_scores_are_those_of_the_specification(rows):
    hidden = some_logits(rows)
    targets = [31 * row % VOCAB for row in range(rows)]
    found = scored(hidden, targets, 7).collect()
    assert len(found) == rows
    for token, own, logits in zip(targets, found, hidden.float().numpy(), strict=True):
        norm = log_normalizer(logits)
        assert own.token == token
        assert own.logprob == pytest.approx(logits[token] - norm, abs=1e-5)
        assert own.rank == int(np.sum(logits > logits[token])) + 1
        assert [best for best, _ in own.top] == top_tokens(logits, 7)
        assert [value for _, value in own.top] == pytest.approx(
            [logits[best] - norm for best, _ in own.top], abs=1e-5
        )


def test_no_alternatives_and_no_prompt_are_asked_for_as_well():
    assert [own.top for own in scored(some_logits(3), [1, 2, 3], 0).collect()] == [[], [], []]
    assert scored(some_logits(3), [], 2).collect() == []


def test_sums_and_sorts_are_of_one_size_however_many_rows_are_scored(monkeypatch):
    """So that a row's bits do not depend on the others, nor memory on their number."""
    shapes = {"logsumexp": set(), "sort": set()}
    normed, sort = torch.Tensor.logsumexp, torch.sort

    def logsumexp(rows, *args, **options):
        shapes["logsumexp"].add(tuple(rows.shape))
        return normed(rows, *args, **options)

    def sorting(rows, *args, **options):
        shapes["sort"].add(len(rows))
        return sort(rows, *args, **options)

    monkeypatch.setattr(torch.Tensor, "logsumexp", logsumexp)
    monkeypatch.setattr(torch, "sort", sorting)
    hidden = some_logits(53)
    whole = scored(hidden, list(range(53)), 2).collect()
    for rows, logit_rows in ((1, 24), (20, 3), (53, 53)):
        assert scored(hidden[:rows], list(range(rows)), 2, logit_rows).collect() == whole[:rows]
    assert shapes["logsumexp"] == {(prompt_scores.SLICE, VOCAB)}
    assert max(shapes["sort"]) <= prompt_scores.SLICE
