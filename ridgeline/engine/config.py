"""EngineConfig: every setting of one engine, declared once. Flags, file, schema and docs come from here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ridgeline.engine.errors import InvalidConfig
from ridgeline.models.files.generation_config import parse_overrides
from ridgeline.models.spec.coverage import WEIGHT_FORMATS, Backend
from ridgeline.models.weights.low_bits.keep_policy import wrong_keep
from ridgeline.options import OptionError, by_name, nearest, option

TEXT_DRAFTERS = ("ngram", "suffix")
DRAFTERS = ("auto", "off", *TEXT_DRAFTERS, "mtp")
KERNEL_BLOCK_SIZE = 16  # tokens of a KV block in the native library and in the GPU's kernels
# Backends with a KV cache of fewer than 16 bits.
KV_BACKENDS = {"fp8": ("cuda",), "int8": ("native", "cuda"), "int4": ("native",)}
# Minimum of each setting; a context of two holds one prompt token and one output token.
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
        "backend that runs the model; auto: cuda with a usable GPU, else native if it supports the model, "
        "else torch",
    )
    weights: Literal["auto", "float32", "bfloat16", "float16", "fp8", "int8", "int8-channel", "int4"] = (
        option(
            "auto",
            "format of the weights in memory; native: no float16 and no fp8, auto is as in the file; torch: "
            "no integers, auto is float32; cuda: no int8-channel, auto is float16 for float16 files, else "
            "bfloat16, with FP8, int8, int4 and MXFP4 matrices of safetensors as stored (an explicit "
            "bfloat16 expands them to 2 to 4 times the memory); fp8, int8 and int4 round a checkpoint's "
            "layers when it is loaded",
            alias="dtype",
        )
    )
    quantization_keep: tuple[str, ...] = option(
        (),
        "cuda: matrices that stay in 16 bits though --weights or the file says otherwise: layers.0, ffn, "
        "attention.o, layers.3.experts, …; may be repeated. Embeddings, head, norms and routers always do",
    )
    load_format: Literal["auto", "dummy"] = option(
        "auto", "cuda, torch: dummy uses random weights of the configured shape, to measure without files"
    )
    kv_dtype: Literal["auto", "float32", "bfloat16", "fp8", "int8", "int4"] = option(
        "auto",
        "type of the KV cache; auto: bfloat16 (native), or that of the layers' inputs (torch, cuda); "
        "fp8 (cuda), int8 (native, cuda) and int4 (native) have scales for each token and head",
    )
    deterministic: bool = option(
        False, "native, cuda: bit-identical results for any batching and chunking; slower"
    )
    overlap: bool = option(True, "cuda: launch a step before the results of the last one are read")
    cuda_graphs: bool = option(
        True, "cuda: replay decode steps as CUDA graphs, captured when a batch size is first used"
    )
    max_context: int | None = option(
        None, "longest sequence in tokens, prompt and output; default: the model's own"
    )
    block_size: int = option(KERNEL_BLOCK_SIZE, "tokens per KV block")
    kv_tokens: int | None = option(
        None,
        "KV cache size in tokens; default: all that fits on a GPU; 65536, or the context if longer, on a CPU",
    )
    kv_memory_gib: float | None = option(None, "KV cache size in GiB; default: see --kv-tokens")
    memory_fraction: float | None = option(
        None,
        "largest fraction of free memory to use; default: 0.6 of the machine's memory, 0.9 of a GPU's",
    )
    memory_share: float = option(
        1.0,
        "this engine's share of that memory; default: all, or an equal share for each of several models",
    )
    step_tokens: int | None = option(
        None, "most tokens computed in one step; default: calibrated for this machine, else 256; cuda: 8192"
    )
    prefill_chunk: int | None = option(
        None, "most prompt tokens of one sequence per step; default: calibrated, else --step-tokens"
    )
    max_running: int | None = option(None, "most sequences computed together; default: 64, on a GPU 256")
    max_waiting: int = option(512, "most requests in the queue; further ones are rejected with status 429")
    background_tokens: int | None = option(
        None,
        "most tokens of a step with batch work while there is interactive traffic, half of it while "
        "interactive requests decode; default: 8, on a GPU 32",
    )
    generation_config: str = option(
        "auto",
        "source of the sampling defaults; auto: the model's generation_config.json or GGUF metadata; none: "
        "no defaults; or the path of such a file",
    )
    override_generation_config: str | None = option(
        None, """JSON object that overrides sampling defaults, such as {"temperature": 0.5, "top_k": 20}"""
    )
    speculate: str = option(
        "auto",
        "guess tokens and verify several in a step, with the same output; ngram: from the request's text; "
        "suffix: also from past answers; a draft model of the same tokenizer (name or path); the folder of "
        "an EAGLE-3 head or of Medusa heads, or mtp: the model's own module (torch, cuda); off; auto: suffix "
        "on the native backend, else off",
    )
    prefix_cache: bool = option(True, "reuse the KV cache of shared prompt prefixes")
    threads: int | None = option(None, "compute threads; default: the number of CPUs this process may use")
    step_ring: int = option(4096, "number of step records kept for /debug/steps")

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
        wrong = next(filter(None, map(wrong_keep, self.quantization_keep)), None)
        if wrong is not None:
            raise InvalidConfig(f"--quantization-keep {wrong}")
        self._check_speculate()
        self._check_backend()

    def _check_speculate(self) -> None:
        """A word that is no drafter is a path or a model's name; it is looked up at the start."""
        if not self.speculate:
            raise InvalidConfig(
                "--speculate is empty: use auto, off, ngram, suffix, mtp, a draft model or a head"
            )
        word = self.speculate
        if word not in DRAFTERS and word.isalpha() and not Path(word).exists():
            raise InvalidConfig(f"--speculate {word}: is neither a path nor known{nearest(word, DRAFTERS)}")

    @property
    def backend_settings(self) -> dict[str, tuple[str, ...]]:
        """The settings that were changed and that only some backends support, with those backends.

        `--no-overlap` and `--no-cuda-graphs` are not among them: a CPU backend has neither feature.
        """
        block_size = f"--block-size {self.block_size}"
        settings: dict[str, tuple[bool, tuple[str, ...]]] = {
            f"--weights {self.weights}": (self.weights != "auto", backends_with(self.weights)),
            f"--kv-dtype {self.kv_dtype}": (self.kv_dtype in KV_BACKENDS, KV_BACKENDS.get(self.kv_dtype, ())),
            "--quantization-keep": (bool(self.quantization_keep), ("cuda",)),
            "--deterministic": (self.deterministic, ("native", "cuda")),
            block_size: (self.block_size != KERNEL_BLOCK_SIZE, ("torch",)),
            f"--load-format {self.load_format}": (self.load_format != "auto", ("torch", "cuda")),
        }
        return {flag: backends for flag, (is_made, backends) in settings.items() if is_made}

    def unknown_to(self, backend: str) -> str | None:
        """A changed setting that this backend does not support, as a message; None if it supports all."""
        for flag, backends in self.backend_settings.items():
            if backend not in backends:
                return f"{flag} is for {_named(backends)}"
        return None

    def _check_backend(self) -> None:
        if self.backend != "auto":
            unknown = self.unknown_to(self.backend)
            if unknown is not None:
                raise InvalidConfig(f"{unknown}; with --backend {self.backend} {_INSTEAD[self.backend]}")
        made = list(self.backend_settings.items())
        for index, (flag, backends) in enumerate(made):
            for other, other_backends in made[index + 1 :]:
                if not set(backends) & set(other_backends):
                    raise InvalidConfig(
                        f"{flag} is for {_named(backends)} and {other} for {_named(other_backends)}; "
                        "leave one of them out"
                    )


def engine_config(model: str, options: dict[str, Any]) -> EngineConfig:
    """The config from the Python API's options; an alias of an option (`dtype`) is accepted."""
    try:
        return EngineConfig(model=model, **by_name(EngineConfig, options))
    except OptionError as error:
        raise InvalidConfig(str(error)) from None


def backends_with(weights: str) -> tuple[str, ...]:
    """The backends that multiply by weights of this format."""
    return tuple(backend for backend, formats in WEIGHT_FORMATS.items() if weights in formats)


def _weights_of(backend: Backend) -> str:
    *others, last = WEIGHT_FORMATS[backend]
    return f"use --weights {', '.join(others)} or {last}"


_INSTEAD = {
    "native": f"{_weights_of('native')}, any --kv-dtype, and blocks of {KERNEL_BLOCK_SIZE} tokens",
    "torch": f"leave it out or {_weights_of('torch')}",
    "cuda": f"leave it out or {_weights_of('cuda')}, and blocks of {KERNEL_BLOCK_SIZE} tokens",
}


def _named(backends: tuple[str, ...]) -> str:
    return f"the {' and '.join(backends)} backend" + "s" * (len(backends) > 1)
