"""Chooses the backend for a model: a usable GPU, else the native library, else torch, with the reason.

Called once by `build_engine`, before anything heavy is imported. Loading the native library takes
milliseconds; torch and triton are only looked up, never imported here.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ridgeline.engine.config import EngineConfig
from ridgeline.engine.errors import BackendUnavailable, InvalidConfig
from ridgeline.engine.start.gpu_probe import Gpu, find_gpu, why_not_usable
from ridgeline.models.spec.coverage import Backend, others_for, refusal
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.ops.cpu import library

INSTALL_TORCH = "pip install 'ridgeline[torch]'"
NO_GPU = "no GPU is visible"

Probe = Callable[[], Gpu | None]


@dataclass(frozen=True, slots=True)
class BackendChoice:
    name: Literal["native", "torch", "cuda"]
    reason: str = ""  # why not a better one, if the user did not ask for this one


def choose_backend(config: EngineConfig, spec: ModelSpec, probe: Probe = find_gpu) -> BackendChoice:
    """Raises InvalidConfig if a requested setting is not available; no setting is dropped silently."""
    if config.backend == "torch":
        _require_torch("required by --backend torch")
        return BackendChoice("torch")
    not_cuda = why_not_cuda(config, spec, probe) if config.backend != "native" else ""
    if not_cuda is None:
        return BackendChoice("cuda")
    if config.backend == "cuda":
        raise InvalidConfig(f"--backend cuda is not available: {not_cuda}{_others(spec, 'cuda')}")
    not_native = why_not_native(config, spec)
    # A machine without a GPU needs no note; a GPU that is not used does.
    idle_gpu = f"the GPU is not used: {not_cuda}" if not_cuda not in ("", NO_GPU) else ""
    if not_native is None:
        return BackendChoice("native", idle_gpu)
    if config.backend == "native":
        raise InvalidConfig(f"--backend native is not available: {not_native}{_others(spec, 'native')}")
    _refuse_what_torch_lacks(config, {"native": not_native, "cuda": not_cuda})
    _require_torch(f"the native backend is not available ({not_native})")
    return BackendChoice("torch", "; ".join(filter(None, (not_native, idle_gpu))))


def why_not_cuda(config: EngineConfig, spec: ModelSpec, probe: Probe = find_gpu) -> str | None:
    return why_not_gpu(config, probe) or refusal(spec, "cuda")


def why_not_gpu(config: EngineConfig, probe: Probe = find_gpu) -> str | None:
    gpu = probe()
    return NO_GPU if gpu is None else config.unknown_to("cuda") or why_not_usable(gpu)


def why_not_native(config: EngineConfig, spec: ModelSpec) -> str | None:
    unknown = config.unknown_to("native")
    if unknown is not None:
        return unknown
    try:
        library.choose_isa()
    except library.NativeUnavailable as error:
        return str(error)
    except library.NativeError as error:  # RIDGELINE_ISA names an instruction set this CPU lacks
        raise InvalidConfig(str(error)) from error
    from ridgeline.models.weights.packed import native_refusal

    return native_refusal(spec)


def _others(spec: ModelSpec, backend: Backend) -> str:
    """The backends to choose in place of one that does not compute the model."""
    return "" if refusal(spec, backend) is None else others_for(spec, backend)


def _refuse_what_torch_lacks(config: EngineConfig, reasons: dict[str, str]) -> None:
    for flag, knowers in config.backend_settings.items():
        if "torch" not in knowers:
            whys = "; ".join(f"{backend}: {reasons[backend]}" for backend in knowers)
            raise InvalidConfig(f"{flag} needs a backend that is not available: {whys}")


def _require_torch(why: str) -> None:
    if importlib.util.find_spec("torch") is None:
        raise BackendUnavailable(f"torch is not installed ({why}). Install it: {INSTALL_TORCH}")
