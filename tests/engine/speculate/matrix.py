"""Every drafter over a small model, for tests that compare output with guesses and without: its model, how it
is built over a runner, and a speculation that mixes all kinds of steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

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
from tests.engine.speculate.small_heads import SPEC, WEIGHTS, mimo, random_head, random_medusa, random_mtp
from tests.gpu.engines import Sizes, torch_runner, weights_of

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


def model_of(kind: str) -> tuple[ModelSpec, Weights]:
    """Of one layer where the drafter can do with it."""
    return (SPEC, WEIGHTS) if kind == "eagle3" else (MIMO, MIMO_WEIGHTS)


def drafter_of(kind: str, runner: Any, sizes: Sizes) -> Any:
    spec, weights = model_of(kind)
    text: dict[str, Callable[[], Drafter]] = {"ngram": NgramDrafter, "suffix": SuffixDrafter}
    if kind in text:
        return text[kind]()
    if kind == "draft_model":
        blocks = 120
        other = weights_of(spec, torch.float32, seed=9)
        own = torch_runner(spec, other, replace(sizes, num_blocks=blocks))
        return ModelDrafter(own, blocks, 16, sizes.step_tokens, sizes.max_context)
    if kind == "medusa":
        return MedusaDrafter(random_medusa(), runner, spec.num_layers)
    head = random_head() if kind == "eagle3" else random_mtp(spec, weights.lm_head.tensor)
    return ChainDrafter(head, weights.embed.tensor, 1.0, runner, sizes.max_running)
