"""Flags of vLLM and llama.cpp that the command line accepts, refuses with a reason, or ignores with a note.

One row per flag. `aliases` adds the rows to the parsers; their tables in docs/commands.md are generated.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

VLLM, LLAMA_CPP, BENCH = "vLLM", "llama.cpp", "vllm bench serve"


@dataclass(frozen=True, slots=True)
class Alias:
    """A flag with the meaning of one of ours.

    option: `section.name`, as `add_flags` names it
    const:  the value of a flag that takes none
    values: the other tool's words for our values
    read:   parses the text where the notation differs
    remark: a difference that a user should know
    """

    flags: tuple[str, ...]
    tool: str
    option: str
    const: bool | str | None = None
    values: Mapping[str, str] = field(default_factory=dict)
    read: Callable[[str], Any] | None = None
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Ignored:
    """A flag that changes nothing here. The parser prints `why` as a note.

    section: parsers with options of this section accept it
    takes:   how many values follow
    allowed: the only values that may be ignored; another is refused with `otherwise`
    """

    flags: tuple[str, ...]
    tool: str
    section: str
    takes: Literal["none", "one", "optional"]
    why: str
    allowed: tuple[str, ...] = ()
    otherwise: str = ""


@dataclass(frozen=True, slots=True)
class Refused:
    """A known flag without an equal here; `instead` says what to do."""

    flags: tuple[str, ...]
    tool: str
    section: str
    instead: str


def count(text: str) -> int:
    """An integer, also as vLLM writes it: 32k is 32,000 and 32K is 32,768 (likewise m, M, g, G)."""
    scales = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    if text[-1:] in scales:
        return int(float(text[:-1]) * scales[text[-1]])
    return int(text)


def gib(text: str) -> float:
    return count(text) / (1 << 30)


def context(text: str) -> int | None:
    """0 is the model's own context."""
    return int(text) or None


def rate(text: str) -> float | None:
    """`inf` means no schedule, so no rate."""
    return None if text == "inf" else float(text)


def json_list(text: str) -> list[str]:
    try:
        parsed = json.loads(text)
    except ValueError:
        parsed = None
    if not isinstance(parsed, list) or not all(isinstance(item, str) for item in parsed):
        raise ValueError(text)
    return parsed


ALIASES: tuple[Alias, ...] = (
    # ---- vLLM ----
    Alias(("--max-model-len",), VLLM, "engine.max_context", read=count),
    Alias(
        ("--gpu-memory-utilization",),
        VLLM,
        "engine.memory_fraction",
        remark="of the memory that is free at the start, not of all",
    ),
    Alias(("--max-num-seqs",), VLLM, "engine.max_running", read=count),
    Alias(("--max-num-batched-tokens",), VLLM, "engine.step_tokens", read=count),
    Alias(("--long-prefill-token-threshold",), VLLM, "engine.prefill_chunk", read=count),
    Alias(
        ("--dtype",),
        VLLM,
        "engine.weights",
        values={"half": "float16", "float": "float32"},
        remark="`--dtype half` is float16, `--dtype float` is float32; `dtype` in the file and "
        "RIDGELINE_DTYPE take the values of `--weights` alone",
    ),
    Alias(("--kv-cache-dtype",), VLLM, "engine.kv_dtype", values={"fp8_e4m3": "fp8"}),
    Alias(("--kv-cache-memory-bytes",), VLLM, "engine.kv_memory_gib", read=gib),
    Alias(("--enable-prefix-caching",), VLLM, "engine.prefix_cache", const=True),
    Alias(("--no-enable-prefix-caching",), VLLM, "engine.prefix_cache", const=False),
    Alias(
        ("--enforce-eager",),
        VLLM,
        "engine.cuda_graphs",
        const=False,
        remark="no effect on a CPU, which has no graphs",
    ),
    Alias(("--async-scheduling",), VLLM, "engine.overlap", const=True),
    Alias(("--no-async-scheduling",), VLLM, "engine.overlap", const=False),
    Alias(
        ("--tool-call-parser",),
        VLLM,
        "server.tool_parser",
        values={
            "llama3_json": "llama3",
            "deepseek_v3": "deepseek",
            "qwen3_coder": "qwen_xml",
            "qwen3_xml": "qwen_xml",
            "openai": "harmony",
        },
    ),
    Alias(
        ("--api-key",), f"{VLLM}, {LLAMA_CPP}", "server.api_keys", remark="may be repeated, one key for each"
    ),
    Alias(("--allowed-origins",), VLLM, "server.cors_origins", read=json_list),
    Alias(("--uvicorn-log-level",), VLLM, "server.log_level"),
    # ---- llama.cpp ----
    Alias(
        ("-c", "--ctx-size"),
        LLAMA_CPP,
        "engine.max_context",
        read=context,
        remark="of each sequence; it is not divided among slots",
    ),
    Alias(("-np", "--parallel"), LLAMA_CPP, "engine.max_running"),
    Alias(("-b", "--batch-size"), LLAMA_CPP, "engine.step_tokens"),
    Alias(("-t",), LLAMA_CPP, "engine.threads"),
    Alias(
        ("-ctk", "-ctv", "--cache-type-k", "--cache-type-v"),
        LLAMA_CPP,
        "engine.kv_dtype",
        values={"f32": "float32", "bf16": "bfloat16", "q8_0": "int8", "q4_0": "int4"},
        remark="keys and values have one type",
    ),
    Alias(("--cache-prompt",), LLAMA_CPP, "engine.prefix_cache", const=True),
    Alias(("--no-cache-prompt",), LLAMA_CPP, "engine.prefix_cache", const=False),
    Alias(("-a",), LLAMA_CPP, "server.served_model_name"),
    Alias(("--ssl-cert-file",), LLAMA_CPP, "server.ssl_certfile"),
    Alias(("--ssl-key-file",), LLAMA_CPP, "server.ssl_keyfile"),
    Alias(("-v", "--verbose"), LLAMA_CPP, "server.log_level", const="debug"),
    Alias(("-n", "--predict", "--n-predict"), LLAMA_CPP, "sampling.max_tokens"),
    Alias(("--temp",), LLAMA_CPP, "sampling.temperature"),
    Alias(("--repeat-penalty",), LLAMA_CPP, "sampling.repetition_penalty"),
    # ---- vllm bench serve ----
    Alias(("--num-prompts",), BENCH, "traffic.requests", read=count),
    Alias(
        ("--request-rate",),
        BENCH,
        "traffic.rate",
        read=rate,
        remark="`inf` is a closed loop: `--max-concurrency` requests at all times",
    ),
    Alias(("--random-input-len", "--input-len"), BENCH, "traffic.input"),
    Alias(("--random-output-len", "--output-len"), BENCH, "traffic.output"),
    Alias(("--random-prefix-len",), BENCH, "traffic.shared_prefix"),
    Alias(("--num-warmups",), BENCH, "bench.warmup", read=count),
    Alias(("--result-dir",), BENCH, "out"),
)

IGNORED: tuple[Ignored, ...] = (
    # ---- vLLM ----
    Ignored(
        ("--trust-remote-code",), VLLM, "engine", "none", "code from a model's repository is never executed"
    ),
    Ignored(
        ("--quantization",),
        VLLM,
        "engine",
        "one",
        "weights stay as the files store them; --weights fp8, int8 or int4 quantizes",
    ),
    Ignored(("--enable-chunked-prefill",), VLLM, "engine", "none", "prefill is always chunked"),
    Ignored(("--swap-space",), VLLM, "engine", "one", "preempted sequences are computed again"),
    Ignored(("--enable-auto-tool-choice",), VLLM, "server", "none", "tool_choice auto is always enabled"),
    Ignored(
        (
            "--disable-log-requests",
            "--no-enable-log-requests",
            "--disable-log-stats",
            "--disable-uvicorn-access-log",
        ),
        VLLM,
        "server",
        "none",
        "prompts are never logged; --log-level warning silences the line of each request",
    ),
    Ignored(
        ("-tp", "--tensor-parallel-size", "-pp", "--pipeline-parallel-size", "-dp", "--data-parallel-size"),
        VLLM,
        "engine",
        "one",
        "a model runs on one device",
        allowed=("1",),
        otherwise="only 1 is accepted; for several devices, run a server on each behind `ridgeline gateway`",
    ),
    Ignored(("--task", "--runner"), VLLM, "server", "one", "a model's task is read from its files"),
    Ignored(
        ("--enable-prompt-tokens-details",), VLLM, "server", "none", "usage always has prompt_tokens_details"
    ),
    Ignored(("--seed",), VLLM, "server", "one", "each request names its own seed"),
    # ---- llama.cpp ----
    Ignored(
        ("-ngl", "--gpu-layers", "--n-gpu-layers"),
        LLAMA_CPP,
        "engine",
        "one",
        "all layers run on the GPU where one can be used; --backend native keeps them on the CPU",
    ),
    Ignored(
        ("-fa", "--flash-attn"),
        LLAMA_CPP,
        "engine",
        "optional",
        "the backend chooses its attention kernel",
        allowed=("on", "off", "auto"),
        otherwise="give on, off or auto",
    ),
    Ignored(("-ub", "--ubatch-size"), LLAMA_CPP, "engine", "one", "a step has one size: --step-tokens"),
    Ignored(("-tb", "--threads-batch"), LLAMA_CPP, "engine", "one", "prefill and decode share --threads"),
    Ignored(
        ("-cb", "--cont-batching"), LLAMA_CPP, "engine", "none", "requests are always batched continuously"
    ),
    Ignored(
        ("--mlock", "--mmap", "--no-mmap"), LLAMA_CPP, "engine", "none", "the engine plans its own memory"
    ),
    Ignored(("--jinja",), LLAMA_CPP, "server", "none", "chat templates are always rendered as Jinja"),
    Ignored(
        ("--embedding", "--embeddings"),
        LLAMA_CPP,
        "server",
        "none",
        "an embedding model is recognized by its files",
    ),
    Ignored(("--metrics",), LLAMA_CPP, "server", "none", "/metrics is always served"),
    Ignored(("--no-webui",), LLAMA_CPP, "server", "none", "the page at / only lists models and links"),
    # ---- vllm bench serve ----
    Ignored(("--save-result",), BENCH, "bench", "none", "every run is saved; --out names its folder"),
    Ignored(("--disable-tqdm",), BENCH, "bench", "none", "progress is drawn on a terminal only"),
    Ignored(
        ("--percentile-metrics", "--metric-percentiles"),
        BENCH,
        "bench",
        "one",
        "the report has every metric at p50, p90, p95 and p99",
    ),
)

REFUSED: tuple[Refused, ...] = (
    Refused(("-hf", "-hfr", "--hf-repo"), LLAMA_CPP, "engine", "give the hub id as MODEL: org/name"),
    Refused(("--revision",), VLLM, "engine", "write the revision into MODEL: org/name@REVISION"),
    Refused(
        ("--download-dir",),
        VLLM,
        "engine",
        "set HF_HOME for models from the hub, RIDGELINE_CACHE for short names",
    ),
    Refused(("--hf-token",), VLLM, "engine", "set HF_TOKEN in the environment"),
    Refused(("--enable-log-requests",), VLLM, "server", "prompts are never logged"),
    Refused(
        ("--tokenizer",), VLLM, "server", "the tokenizer is read from the model's files; place it beside them"
    ),
    Refused(
        ("--chat-template", "--chat-template-file"),
        f"{VLLM}, {LLAMA_CPP}",
        "server",
        "the template is read from the model's files; save it as chat_template.jinja in the model's folder",
    ),
    Refused(
        ("--no-enable-chunked-prefill",), VLLM, "engine", "prefill is always chunked; raise --prefill-chunk"
    ),
    Refused(
        ("--speculative-config", "-md", "--model-draft"),
        f"{VLLM}, {LLAMA_CPP}",
        "engine",
        "use --speculate suffix, --speculate MODEL for a draft model, or --speculate DIR for a draft head",
    ),
    Refused(
        ("--enable-lora", "--lora-modules", "--lora"),
        f"{VLLM}, {LLAMA_CPP}",
        "engine",
        "merge the adapter into the model first",
    ),
    Refused(
        ("--cpu-offload-gb",), VLLM, "engine", "weights are not offloaded; use a smaller or quantized model"
    ),
    Refused(
        ("--base-url",), BENCH, "bench", "give the address as URL: ridgeline bench http://127.0.0.1:8000"
    ),
    Refused(
        ("--dataset-name", "--dataset-path"),
        BENCH,
        "bench",
        "give prompts of your own with --traffic prompts:FILE, random ones with --input and --output",
    ),
    Refused(("--goodput",), BENCH, "bench", "write the limits as --slo ttft=400,tpot=50 (ms)"),
)
