"""EngineConfig: every setting of one engine, declared once. Flags, file, schema and docs come from here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from ridgeline.engine.errors import InvalidConfig

NATIVE_BLOCK_SIZE = 16  # tokens of a KV block in the native library
# Each must be at least this, where it is set at all; a context of two holds one token and its answer.
_LEAST = {
    "max_context": 2,
    "block_size": 1,
    "kv_tokens": 1,
    "kv_memory_gib": 0.0,
    "step_tokens": 1,
    "prefill_chunk": 1,
    "max_running": 1,
    "max_waiting": 1,
    "threads": 1,
    "step_ring": 1,
}


def option(default: Any, doc: str) -> Any:
    """A field with its one-line documentation, read by the flag, schema and docs generators."""
    return field(default=default, metadata={"doc": doc})


@dataclass(frozen=True, slots=True)
class EngineConfig:
    model: str = option("smollm2-135m", "short name, directory, .gguf file or hf:org/name")
    backend: Literal["auto", "native", "torch"] = option(
        "auto", "what computes the model; auto is native wherever it serves the model, else torch"
    )
    weights: Literal["auto", "float32", "bfloat16", "int8", "int8-channel", "int4"] = option(
        "auto", "native: how weights are kept; auto is as the file has them"
    )
    kv_dtype: Literal["auto", "float32", "bfloat16", "int8"] = option(
        "auto", "how keys and values are kept; auto is bfloat16 (native), or as --dtype (torch)"
    )
    deterministic: bool = option(
        False, "native: one arithmetic for all batches: alone = batched = chunked, bit for bit; slower"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "torch: weights and activations; auto is float32 on a CPU"
    )
    max_context: int | None = option(None, "longest sequence, prompt and output; default: the model's own")
    block_size: int = option(16, "tokens per KV block")
    kv_tokens: int | None = option(None, "KV cache size in tokens; default: planned from free memory")
    kv_memory_gib: float | None = option(None, "KV cache size in GiB; default: planned from free memory")
    memory_fraction: float = option(0.6, "share of available memory the plan may use for weights and KV")
    step_tokens: int | None = option(
        None, "most tokens one step computes; default: calibrated for this machine, else 256"
    )
    prefill_chunk: int | None = option(
        None, "most prompt tokens of one sequence per step; default: calibrated, else --step-tokens"
    )
    max_running: int = option(64, "most sequences computed together")
    max_waiting: int = option(512, "most requests queued; one more is answered 429")
    prefix_cache: bool = option(True, "reuse the KV of shared prompt beginnings")
    threads: int | None = option(None, "compute threads; default: the CPUs this process may use")
    step_ring: int = option(4096, "how many step records are kept for /debug/steps")

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                flag = "--" + name.replace("_", "-")
                raise InvalidConfig(f"{flag} must be at least {least:g}, got {value:g}")
        if not 0.0 < self.memory_fraction <= 1.0:
            raise InvalidConfig(
                f"--memory-fraction must be above 0 and at most 1, got {self.memory_fraction:g}"
            )
        self._check_backend()

    @property
    def native_settings(self) -> list[str]:
        """The settings made that only the native backend knows."""
        made = {
            f"--weights {self.weights}": self.weights != "auto",
            "--kv-dtype int8": self.kv_dtype == "int8",
            "--deterministic": self.deterministic,
        }
        return [flag for flag, is_made in made.items() if is_made]

    @property
    def torch_settings(self) -> list[str]:
        """The settings made that only the torch backend knows."""
        made = {
            f"--dtype {self.dtype}": self.dtype != "auto",
            f"--block-size {self.block_size}": self.block_size != NATIVE_BLOCK_SIZE,
        }
        return [flag for flag, is_made in made.items() if is_made]

    def _check_backend(self) -> None:
        native, torch = self.native_settings, self.torch_settings
        if self.backend == "native" and torch:
            raise InvalidConfig(
                f"{torch[0]} is for the torch backend; with --backend native use --weights and --kv-dtype, "
                f"and blocks of {NATIVE_BLOCK_SIZE} tokens"
            )
        if self.backend == "torch" and native:
            raise InvalidConfig(
                f"{native[0]} is for the native backend; with --backend torch leave it out or use --dtype"
            )
        if native and torch:
            raise InvalidConfig(
                f"{native[0]} is for the native backend and {torch[0]} for torch; leave one out"
            )
