"""Output with guesses is output without on a device, where steps are graphs and are launched ahead: every
drafter with every option together, also bit for bit in deterministic mode, and with chunks and preemption.

python -m tests.gpu speculation
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch

from ridgeline.engine.run.cuda.runner import CudaRunner
from tests.engine.speculate.matrix import DRAFTERS, Model, Moody, drafter_of, model_of
from tests.engine.speculate.option_cases import (
    NAMES,
    Answers,
    assert_alike,
    assert_ended_as_asked,
    run,
    served,
    work,
)
from tests.engine.speculate.small_heads import mimo
from tests.gpu.collection import DEVICE, scaled
from tests.gpu.engines import Sizes, cuda_runner, weights_of
from tests.gpu.models import SIZES, SPEC, compile_kernels, model_weights

LOGPROB_BOUND = 1e-3  # float32: other products for another number of rows
OPTIONS = scaled(NAMES, ("sampled", "ends"))
TOKENS = scaled(24, 6)
TIMES = scaled(3, 1)  # the first ones compile, and capture graphs
FEW = Sizes(step_tokens=64, max_running=4, num_blocks=8, max_context=64, prefill_chunk=7)
MODES: dict[str, tuple[Sizes, bool]] = {  # and whether it is the deterministic mode
    "changes_no_token": (SIZES, False),
    "changes_no_bit_of_the_deterministic_mode": (SIZES, True),
    "changes_no_token_with_chunks_and_preemption": (FEW, False),
}


@cache
def _model(kind: str) -> Model:
    if DEVICE == "cpu":
        return model_of(kind)
    if kind != "mtp":
        return SPEC, model_weights("float32")
    sizes = {"hidden_size": 1024, "num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "ffn_size": 3072}
    spec = mimo(num_layers=2, vocab_size=8192, max_context=2048, **sizes)
    return spec, weights_of(spec, torch.float32, seed=1, device=DEVICE)


def _runner(kind: str, mode: str) -> CudaRunner:
    (spec, weights), (sizes, deterministic) = _model(kind), MODES[mode]
    compile_kernels(spec, "float32", sizes, deterministic)
    return cuda_runner(spec, weights, sizes, deterministic=deterministic)


@cache
def _expected(kind: str, mode: str) -> Answers:
    """Without guesses. kind: the first drafter of a model, for all of them"""
    requests = work(list(OPTIONS), TOKENS, _model(kind)[0].vocab_size, likely=True)
    answers = served(_runner(kind, mode), MODES[mode][0], requests, times=TIMES)
    assert_ended_as_asked(answers)
    return answers


def _compare(kind: str, mode: str) -> None:
    (spec, weights), (sizes, deterministic) = _model(kind), MODES[mode]
    first = next(each for each in DRAFTERS if _model(each)[0] is spec)
    expected = _expected(first, mode)
    runner = _runner(kind, mode)
    drafter = drafter_of(kind, runner, sizes, (spec, weights), likely=True)
    speculation = Moody(drafter, spec.vocab_size)
    requests = work(list(OPTIONS), TOKENS, spec.vocab_size, likely=True)
    found = run(runner, sizes, requests, speculation, times=TIMES, repeats=True)
    assert_alike(found.answers, expected, 0.0 if deterministic else LOGPROB_BOUND)
    stats = speculation.stats()
    assert 0 < stats.accepted < stats.drafted, stats
    assert stats.off["overlap"] > 0, stats
    assert found.prefix_hits > 0
    if sizes is FEW:
        assert scaled(found.preemptions > 0, True), "no sequence was preempted"
    if not deterministic:
        assert scaled(runner.graphs.replays > 0, True), "no step was replayed"


def _checks() -> dict[str, Callable[[], None]]:
    return {f"check_{kind}_{mode}": partial(_compare, kind, mode) for kind in DRAFTERS for mode in MODES}


globals().update(_checks())
