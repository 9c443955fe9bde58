"""Our greedy tokens and log-probabilities are those of transformers on the same dequantized weights."""

from typing import NamedTuple

import pytest
import torch

from ridgeline import LLM, SamplingParams
from tests.engine.prompts import PROMPTS
from tests.models.gguf_oracle import llama_from_gguf

BACKENDS = {
    "native": {"backend": "native", "weights": "float32", "kv_dtype": "float32"},
    "torch": {"backend": "torch", "dtype": "float32"},
}
OUTPUT_TOKENS = 64
TIE = 1e-3  # transformers' own two best logits closer than this: either choice is right
TOLERANCE = 1e-3  # of a log-probability


class Verdict(NamedTuple):
    """What transformers says of a sequence, at every position but the last."""

    choices: list[int]
    leads: list[float]  # of the best logit over the second
    logprobs: torch.Tensor  # of the token that does follow


@pytest.fixture(scope="module")
def judge(smollm2_path):
    """Both backends mostly say the same, so each sequence is judged once."""
    model = llama_from_gguf(smollm2_path)
    known: dict[tuple[int, ...], Verdict] = {}

    def verdict(ids: list[int]) -> Verdict:
        if tuple(ids) not in known:
            with torch.inference_mode():
                logits = model(torch.tensor([ids])).logits[0, :-1]
            best = logits.topk(2)
            following = torch.log_softmax(logits.double(), -1)[torch.arange(len(ids) - 1), ids[1:]]
            leads = best.values[:, 0] - best.values[:, 1]
            known[tuple(ids)] = Verdict(best.indices[:, 0].tolist(), leads.tolist(), following)
        return known[tuple(ids)]

    return verdict


@pytest.fixture(scope="module", params=BACKENDS)
def generations(request, smollm2_path, weights_are_not_kept):
    llm = LLM(str(smollm2_path), kv_tokens=16_384, **BACKENDS[request.param])
    assert llm.engine.backend == request.param
    greedy = SamplingParams(
        temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, logprobs=0, prompt_logprobs=0
    )
    return llm.generate(PROMPTS, greedy)


def test_greedy_output_and_every_logprob_equal_transformers(judge, generations):
    """Feeding transformers our own output and asking for its choice at every position is the same as
    letting it generate, token for token; and it gives its logits at every position besides."""
    excused = 0
    worst = 0.0
    for prompt, generation in zip(PROMPTS, generations, strict=True):
        output = generation.completions[0]
        assert len(output.tokens) == OUTPUT_TOKENS
        ids = generation.prompt_ids + output.tokens
        verdict = judge(ids)
        for position, token in enumerate(output.tokens, start=len(generation.prompt_ids) - 1):
            if verdict.choices[position] != token:
                assert verdict.leads[position] < TIE, f"{prompt!r}: token {position} differs beyond a tie"
                excused += 1
        ours = [p.logprob for p in generation.prompt_logprobs + output.logprobs]
        assert len(ours) == len(ids) - 1
        differences = verdict.logprobs - torch.tensor(ours, dtype=torch.float64)
        worst = max(worst, differences.abs().max().item())
    print(
        f"{len(PROMPTS)} prompts × {OUTPUT_TOKENS} tokens: {excused} ties excused, worst logprob {worst:.1e}"
    )
    assert excused <= 4
    assert worst < TOLERANCE
