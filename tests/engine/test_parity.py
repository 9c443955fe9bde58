"""Our greedy tokens and log-probabilities are those of transformers on the same dequantized weights."""

from typing import NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from ridgeline import LLM, SamplingParams
from tests.engine.prompts import PROMPTS
from tests.models.gguf_oracle import llama_from_gguf

BACKENDS = {
    "native": {"backend": "native", "weights": "float32", "kv_dtype": "float32"},
    "torch": {"backend": "torch", "weights": "float32", "threads": 1},
}
# Prompts, and tokens of output. The slow run is the one that docs/promises.md reports.
SIZES = {"brief": (PROMPTS[::3], 32), "whole": (PROMPTS, 64)}
TOGETHER = 16  # sequences in a forward pass of transformers
TIE = 1e-3  # transformers' own two best logits closer than this: either choice is right
TOLERANCE = 1e-3  # of a log-probability


class Verdict(NamedTuple):
    """What transformers says of a sequence, at every position but the last."""

    choices: list[int]
    leads: list[float]  # of the best logit over the second
    logprobs: torch.Tensor  # of the token that does follow


class Judge:
    """Many sequences to a forward pass: each costs little then, even where others use the processor too. Both
    backends mostly say the same, so each sequence is judged once."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._known: dict[tuple[int, ...], Verdict] = {}

    def verdicts(self, sequences: list[list[int]]) -> list[Verdict]:
        new = sorted({tuple(ids) for ids in sequences} - self._known.keys(), key=len)
        for first in range(0, len(new), TOGETHER):
            self._hear(new[first : first + TOGETHER])
        return [self._known[tuple(ids)] for ids in sequences]

    @torch.inference_mode()
    def _hear(self, sequences: list[tuple[int, ...]]) -> None:
        # Padding comes after a sequence, where a causal model does not look.
        padded = pad_sequence([torch.tensor(ids) for ids in sequences], batch_first=True)
        for ids, logits in zip(sequences, self._model(padded).logits, strict=True):
            said = logits[: len(ids) - 1]
            best = said.topk(2)
            following = said.gather(1, torch.tensor(ids[1:])[:, None])[:, 0] - said.logsumexp(-1)
            leads = best.values[:, 0] - best.values[:, 1]
            self._known[ids] = Verdict(best.indices[:, 0].tolist(), leads.tolist(), following)


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread():
    """torch's threads wait for each other after every op: beside other work two take seven times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def judge(smollm2_path):
    return Judge(llama_from_gguf(smollm2_path))


@pytest.fixture(scope="module", params=BACKENDS)
def llm(request, smollm2_path, weights_are_not_kept):
    made = LLM(str(smollm2_path), kv_tokens=16_384, **BACKENDS[request.param])
    assert made.engine.backend == request.param
    return made


@pytest.mark.parametrize("size", ["brief", pytest.param("whole", marks=pytest.mark.slow)])
def test_greedy_output_and_every_logprob_equal_transformers(judge, llm, size):
    """Feeding transformers our own output and asking for its choice at every position is the same as
    letting it generate, token for token; and it gives its logits at every position besides."""
    prompts, count = SIZES[size]
    greedy = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    generations = llm.generate(prompts, greedy)
    excused = 0
    worst = 0.0
    verdicts = judge.verdicts([made.prompt_ids + made.completions[0].tokens for made in generations])
    for prompt, generation, verdict in zip(prompts, generations, verdicts, strict=True):
        output = generation.completions[0]
        assert len(output.tokens) == count
        for position, token in enumerate(output.tokens, start=len(generation.prompt_ids) - 1):
            if verdict.choices[position] != token:
                assert verdict.leads[position] < TIE, f"{prompt!r}: token {position} differs beyond a tie"
                excused += 1
        ours = [p.logprob for p in generation.prompt_logprobs + output.logprobs]
        assert len(ours) == len(generation.prompt_ids) + count - 1
        worst = max(worst, (verdict.logprobs - torch.tensor(ours)).abs().max().item())
    print(f"{len(prompts)} prompts × {count} tokens: {excused} ties excused, worst logprob {worst:.1e}")
    assert excused <= 4
    assert worst < TOLERANCE
