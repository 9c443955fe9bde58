"""Tiny random checkpoints of every family, written by transformers and served on the device, answer as
transformers does: to the token in float32, but for ties; nearly in bfloat16.
"""

from __future__ import annotations

import random
import sys
import tempfile
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

from ridgeline.models.spec.read_spec import read_spec
from ridgeline.models.weights.stream import stream_weights
from tests.gpu.collection import DEVICE, scaled
from tests.gpu.engines import Sizes, cuda_runner, serve
from tests.gpu.models import DTYPES, compile_kernels, greedy

# No GGUF file is written here: where that library is missing, the checkpoints' module does without it. Their
# classes are imported above, while transformers still sees that it is missing.
missing = find_spec("gguf") is None
if missing:
    sys.modules["gguf"] = MagicMock()
from tests.models.tiny_checkpoints import tiny_model  # noqa: E402
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


def _compare(name: str, dtype: str, deterministic: bool = False, together: int = PROMPTS) -> None:
    model = tiny_model(name)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        spec = read_spec(Path(folder))
        weights = stream_weights(Path(folder), spec, DTYPES[dtype], None, DEVICE)
    compile_kernels(spec, dtype, SIZES, deterministic)
    rng = random.Random(name)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 60))] for _ in range(PROMPTS)]
    runner = cuda_runner(spec, weights, SIZES, deterministic=deterministic)
    work = [(prompt, greedy(OUTPUT_TOKENS)) for prompt in prompts]
    found = []
    for first in range(0, len(work), together):
        found += serve(runner, SIZES, work[first : first + together])
    ties = 0
    for prompt, (answer,) in zip(prompts, found, strict=True):
        assert answer.error is None, answer.error
        assert len(answer.tokens) == OUTPUT_TOKENS
        logits = _reference_logits(model, prompt, answer.tokens)
        chosen = logits.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
        gaps = logits.max(dim=-1).values - chosen
        assert float(gaps.max()) <= TOLERANCE[dtype], f"{name} in {dtype}: {float(gaps.max())} below the best"
        ties += int((gaps > 0).sum())
    allowed = 2 if dtype == "float32" else len(prompts) * OUTPUT_TOKENS // 8
    assert ties <= allowed, f"{name} in {dtype}: {ties} tokens are not the best"


def check_llama_in_float32() -> None:
    _compare("llama-tied-biased", "float32")


def check_llama_with_yarn_in_float32() -> None:
    _compare("llama-yarn", "float32")


def check_qwen2_in_float32() -> None:
    _compare("qwen2", "float32")


def check_qwen3_in_float32() -> None:
    _compare("qwen3", "float32")


def check_qwen3_in_float32_deterministic() -> None:
    _compare("qwen3", "float32", deterministic=True)


def check_single_rows_of_qwen3_in_float32() -> None:
    _compare("qwen3", "float32", together=1)


def check_qwen3_moe_in_float32() -> None:
    _compare("qwen3-moe", "float32")


def check_single_rows_of_qwen3_moe_in_float32() -> None:
    _compare("qwen3-moe", "float32", together=1)


def check_single_rows_of_qwen3_moe_in_bfloat16() -> None:
    _compare("qwen3-moe", "bfloat16", together=1)


def check_single_rows_of_a_model_with_two_kinds_of_layers_in_float32() -> None:
    _compare("qwen2-moe", "float32", together=1)


def check_mistral_in_float32() -> None:
    _compare("mistral", "float32")


def check_gemma3_in_float32() -> None:
    _compare("gemma3-untied-capped", "float32")


def check_qwen3_in_bfloat16() -> None:
    _compare("qwen3", "bfloat16")


def check_gemma3_in_bfloat16() -> None:
    _compare("gemma3", "bfloat16")


def check_mistral_in_bfloat16() -> None:
    _compare("mistral", "bfloat16")
