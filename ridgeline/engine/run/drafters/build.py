"""Builds the drafters that compute, from files. Called by `build_engine` when the served model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from ridgeline.engine.errors import InvalidConfig
from ridgeline.engine.run.drafters.chain_drafter import ChainDrafter
from ridgeline.engine.run.drafters.medusa_drafter import MedusaDrafter
from ridgeline.engine.run.runner import Runner, TapsHidden
from ridgeline.engine.speculate.drafter import Drafter
from ridgeline.models.drafters.eagle3 import read_head
from ridgeline.models.drafters.kinds import HeadConfig
from ridgeline.models.drafters.medusa import read_medusa
from ridgeline.models.drafters.medusa_config import MedusaConfig
from ridgeline.models.drafters.mtp import read_mtp
from ridgeline.models.drafters.mtp_config import MtpConfig


def head_drafter(
    head: HeadConfig, path: Path, runner: Runner, most_running: int
) -> ChainDrafter | MedusaDrafter:
    """path: of an EAGLE-3 head. The head computes in the dtype and on the device of the model's embedding."""
    from ridgeline.engine.run.torch_runner import TorchRunner

    if not isinstance(runner, TapsHidden):
        raise InvalidConfig(f"--speculate {path}: the {runner.name} backend does not report hidden states")
    if isinstance(runner, TorchRunner):
        decoder = runner.decoder
    else:
        from ridgeline.engine.run.cuda.runner import CudaRunner

        decoder = cast(CudaRunner, runner).decoder  # type: ignore[assignment]
    embed, scale = decoder.weights.embed, decoder.spec.embedding_scale
    if isinstance(head, MedusaConfig):
        heads = read_medusa(head, embed.dtype, embed.device)
        return MedusaDrafter(heads, runner, decoder.spec.num_layers)
    if isinstance(head, MtpConfig):
        module = read_mtp(head, decoder.weights.lm_head, embed.dtype)
        return ChainDrafter(module, embed, scale, runner, most_running)
    return ChainDrafter(read_head(path, embed.dtype, embed.device), embed, scale, runner, most_running)


def head_cache_bytes(drafter: Drafter) -> int:
    """What a head's cache takes now."""
    return drafter.cache_bytes if isinstance(drafter, ChainDrafter) else 0
