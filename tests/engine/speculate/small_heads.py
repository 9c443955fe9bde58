"""A small model with random weights, and draft heads for it that are random, too: what they guess is rarely
right, and must never matter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from ridgeline.models.drafters.eagle3 import Eagle3Head
from ridgeline.models.drafters.eagle3_config import Eagle3Config
from ridgeline.models.drafters.medusa import MedusaHeads
from ridgeline.models.drafters.medusa_config import MedusaConfig
from ridgeline.models.drafters.mtp import MtpModule
from ridgeline.models.drafters.mtp_config import MtpConfig, mtp_config
from ridgeline.models.spec.model_spec import ExtraWeights, ModelSpec
from tests.gpu.engines import Sizes, family, weights_of

SPEC = family("qwen3", num_layers=4)
WEIGHTS = weights_of(SPEC, torch.float32)
SIZES = Sizes(step_tokens=40, max_running=16, num_blocks=48, max_context=64)


def random_head(length: int = 4, vocabulary: int = 60, spec: ModelSpec = SPEC) -> Eagle3Head:
    torch.manual_seed(3)
    config = Eagle3Config.for_target(spec, vocabulary, length, "small")
    ids = torch.arange(vocabulary) + torch.arange(vocabulary) // 2
    return Eagle3Head(config, ids).requires_grad_(False)


def random_medusa(length: int = 4, layers: int = 1, spec: ModelSpec = SPEC) -> MedusaHeads:
    torch.manual_seed(4)
    config = MedusaConfig(Path(), spec.hidden_size, spec.vocab_size, spec.vocab_size, length, layers)
    return MedusaHeads(config).requires_grad_(False)


def mimo(num_layers: int = 2, **sizes: int) -> ModelSpec:
    """A small model with a module that predicts further tokens."""
    extra = (ExtraWeights("MTP", 1, resident=False),)
    return replace(family("qwen2", num_layers=num_layers, **sizes), family="mimo", extra_parameters=extra)


def random_mtp(spec: ModelSpec, lm_head: torch.Tensor, length: int = 3) -> MtpModule:
    torch.manual_seed(5)
    config: MtpConfig = replace(mtp_config(spec, Path()), length=length)
    module = MtpModule(config, lm_head).to(device=lm_head.device, dtype=lm_head.dtype)
    return module.requires_grad_(False)
