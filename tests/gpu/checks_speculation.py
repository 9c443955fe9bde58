"""Output with guesses is output without on a device, where steps are graphs and are launched ahead: every
option that needs no small vocabulary, with guesses from past answers and from heads that are random.
"""

from __future__ import annotations

from pathlib import Path

import torch

from ridgeline.engine.run.cuda.runner import CudaRunner
from ridgeline.engine.run.drafters.chain_drafter import ChainDrafter
from ridgeline.engine.run.drafters.medusa_drafter import MedusaDrafter
from ridgeline.engine.speculate.drafter import Drafter
from ridgeline.engine.speculate.suffix import SuffixDrafter
from ridgeline.models.drafters.eagle3 import Eagle3Head
from ridgeline.models.drafters.eagle3_config import Eagle3Config
from ridgeline.models.drafters.medusa import MedusaHeads
from ridgeline.models.drafters.medusa_config import MedusaConfig
from tests.engine.speculate.matrix import Moody
from tests.engine.speculate.option_cases import OPTIONS, assert_alike, served, work
from tests.gpu.collection import DEVICE, scaled
from tests.gpu.engines import cuda_runner
from tests.gpu.models import SIZES, SPEC, compile_kernels, model_weights

LOGPROB_BOUND = 1e-3  # float32: other products for another number of rows
NAMES = scaled(tuple(OPTIONS), ("sampled",))
TOKENS = scaled(24, 5)
TIMES = scaled(3, 1)  # the first ones compile, and capture graphs


def _runner(**settings: bool) -> CudaRunner:
    compile_kernels(SPEC, "float32", SIZES, settings.get("deterministic", False))
    return cuda_runner(SPEC, model_weights("float32"), SIZES, **settings)


def _suffix(runner: CudaRunner) -> Drafter:
    return SuffixDrafter()


def _medusa(runner: CudaRunner) -> Drafter:
    torch.manual_seed(4)
    config = MedusaConfig(Path(), SPEC.hidden_size, SPEC.vocab_size, SPEC.vocab_size, 3, 1)
    heads = MedusaHeads(config).to(DEVICE).requires_grad_(False)
    return MedusaDrafter(heads, runner, SPEC.num_layers)


def _eagle3(runner: CudaRunner) -> Drafter:
    torch.manual_seed(3)
    config = Eagle3Config.for_target(SPEC, 60, 4, "small")
    head = Eagle3Head(config, torch.arange(60)).to(DEVICE).requires_grad_(False)
    return ChainDrafter(head, model_weights("float32").embed.tensor, 1.0, runner, SIZES.max_running)


def _compare(make, bound: float, **settings: bool) -> None:
    requests = work(list(NAMES), tokens=TOKENS)
    plain = _runner(**settings)
    expected = served(plain, SIZES, requests, times=TIMES)
    runner = _runner(**settings)
    speculation = Moody(make(runner), SPEC.vocab_size)
    found = served(runner, SIZES, requests, speculation, times=TIMES)
    assert_alike(found, expected, bound)
    stats = speculation.stats()
    assert scaled(stats.drafted > 100 and stats.off["overlap"] > 0, True), stats
    if not settings.get("deterministic"):
        assert scaled(runner.graphs.replays > 0, True), "no step was replayed"


def check_guesses_from_past_answers_change_no_token() -> None:
    _compare(_suffix, LOGPROB_BOUND)


def check_they_change_no_bit_of_the_deterministic_mode() -> None:
    _compare(_suffix, 0.0, deterministic=True)


def check_medusa_heads_change_no_token() -> None:
    _compare(_medusa, LOGPROB_BOUND)


def check_a_draft_head_changes_no_token() -> None:
    if SPEC.num_layers >= 4:
        _compare(_eagle3, LOGPROB_BOUND)
