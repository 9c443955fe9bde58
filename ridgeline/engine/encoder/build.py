"""From an EngineConfig to a warm EncoderCore: spec, backend, memory, weights, one text through all of it.

Used by the engine process for encoder models (`is_encoder`), and by benchmarks. Settings without effect on
an encoder are listed in the notes; settings that would change its results are rejected.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from ridgeline.engine.config import EngineConfig
from ridgeline.engine.encoder.core import EncoderCore, EncoderLimits, EncoderRunner, Want
from ridgeline.engine.encoder.runners import NativeEncoderRunner, TorchEncoderRunner
from ridgeline.engine.errors import BackendUnavailable, InvalidConfig, OutOfMemoryPlan
from ridgeline.engine.limits.machine_limits import native_ceilings
from ridgeline.engine.start.backend_choice import INSTALL_TORCH, why_not_gpu
from ridgeline.engine.start.build import StartupBudget
from ridgeline.engine.start.memory import DEFAULT_FRACTION, GIB, available_memory, resident_bytes
from ridgeline.machine import compute_threads
from ridgeline.models.encoders.packed import FORMATS, encoder_table, encoder_weights
from ridgeline.models.encoders.weights import load_encoder_weights
from ridgeline.models.spec.encoder_spec import EncoderSpec
from ridgeline.models.spec.readers.encoder_config import read_encoder_spec
from ridgeline.ops.cpu import library
from ridgeline.ops.cpu.encoder import NativeEncoder
from ridgeline.ops.cpu.library import NativeError, Peak

STEP_TOKENS = 512  # about 50 ms of a small encoder on two cores: the longest wait of a new request
LIMIT_TOKENS = 64  # text length for the printed limit
WARM_UP_TOKENS = 8
# Settings for growing sequences, which an encoder does not have.
WITHOUT_EFFECT = (
    *("kv_dtype", "kv_tokens", "kv_memory_gib", "block_size", "prefill_chunk", "max_running"),
    "speculate",
)


@dataclass(frozen=True)
class BuiltEncoder:
    core: EncoderCore
    spec: EncoderSpec
    summary: str
    notes: tuple[str, ...]
    budget: StartupBudget
    limits: dict[str, float]


def build_encoder(config: EngineConfig, path: Path, budget: StartupBudget | None = None) -> BuiltEncoder:
    budget = budget or StartupBudget()
    with budget.stage("plan"):
        spec = read_encoder_spec(path)
        backend, reason = _choose(config)
        weights = _weights(backend, config, spec)
        max_text_tokens = _longest(config, spec)
        step_tokens = max(config.step_tokens or STEP_TOKENS, max_text_tokens)
        _check_memory(config, spec, step_tokens)
    threads = config.threads or compute_threads()
    with budget.stage("weights"):
        runner, unit = _runner(backend, weights, path, spec, step_tokens, threads)
    wants: tuple[Want, ...] = ("score",) if spec.output == "score" else ("vector", "tokens")
    core = EncoderCore(
        runner,
        EncoderLimits(
            step_tokens, max_text_tokens, spec.vocab_size, spec.num_types, config.max_waiting, wants
        ),
        config.step_ring,
    )
    with budget.stage("warm-up"):
        warm = np.zeros(min(WARM_UP_TOKENS, max_text_tokens), np.int32)
        runner.encode(warm, np.array([0, len(warm)], np.int32), None, wants[0])
    with budget.stage("limits"):
        limits = _limits(spec, weights, threads) if backend == "native" else {}
    saved = 2 * spec.matmul_parameters if weights == "bfloat16" else 0
    budget.bytes["weights"] = spec.weight_bytes("float32") - saved
    budget.bytes["kv"] = 0
    budget.bytes["rest"] = max(resident_bytes() - budget.bytes["weights"], 0)
    return BuiltEncoder(
        core=core,
        spec=spec,
        summary=f"{backend} ({unit}), weights {weights}",
        notes=(*spec.notes, *((reason,) if reason else ()), *_unused(config)),
        budget=budget,
        limits=limits,
    )


def _choose(config: EngineConfig) -> tuple[str, str]:
    """(backend, why not a better one). A GPU is used only on request: its encoder is torch's."""
    if config.load_format != "auto":
        raise InvalidConfig(f"--load-format {config.load_format} is not supported for encoders")
    if config.backend == "cuda":
        if (reason := why_not_gpu(config)) is not None:
            raise InvalidConfig(f"--backend cuda is not available: {reason}")
        return "cuda", ""
    if config.backend == "torch":
        return "torch", ""
    try:
        library.choose_isa()
    except NativeError as error:
        if config.backend == "native":
            raise InvalidConfig(f"--backend native is not available: {error}") from error
        return "torch", f"torch because {error}"
    return "native", ""


def _weights(backend: str, config: EngineConfig, spec: EncoderSpec) -> str:
    """float32 or bfloat16."""
    known = FORMATS if backend == "native" else ("float32",)
    if config.weights not in ("auto", *known):
        raise InvalidConfig(
            f"--weights {config.weights}: the {backend} backend computes encoders in {' or '.join(known)}"
        )
    isa = library.choose_isa() if backend == "native" else ""
    return encoder_weights(config.weights, spec, isa)


def _runner(
    backend: str, weights: str, path: Path, spec: EncoderSpec, step_tokens: int, threads: int
) -> tuple[EncoderRunner, str]:
    values = load_encoder_weights(path, spec)
    if backend == "native":
        table = encoder_table(spec, values, step_tokens, FORMATS[weights])
        head = {name: value for name, value in values.items() if name.startswith("head.")}
        try:
            encoder = NativeEncoder(table, threads)
        except NativeError as error:
            raise BackendUnavailable(str(error)) from error
        return NativeEncoderRunner(encoder, spec, head), f"{encoder.isa}, {threads} threads"
    try:
        import torch
    except ImportError as error:
        raise BackendUnavailable(f"torch is not installed. Install it: {INSTALL_TORCH}") from error
    from ridgeline.models.encoders.reference import TorchEncoder

    if backend == "cuda":
        return TorchEncoderRunner(TorchEncoder(spec, values, "cuda")), torch.cuda.get_device_name()
    torch.set_num_threads(threads)
    return TorchEncoderRunner(TorchEncoder(spec, values)), f"{threads} threads"


def _longest(config: EngineConfig, spec: EncoderSpec) -> int:
    """The model's trained length; --max-context may raise it up to the number of positions."""
    room = spec.max_positions - spec.first_position
    if config.max_context is not None and config.max_context > room:
        raise InvalidConfig(f"--max-context {config.max_context}: {spec.name} has {room} positions")
    return config.max_context or spec.max_tokens


def _check_memory(config: EngineConfig, spec: EncoderSpec, step_tokens: int) -> None:
    """Needs twice the weights for a moment: as read, and as packed."""
    rows = 5 * spec.hidden_size + spec.ffn_size
    needed = 2 * spec.weight_bytes("float32") + 4 * step_tokens * rows
    usable = int(available_memory() * (config.memory_fraction or DEFAULT_FRACTION))
    if needed > usable:
        raise OutOfMemoryPlan(
            f"{spec.name} needs {needed / GIB:.2f} GiB while it loads, but only {usable / GIB:.2f} GiB may "
            "be used: free some memory, or raise --memory-fraction"
        )


def _limits(spec: EncoderSpec, weights: str, threads: int) -> dict[str, float]:
    """FLOPs over the peak rate of the weights' type: the upper bound for this encoder on this machine."""
    peak = Peak.BF16 if weights == "bfloat16" else Peak.F32
    ceilings = native_ceilings(np.empty(0, np.uint8), 0, (peak,), threads)
    per_s = ceilings.flops_per_s / spec.flops_per_token(LIMIT_TOKENS)
    return {
        "read_bytes_per_s": ceilings.read_bytes_per_s,
        "flops_per_s": ceilings.flops_per_s,
        "embed_tokens_per_s": per_s,
        "uncertainty": ceilings.uncertainty,
    }


def _unused(config: EngineConfig) -> tuple[str, ...]:
    defaults = {field.name: field.default for field in fields(EngineConfig)}
    made = [name for name in WITHOUT_EFFECT if getattr(config, name) != defaults[name]]
    flags = ", ".join("--" + name.replace("_", "-") for name in made)
    return (f"ignored, because an encoder has no KV cache: {flags}",) if made else ()
