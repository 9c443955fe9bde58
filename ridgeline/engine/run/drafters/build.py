"""Builds the drafters that compute, from files. Called by `build_engine` when the served model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from ridgeline.engine.errors import InvalidConfig
from ridgeline.engine.run.drafters.eagle3_drafter import Eagle3Drafter
from ridgeline.engine.run.runner import Runner, TapsHidden
from ridgeline.models.drafters.eagle3 import read_head


def head_drafter(path: Path, runner: Runner, most_running: int) -> Eagle3Drafter:
    """The head computes in the dtype and on the device of the model's embedding."""
    from ridgeline.engine.run.torch_runner import TorchRunner

    if not isinstance(runner, TapsHidden):
        raise InvalidConfig(f"--speculate {path}: the {runner.name} backend does not report hidden states")
    if isinstance(runner, TorchRunner):
        decoder = runner.decoder
    else:
        from ridgeline.engine.run.cuda.runner import CudaRunner

        decoder = cast(CudaRunner, runner).decoder  # type: ignore[assignment]
    embed, scale = decoder.weights.embed, decoder.spec.embedding_scale
    head = read_head(path, embed.dtype, embed.device)
    return Eagle3Drafter(head, embed, scale, runner, most_running)
