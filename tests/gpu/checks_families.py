"""Tiny random checkpoints of every family, written by transformers and served on the device, answer as
transformers does, together and alone: to the token in float32, but for ties; nearly in bfloat16. The bits of
an answer in deterministic mode do not depend on the requests beside it or on the chunks of its prompt.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import MagicMock

import torch
from torch import Tensor
from transformers import (  # noqa: F401
    Gemma3ForCausalLM,
    LlamaForCausalLM,
    MistralForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)
from transformers.utils import logging

from ridgeline.models.spec.coverage import refusal
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.read_spec import read_spec
from ridgeline.models.weights.stream import stream_weights
from ridgeline.models.weights.torch_weights import Weights
from tests.gpu.collection import DEVICE, Skipped, scaled
from tests.gpu.engines import Sizes, Work, bits_of, cuda_runner, serve
from tests.gpu.models import DTYPES, compile_kernels, greedy

# No GGUF file is written here: where that library is missing, the checkpoints' module does without it. Its
# classes are imported above, while transformers still sees that it is missing.
missing = find_spec("gguf") is None
if missing:
    sys.modules["gguf"] = MagicMock()
from tests.models.tiny_checkpoints import MODELS, tiny_model  # noqa: E402
from tests.models.tiny_experts import EXPERT_MODELS  # noqa: E402
from tests.models.tiny_families import VOCAB  # noqa: E402

if missing:
    del sys.modules["gguf"]
logging.disable_progress_bar()

SIZES = Sizes(step_tokens=32, max_running=8, num_blocks=64, max_context=128)
OUTPUT_TOKENS = scaled(40, 2)
PROMPTS = scaled(8, 2)
# How far below the best a chosen token's logit may lie; logits are within ±5. The reference itself, in
# bfloat16, is up to 0.03 below, for one token of thirty.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.15}


def _reference_logits(model: torch.nn.Module, prompt: list[int], output: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    return logits.float()


def _loaded(name: str, dtype: str) -> tuple[torch.nn.Module, ModelSpec, Weights]:
    model = tiny_model(name)
    model.set_attn_implementation("eager")  # some releases compute Gemma 2 by others, without its softcap
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        spec = read_spec(Path(folder))
        if (reason := refusal(spec, "cuda")) is not None:
            raise Skipped(reason)
        return model, spec, stream_weights(Path(folder), spec, DTYPES[dtype], None, DEVICE)


def _prompts(name: str) -> list[list[int]]:
    rng = random.Random(name)
    return [[rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 60))] for _ in range(PROMPTS)]


def _compare(name: str, dtype: str) -> None:
    model, spec, weights = _loaded(name, dtype)
    compile_kernels(spec, dtype, SIZES)
    prompts = _prompts(name)
    runner = cuda_runner(spec, weights, SIZES)
    work: Work = [(prompt, greedy(OUTPUT_TOKENS)) for prompt in prompts]
    found = serve(runner, SIZES, work)
    alone = [serve(runner, SIZES, [one])[0] for one in work[:2]]
    ties = 0
    for prompt, (answer,) in zip(prompts + prompts[:2], found + alone, strict=True):
        assert answer.error is None, answer.error
        assert len(answer.tokens) == OUTPUT_TOKENS
        logits = _reference_logits(model, prompt, answer.tokens)
        chosen = logits.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
        gaps = logits.max(dim=-1).values - chosen
        assert float(gaps.max()) <= TOLERANCE[dtype], f"{name} in {dtype}: {float(gaps.max())} below the best"
        ties += int((gaps > 0).sum())
    allowed = 2 if dtype == "float32" else len(prompts) * OUTPUT_TOKENS // 8
    assert ties <= allowed, f"{name} in {dtype}: {ties} tokens are not the best"


def _to_the_bit(name: str) -> None:
    """Batched is alone, and chunked is whole; bfloat16."""
    _, spec, weights = _loaded(name, "bfloat16")
    compile_kernels(spec, "bfloat16", SIZES, deterministic=True)
    work: Work = [(prompt, greedy(scaled(6, 2), logprobs=3)) for prompt in _prompts(name)[:4]]
    runner = cuda_runner(spec, weights, SIZES, deterministic=True)
    together = bits_of(serve(runner, SIZES, work))
    chunks = replace(SIZES, prefill_chunk=7)
    for number, one in enumerate(work):
        alone = bits_of(serve(runner, SIZES, [one]))
        assert alone == [together[number]], f"{name}: request {number} alone"
        assert bits_of(serve(runner, chunks, [one])) == alone, f"{name}: request {number} in chunks"


def _checks() -> dict[str, Callable[[], None]]:
    found: dict[str, Callable[[], None]] = {}
    for name in MODELS:
        key = f"check_{name.replace('-', '_')}"
        found[f"{key}_in_float32"] = partial(_compare, name, "float32")
        if name not in EXPERT_MODELS:  # rounded to bfloat16, a router of random weights chooses other experts
            found[f"{key}_in_bfloat16"] = partial(_compare, name, "bfloat16")
        found[f"{key}_to_the_bit"] = partial(_to_the_bit, name)
    return found


globals().update(_checks())
