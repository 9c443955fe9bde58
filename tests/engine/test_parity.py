"""Our greedy tokens and log-probabilities are those of transformers on the same dequantized weights."""

import pytest
import torch

from ridgeline import SamplingParams
from tests.engine.prompts import PROMPTS
from tests.models.gguf_oracle import llama_from_gguf

OUTPUT_TOKENS = 64
TIE = 1e-3  # transformers' own two best logits closer than this: either choice is right


@pytest.fixture(scope="module")
def reference(smollm2_path):
    return llama_from_gguf(smollm2_path)


@pytest.fixture(scope="module")
def generations(llm):
    greedy = SamplingParams(
        temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, logprobs=0, prompt_logprobs=0
    )
    return llm.generate(PROMPTS, greedy)


def test_greedy_output_and_every_logprob_equal_transformers(reference, generations):
    """Feeding transformers our own output and asking for its choice at every position is the same as
    letting it generate, token for token; and it gives its logits at every position besides."""
    excused = 0
    worst = 0.0
    for prompt, generation in zip(PROMPTS, generations, strict=True):
        output = generation.completions[0]
        assert len(output.tokens) == OUTPUT_TOKENS
        ids = generation.prompt_ids + output.tokens
        with torch.inference_mode():
            logits = reference(torch.tensor([ids])).logits[0, :-1]
        for position, token in enumerate(output.tokens, start=len(generation.prompt_ids) - 1):
            best, second = logits[position].topk(2).values.tolist()
            if logits[position].argmax().item() != token:
                assert best - second < TIE, f"{prompt!r}: token {position} differs beyond a tie"
                excused += 1
        expected = torch.log_softmax(logits.double(), -1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
        ours = [p.logprob for p in generation.prompt_logprobs + output.logprobs]
        assert len(ours) == len(ids) - 1
        worst = max(worst, (expected - torch.tensor(ours, dtype=torch.float64)).abs().max().item())
    print(
        f"{len(PROMPTS)} prompts × {OUTPUT_TOKENS} tokens: {excused} ties excused, worst logprob {worst:.1e}"
    )
    assert excused <= 4
    assert worst < 1e-3
