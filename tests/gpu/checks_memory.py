"""Nothing reads unwritten memory: with NaN in the KV cache and all buffers, every answer is as ever.

Each thing that a request may ask for is tried alone, many rows at once and again and again: a part that fails
names the kernels that only it launches. A race between threads shows up here, too.
"""

from __future__ import annotations

from typing import Any

from tests.gpu.collection import scaled
from tests.gpu.engines import Work, bits_of, cuda_runner, errors_of, poison, poisoned_memory, serve
from tests.gpu.models import SIZES, SPEC, compile_kernels, drawn, greedy, model_weights, prompt

PARTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "greedy": (greedy, {}),
    "drawn": (drawn, {}),
    "top_k": (drawn, {"top_k": 20}),
    "top_p": (drawn, {"top_p": 0.9}),
    "top_k above the candidates": (drawn, {"top_k": 900, "top_p": 0.97}),
    "min_p": (drawn, {"min_p": 0.05}),
    "penalties": (drawn, {"repetition_penalty": 1.3, "frequency_penalty": 0.5}),
    "penalties and top_p": (drawn, {"presence_penalty": 0.5, "top_p": 0.9}),
    "bias and suppressed ids": (greedy, {"logit_bias": {5: 3.0}, "min_tokens": 2, "stop_token_ids": (5,)}),
    "logprobs": (greedy, {"logprobs": 20}),
    "prompt_logprobs": (greedy, {"prompt_logprobs": 1}),
    "samples": (drawn, {"n": 2}),
}
LENGTHS = scaled((1, 3, 17, 64, 200, 700), (3,))
ROWS = scaled(30, 2)
TIMES = scaled(3, 1)


def _work(part: str) -> Work:
    params, asked = PARTS[part]
    return [
        (prompt(LENGTHS[i % len(LENGTHS)], i), params(scaled(12, 2) + i % 3, **asked)) for i in range(ROWS)
    ]


def _all_parts(dtype: str, deterministic: bool) -> None:
    compile_kernels(SPEC, dtype, SIZES, deterministic)
    weights = model_weights(dtype)
    clean = cuda_runner(SPEC, weights, SIZES, deterministic=deterministic, cuda_graphs=False)
    with poisoned_memory():
        poisoned = cuda_runner(SPEC, weights, SIZES, deterministic=deterministic)
        failures = []
        for part in PARTS if scaled(True, False) else ("greedy", "top_k", "logprobs"):
            work = _work(part)
            right = serve(clean, SIZES, work)
            assert not errors_of(right), errors_of(right)
            expected = bits_of(right)
            for time in range(TIMES):
                poison(poisoned)
                found = bits_of(serve(poisoned, SIZES, work))
                if found != expected:
                    wrong = [
                        place for place, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b
                    ]
                    errors = {answer[3] for place in wrong for answer in found[place]}
                    failures.append(f"{part}, time {time}: requests {wrong}, errors {errors}")
    assert not failures, "\n".join(failures)


def check_poisoned_memory_in_bfloat16() -> None:
    _all_parts("bfloat16", deterministic=False)


def check_poisoned_memory_in_bfloat16_deterministic() -> None:
    _all_parts("bfloat16", deterministic=True)


def check_poisoned_memory_in_float32() -> None:
    _all_parts("float32", deterministic=False)


def check_poisoned_memory_in_float32_deterministic() -> None:
    _all_parts("float32", deterministic=True)
