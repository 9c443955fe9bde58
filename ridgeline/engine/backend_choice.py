"""Which backend serves a model: the native library wherever it can, torch for the rest, and always why.

Called once by `build_engine`, before anything heavy is imported. Loading the native library takes
milliseconds; torch is only looked for, never imported here.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Literal

from ridgeline.engine.config import EngineConfig
from ridgeline.engine.errors import BackendUnavailable, InvalidConfig
from ridgeline.models.spec import ModelSpec
from ridgeline.ops.cpu import library

INSTALL_TORCH = "pip install 'ridgeline[torch]'"


@dataclass(frozen=True, slots=True)
class BackendChoice:
    name: Literal["native", "torch"]
    reason: str = ""  # why not the native one, where nobody asked for torch


def choose_backend(config: EngineConfig, spec: ModelSpec) -> BackendChoice:
    """Raises InvalidConfig where what was asked for cannot be had; nothing asked for is dropped silently."""
    if config.backend == "torch":
        _require_torch("--backend torch asks for it")
        return BackendChoice("torch")
    reason = why_not_native(config, spec)
    if reason is None:
        return BackendChoice("native")
    if config.backend == "native":
        raise InvalidConfig(f"--backend native cannot be had: {reason}")
    if config.native_settings:
        raise InvalidConfig(
            f"{config.native_settings[0]} needs the native backend, which cannot be had: {reason}"
        )
    _require_torch(f"the native backend cannot be had ({reason})")
    return BackendChoice("torch", reason)


def why_not_native(config: EngineConfig, spec: ModelSpec) -> str | None:
    if config.torch_settings:
        return f"{config.torch_settings[0]} is a setting of torch's"
    try:
        library.choose_isa()
    except library.NativeUnavailable as error:
        return str(error)
    except library.NativeError as error:  # RIDGELINE_ISA names what does not run here
        raise InvalidConfig(str(error)) from error
    from ridgeline.models.packed import native_refusal

    return native_refusal(spec)


def _require_torch(why: str) -> None:
    if importlib.util.find_spec("torch") is None:
        raise BackendUnavailable(f"torch is needed here, and it is not installed: {why}. {INSTALL_TORCH}")
