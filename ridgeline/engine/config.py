"""EngineConfig: every setting of one engine, declared once. Flags, file, schema and docs come from here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ridgeline.engine.errors import InvalidConfig
from ridgeline.models.files.generation_config import parse_overrides
from ridgeline.options import option

KERNEL_BLOCK_SIZE = 16  # tokens of a KV block in the native library and in the GPU's kernels
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
    "background_tokens": 1,
    "threads": 1,
    "step_ring": 1,
}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    model: str = option("smollm2-135m", "short name, directory, .gguf file or org/name of the hub")
    backend: Literal["auto", "native", "torch", "cuda"] = option(
        "auto",
        "what computes the model; auto is cuda where a GPU can be used, else native wherever it serves "
        "the model, else torch",
    )
    weights: Literal["auto", "float32", "bfloat16", "int8", "int8-channel", "int4"] = option(
        "auto", "native: how weights are kept; auto is as the file has them"
    )
    load_format: Literal["auto", "dummy"] = option(
        "auto", "cuda, torch: dummy is random weights of the configuration's shape, to measure without files"
    )
    kv_dtype: Literal["auto", "float32", "bfloat16", "int8"] = option(
        "auto", "how keys and values are kept; auto is bfloat16 (native), or as --dtype (torch, cuda)"
    )
    deterministic: bool = option(
        False, "native, cuda: one arithmetic for all batches: alone = batched = chunked, bit for bit; slower"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto",
        "torch, cuda: weights and activations; auto is float32 on a CPU, on a GPU float16 for float16 "
        "files and bfloat16 for all others",
    )
    overlap: bool = option(True, "cuda: launch a step before the results of the last one are read")
    cuda_graphs: bool = option(True, "cuda: replay decode steps as graphs, captured as their sizes are met")
    max_context: int | None = option(None, "longest sequence, prompt and output; default: the model's own")
    block_size: int = option(KERNEL_BLOCK_SIZE, "tokens per KV block")
    kv_tokens: int | None = option(
        None, "KV cache size in tokens; default: planned from free memory, on a GPU all that fits"
    )
    kv_memory_gib: float | None = option(None, "KV cache size in GiB; default: planned from free memory")
    memory_fraction: float | None = option(
        None,
        "share of free memory the plan may use; default: 0.6 of the machine's, on a GPU 0.9 of the device's",
    )
    memory_share: float = option(
        1.0, "this engine's part of what the plan may use; default: all, or an even part of several models'"
    )
    step_tokens: int | None = option(
        None, "most tokens one step computes; default: calibrated for this machine, else 256; cuda: 8192"
    )
    prefill_chunk: int | None = option(
        None, "most prompt tokens of one sequence per step; default: calibrated, else --step-tokens"
    )
    max_running: int | None = option(None, "most sequences computed together; default: 64, on a GPU 256")
    max_waiting: int = option(512, "most requests queued; one more is answered 429")
    background_tokens: int | None = option(
        None,
        "most tokens of a step with batch work while there is interactive traffic, half as many beside its "
        "decodes; default: 8, on a GPU 32",
    )
    generation_config: str = option(
        "auto",
        "where defaults for sampling come from: auto is the model's generation_config.json or GGUF metadata, "
        "none is nothing, else the path of such a file",
    )
    override_generation_config: str | None = option(
        None, """JSON object over the defaults for sampling, such as {"temperature": 0.5, "top_k": 20}"""
    )
    prefix_cache: bool = option(True, "reuse the KV of shared prompt beginnings")
    threads: int | None = option(None, "compute threads; default: the CPUs this process may use")
    step_ring: int = option(4096, "how many step records are kept for /debug/steps")

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                flag = "--" + name.replace("_", "-")
                raise InvalidConfig(f"{flag} must be at least {least:g}, got {value:g}")
        if self.memory_fraction is not None and not 0.0 < self.memory_fraction <= 1.0:
            raise InvalidConfig(
                f"--memory-fraction must be above 0 and at most 1, got {self.memory_fraction:g}"
            )
        if not 0.0 < self.memory_share <= 1.0:
            raise InvalidConfig(f"--memory-share must be above 0 and at most 1, got {self.memory_share:g}")
        try:
            parse_overrides(self.override_generation_config)
        except ValueError as error:
            raise InvalidConfig(f"--override-generation-config {error}") from None
        self._check_backend()

    @property
    def backend_settings(self) -> dict[str, tuple[str, ...]]:
        """The settings made that not every backend knows, each with the backends that do."""
        block_size = f"--block-size {self.block_size}"
        settings: dict[str, tuple[bool, tuple[str, ...]]] = {
            f"--weights {self.weights}": (self.weights != "auto", ("native",)),
            "--kv-dtype int8": (self.kv_dtype == "int8", ("native",)),
            "--deterministic": (self.deterministic, ("native", "cuda")),
            f"--dtype {self.dtype}": (self.dtype != "auto", ("torch", "cuda")),
            block_size: (self.block_size != KERNEL_BLOCK_SIZE, ("torch",)),
            f"--load-format {self.load_format}": (self.load_format != "auto", ("torch", "cuda")),
            "--no-overlap": (not self.overlap, ("cuda",)),
            "--no-cuda-graphs": (not self.cuda_graphs, ("cuda",)),
        }
        return {flag: knowers for flag, (is_made, knowers) in settings.items() if is_made}

    def unknown_to(self, backend: str) -> str | None:
        """A setting made that this backend does not know, with the ones that do; None if it knows all."""
        for flag, knowers in self.backend_settings.items():
            if backend not in knowers:
                return f"{flag} is for {_named(knowers)}"
        return None

    def _check_backend(self) -> None:
        if self.backend != "auto":
            unknown = self.unknown_to(self.backend)
            if unknown is not None:
                raise InvalidConfig(f"{unknown}; with --backend {self.backend} {_INSTEAD[self.backend]}")
        made = list(self.backend_settings.items())
        for index, (flag, knowers) in enumerate(made):
            for other, other_knowers in made[index + 1 :]:
                if not set(knowers) & set(other_knowers):
                    raise InvalidConfig(
                        f"{flag} is for {_named(knowers)} and {other} for {_named(other_knowers)}; "
                        "leave one out"
                    )


_INSTEAD = {
    "native": f"use --weights and --kv-dtype, and blocks of {KERNEL_BLOCK_SIZE} tokens",
    "torch": "leave it out or use --dtype",
    "cuda": f"leave it out or use --dtype, and blocks of {KERNEL_BLOCK_SIZE} tokens",
}


def _named(backends: tuple[str, ...]) -> str:
    return f"the {' and '.join(backends)} backend" + "s" * (len(backends) > 1)
