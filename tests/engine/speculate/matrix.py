"""Every drafter over a small model, for tests that compare output with guesses and without: its model, how it
is built over a runner, and a speculation that mixes all kinds of steps. Needs no pytest."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ridgeline.engine.run.cuda.runner import CudaRunner
from ridgeline.engine.run.drafters.chain_drafter import ChainDrafter
from ridgeline.engine.run.drafters.medusa_drafter import MedusaDrafter
from ridgeline.engine.run.drafters.model_drafter import ModelDrafter
from ridgeline.engine.schedule.scheduler import Scheduler
from ridgeline.engine.schedule.step import StepPlan
from ridgeline.engine.speculate.drafter import Drafter
from ridgeline.engine.speculate.ngram import NgramDrafter
from ridgeline.engine.speculate.speculation import Speculation
from ridgeline.engine.speculate.suffix import SuffixDrafter
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.weights.torch_weights import Weights
from tests.engine.speculate.option_cases import LIKELY
from tests.engine.speculate.small_heads import SPEC, WEIGHTS, mimo, random_head, random_medusa, random_mtp
from tests.gpu.engines import BLOCK_SIZE, Sizes, cuda_runner, torch_runner, weights_of

Model = tuple[ModelSpec, Weights]

MIMO = mimo(num_layers=1)
MIMO_WEIGHTS = weights_of(MIMO, torch.float32)
TEXT = ("ngram", "suffix")
HEADS = ("eagle3", "medusa", "mtp")
DRAFTERS = (*TEXT, "draft_model", *HEADS)


class Moody(Speculation):
    """Waits for the newest tokens or not, and verifies none to six guesses of each row, by chance: steps with
    guesses come between steps that were launched ahead."""

    def __init__(self, drafter: Drafter, vocab_size: int, seed: int = 0) -> None:
        super().__init__(drafter, vocab_size, 3)
        self._rng = random.Random(seed)

    def pays_to_wait(self, plan: StepPlan) -> bool:
        return self._rng.random() < 0.6

    def extend(self, plan: StepPlan, scheduler: Scheduler, most_samples: int | None = None) -> None:
        self.fixed_length = self._rng.choice((0, 1, 2, 3, 6))
        super().extend(plan, scheduler, most_samples)


def model_of(kind: str) -> Model:
    """Of one layer where the drafter can do with it."""
    return (SPEC, WEIGHTS) if kind == "eagle3" else (MIMO, MIMO_WEIGHTS)


def drafter_of(kind: str, runner: Any, sizes: Sizes, model: Model | None = None, likely: bool = False) -> Any:
    """likely: a head guesses the tokens that are likely in such work. A draft model, which draws with the
    request's own options, and the text do so anyway"""
    spec, weights = model or model_of(kind)
    text: dict[str, Callable[[], Drafter]] = {"ngram": NgramDrafter, "suffix": SuffixDrafter}
    if kind in text:
        return text[kind]()
    if kind == "draft_model":
        return _model_drafter(spec, weights, runner, sizes)
    device = weights.embed.device
    if kind == "medusa":
        heads = random_medusa(spec=spec).to(device)
        if likely:
            heads.logits = _leaning(heads.logits, LIKELY)
        return MedusaDrafter(heads, runner, spec.num_layers)
    if kind == "eagle3":
        head = random_head(spec=spec, vocabulary=min(60, spec.vocab_size)).to(device)
        among = [head.draft_ids.tolist().index(token) for token in LIKELY]
    else:
        head, among = random_mtp(spec, weights.lm_head.tensor), list(LIKELY)
    if likely:
        head.logits = _leaning(head.logits, among)
    return ChainDrafter(head, weights.embed.tensor, 1.0, runner, sizes.max_running)


def _leaning(logits: Callable[[Tensor], Tensor], tokens: Any) -> Callable[[Tensor], Tensor]:
    def leaning(hidden: Tensor) -> Tensor:
        found = logits(hidden).clone()
        found[..., list(tokens)] += 1000.0
        return found

    return leaning


def _model_drafter(spec: ModelSpec, weights: Weights, runner: Any, sizes: Sizes) -> ModelDrafter:
    """Another model of the same shape, on the same backend; with room for the longest sequences."""
    blocks = sizes.max_running * -(-sizes.max_context // BLOCK_SIZE)
    make = cuda_runner if isinstance(runner, CudaRunner) else torch_runner
    other = weights_of(spec, torch.float32, seed=9, device=weights.embed.device)
    own = make(spec, other, replace(sizes, num_blocks=blocks))
    return ModelDrafter(own, blocks, BLOCK_SIZE, sizes.step_tokens, sizes.max_context)
