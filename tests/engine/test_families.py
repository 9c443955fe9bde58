"""Every family, through the whole engine, equals transformers token for token on a tiny random checkpoint."""

from __future__ import annotations

import random

import pytest
import torch

from ridgeline.engine.config import EngineConfig
from ridgeline.engine.errors import InvalidConfig
from ridgeline.engine.schedule.request import Request, SamplingParams
from ridgeline.engine.start.build import build_engine
from ridgeline.models.spec.coverage import refusal
from ridgeline.models.spec.read_spec import read_spec
from tests.models.tiny_checkpoints import MODELS, tiny_model
from tests.models.tiny_families import VOCAB

BACKENDS = {
    "native": {"backend": "native", "weights": "float32", "kv_dtype": "float32"},
    "torch": {"backend": "torch", "weights": "float32"},
}
OUTPUT_TOKENS = 40  # with the prompts, several times the sliding windows
TIE = 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MODELS)
def test_greedy_output_equals_transformers(name, backend, tmp_path, weights_are_not_kept):
    model = tiny_model(name)
    model.save_pretrained(tmp_path)
    config = EngineConfig(model=str(tmp_path), kv_tokens=4096, step_tokens=32, threads=1, **BACKENDS[backend])
    if (reason := refusal(read_spec(tmp_path), backend)) is not None:
        with pytest.raises(InvalidConfig, match=reason):
            build_engine(config, tmp_path)
        return
    built = build_engine(config, tmp_path)
    rng = random.Random(name)
    prompts = {f"r{i}": [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 60))] for i in range(8)}
    outputs: dict[str, list[int]] = {request_id: [] for request_id in prompts}
    greedy = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    for request_id, prompt in prompts.items():
        built.core.add(Request(request_id, prompt, greedy))
    while built.core.has_work:
        for delta in built.core.step():
            outputs[delta.request_id] += delta.tokens
    for request_id, prompt in prompts.items():
        output = outputs[request_id]
        assert len(output) == OUTPUT_TOKENS
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        best = logits.topk(2).values
        is_tie = best[:, 0] - best[:, 1] < TIE
        assert ((logits.argmax(-1) == torch.tensor(output)) | is_tie).all()
        assert is_tie.sum() <= 2
