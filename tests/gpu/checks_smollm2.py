"""Real SmolLM2 weights on the device: greedy tokens of 32 prompts agree with those of the CPU reference.

$RIDGELINE_SMOLLM2 is the GGUF file (else the one in the cache is taken), $RIDGELINE_SMOLLM2_REFERENCE a JSON
file of what the reference says: {"prompts": [[ids]], "float32": [[tokens]], "bfloat16": [[tokens]],
"float32_margin": [[how far the best logit was above the second, per token]]}, bfloat16_margin likewise.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ridgeline.models.files.registry import cached_file, find_known
from ridgeline.models.spec.read_spec import read_spec
from ridgeline.models.weights.stream import stream_weights
from tests.gpu.collection import DEVICE, Skipped
from tests.gpu.engines import Sizes, cuda_runner, serve
from tests.gpu.models import DTYPES, compile_kernels, greedy

# Where tokens part, the reference's own choice must have been this close.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25}
SIZES = Sizes(step_tokens=512, max_running=32, num_blocks=1024, max_context=1024)


def _model_path() -> Path:
    if given := os.environ.get("RIDGELINE_SMOLLM2"):
        return Path(given)
    known = find_known("smollm2-135m")
    if known is None or not cached_file(known).is_file():
        raise Skipped("SmolLM2 is not in the cache, and $RIDGELINE_SMOLLM2 does not say where it is")
    return cached_file(known)


def _reference() -> dict[str, Any]:
    given = os.environ.get("RIDGELINE_SMOLLM2_REFERENCE")
    if not given or not Path(given).is_file():
        raise Skipped("$RIDGELINE_SMOLLM2_REFERENCE names no file with what the CPU reference says")
    reference: dict[str, Any] = json.loads(Path(given).read_text())
    return reference


def _compare(dtype: str, deterministic: bool = False) -> None:
    path, reference = _model_path(), _reference()
    spec = read_spec(path)
    compile_kernels(spec, dtype, SIZES, deterministic)
    weights = stream_weights(path, spec, DTYPES[dtype], None, DEVICE)
    runner = cuda_runner(spec, weights, SIZES, deterministic=deterministic)
    work = [
        (prompt, greedy(len(tokens)))
        for prompt, tokens in zip(reference["prompts"], reference[dtype], strict=True)
    ]
    margins = reference.get(f"{dtype}_margin", reference["float32_margin"])
    exact, wrong = 0, []
    for number, (answer,) in enumerate(serve(runner, SIZES, work)):
        expected = reference[dtype][number]
        assert answer.error is None, answer.error
        parts = next(
            (i for i, (a, b) in enumerate(zip(answer.tokens, expected, strict=True)) if a != b), None
        )
        if parts is None:
            exact += 1
        elif margins[number][parts] >= TOLERANCE[dtype]:
            wrong.append(f"prompt {number} at token {parts}: the reference was {margins[number][parts]} sure")
    print(f"SmolLM2 in {dtype}: {exact} of {len(work)} prompts agree to the last token", flush=True)
    assert len(work) >= 32
    assert not wrong, "\n".join(wrong)
    assert exact >= len(work) // 2


def check_smollm2_in_float32() -> None:
    _compare("float32")


def check_smollm2_in_float32_deterministic() -> None:
    _compare("float32", deterministic=True)


def check_smollm2_in_bfloat16() -> None:
    _compare("bfloat16")
