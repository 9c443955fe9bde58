"""Ways to run the same step give the same bits: graphs or eager, launched ahead or not, kernels that start
early or one after the other.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from ridgeline.ops.cuda.dependent_launch import PDL
from tests.gpu.collection import Skipped, scaled
from tests.gpu.engines import Work, bits_of, cuda_runner, errors_of, serve
from tests.gpu.models import SIZES, SPEC, compile_kernels, drawn, greedy, model_weights, prompt

LENGTHS = scaled((1, 3, 17, 64, 200, 700), (1, 9))


def _work(samples: int) -> Work:
    """Never more than run at once, so that steps are the same however they are launched."""
    others: list[dict[str, Any]] = [{"top_k": 20}, {"repetition_penalty": 1.3}, {"n": samples}, {}]
    asked = [{"logprobs": 4}, *others]
    return [
        (
            prompt(LENGTHS[i % len(LENGTHS)], i),
            (greedy if i % 2 else drawn)(scaled(8, 3) + i % 5, **asked[i % 5]),
        )
        for i in range(scaled(30, 2))
    ]


def _bits(lookahead: int | None = None, times: int = 1, samples: int = 2, **settings: Any) -> list[Any]:
    """Of the last of these runs: the first ones compile, and capture graphs."""
    runner = cuda_runner(SPEC, model_weights("bfloat16"), SIZES, **settings)
    for _ in range(times):
        found = serve(runner, SIZES, _work(samples), lookahead)
        assert not errors_of(found), errors_of(found)
    if settings.get("cuda_graphs", True) and not settings.get("deterministic") and times > 1:
        assert scaled(runner.graphs.replays > 0, True), "no step was replayed"
    return bits_of(found)


def check_graphs_change_no_bit() -> None:
    compile_kernels(SPEC, "bfloat16", SIZES)
    assert _bits(times=3) == _bits(cuda_graphs=False)


def check_launching_ahead_changes_no_bit() -> None:
    """Samples of one prompt part when a step is read: launched ahead, that is in another step's company."""
    assert _bits(times=2, samples=1) == _bits(lookahead=0, samples=1)


def check_launching_ahead_changes_no_bit_of_the_deterministic_mode() -> None:
    assert _bits(deterministic=True) == _bits(lookahead=0, deterministic=True)


def check_a_run_says_the_same_again() -> None:
    assert _bits(times=3) == _bits(times=1)


def print_bits() -> None:
    print(repr(_bits()))


def check_kernels_that_start_early_change_no_bit() -> None:
    if not PDL:
        raise Skipped("kernels do not start early here")
    program = "from tests.gpu.checks_paths import print_bits; print_bits()"
    environment = {**os.environ, "RIDGELINE_PDL": "0"}
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == repr(_bits())
