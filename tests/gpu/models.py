"""The model that most checks run: random weights in the shape of Qwen3, small enough to be made in a second;
and comparisons of what runs of it say.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import torch

from ridgeline.engine.run.cuda import warm as cuda_warm
from ridgeline.engine.run.cuda.graphs import ladder
from ridgeline.engine.schedule.request import SamplingParams
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.weights.torch_weights import Weights
from ridgeline.ops.cuda.dependent_launch import INTERPRETED
from ridgeline.ops.cuda.recording import compile_all, distinct
from tests.gpu.collection import DEVICE, scaled
from tests.gpu.engines import Answer, Sizes, family, weights_of

SPEC = (
    family("qwen3", num_layers=1)
    if INTERPRETED
    else family(
        "qwen3",
        hidden_size=1024,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        ffn_size=3072,
        vocab_size=8192,
        max_context=2048,
        num_layers=4,
    )
)
# Wide enough that a norm cuts its rows in another way where there are many.
WIDE_SPEC = replace(SPEC, hidden_size=2 * SPEC.hidden_size, layers=SPEC.layers[:2])
SIZES = scaled(
    Sizes(step_tokens=2048, max_running=64, num_blocks=4096, max_context=2048),
    Sizes(step_tokens=48, max_running=4, num_blocks=64, max_context=128),
)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@cache
def model_weights(dtype: str) -> Weights:
    return weights_of(SPEC, DTYPES[dtype], seed=1, device=DEVICE)


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{length} {seed}")
    return [rng.randrange(SPEC.vocab_size) for _ in range(length)]


def greedy(max_tokens: int, **more: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **more)  # type: ignore[arg-type]


def drawn(max_tokens: int, seed: int = 0, **more: object) -> SamplingParams:
    settings = {"temperature": 0.8, "seed": seed, "max_tokens": max_tokens, "ignore_eos": True, **more}
    return SamplingParams(**settings)  # type: ignore[arg-type]


def compile_kernels(spec: ModelSpec, dtype: str, sizes: Sizes, deterministic: bool = False) -> None:
    """Most of what a run launches, side by side instead of one after the other."""
    if INTERPRETED:
        return
    rows = ladder(sizes.max_running)
    dry_run = cuda_warm.StepDryRun(
        spec, DTYPES[dtype], rows[-1], sizes.step_tokens, sizes.max_context, sizes.num_blocks, deterministic
    )
    launches = cuda_warm.first_kernels(dry_run) + dry_run.prompts([20, 3])
    if not deterministic:
        for count in rows:
            launches += dry_run.decodes(count)
    compile_all(distinct(launches))


def first_difference(one: Answer, other: Answer, tolerance: float) -> str | None:
    """How two answers with log-probabilities of two tokens or more differ by more than arithmetic may.

    Where the tokens part, each must have been nearly as likely as the other; behind that nothing is equal.
    """
    for place, (a, b) in enumerate(zip(one.logprobs, other.logprobs, strict=True)):
        if a.token == b.token and abs(a.logprob - b.logprob) > tolerance:
            return f"token {place}: log-probabilities {a.logprob} and {b.logprob}"
        if a.token != b.token:
            gap = abs(dict(a.top).get(b.token, -1e9) - a.logprob)
            return None if gap <= tolerance else f"token {place}: {a.token} and {b.token}, {gap} apart"
    return None


def largest_difference(one: list[float], other: list[float]) -> float:
    assert len(one) == len(other)
    return max(abs(a - b) for a, b in zip(one, other, strict=True))
