"""A small model with random weights, and a draft head for it that is random, too: what it guesses is rarely
right, and must never matter."""

from __future__ import annotations

import torch

from ridgeline.models.drafters.eagle3 import Eagle3Head
from ridgeline.models.drafters.eagle3_config import Eagle3Config
from tests.gpu.engines import Sizes, family, weights_of

SPEC = family("qwen3", num_layers=4)
WEIGHTS = weights_of(SPEC, torch.float32)
SIZES = Sizes(step_tokens=40, max_running=16, num_blocks=48, max_context=64)


def random_head(length: int = 4, vocabulary: int = 60) -> Eagle3Head:
    torch.manual_seed(3)
    config = Eagle3Config.for_target(SPEC, vocabulary, length, "small")
    ids = torch.arange(vocabulary) + torch.arange(vocabulary) // 2
    return Eagle3Head(config, ids).requires_grad_(False)
