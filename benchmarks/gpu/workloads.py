"""The work that GPU engines are compared on: public model shapes, seeded requests, and the peers' figures.

A workload is a list of (prompt token ids, output length). The same seeds gave the peers' figures, so the
order of the random draws must not change.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": _QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": _QWEN3
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
}
CASES = ("decode-bs1", "decode-bs64", "prefill", "shared-prefix", "long", "offline-mix")

# The better of vLLM 0.26.0 and SGLang 0.5.17 on one H200, bf16, best of two runs; `long` is in seconds.
PEERS: dict[str, dict[str, float]] = {
    "qwen3-0.6b": {"decode-bs1": 570, "decode-bs64": 13_785, "prefill": 336_967, "offline-mix": 21_798},
    "qwen3-8b": {
        "decode-bs1": 193,
        "decode-bs64": 4_566,
        "prefill": 40_489,
        "shared-prefix": 273_532,
        "long": 11.7,
        "offline-mix": 9_672,
    },
    # vLLM 0.26.0
    "qwen3-30b-a3b": {"decode-bs1": 232, "decode-bs64": 2_803, "prefill": 62_644, "offline-mix": 6_168},
}
# What each case counts: tokens that come out, tokens that go in, or the seconds it takes.
UNITS = {
    "decode-bs1": "out tok/s",
    "decode-bs64": "out tok/s",
    "prefill": "in tok/s",
    "shared-prefix": "in tok/s",
    "long": "s",
    "offline-mix": "out tok/s",
}

Work = list[tuple[list[int], int]]


def workload(name: str) -> Work:
    rng = random.Random(0)

    def ids(count: int) -> list[int]:
        return [rng.randrange(100, 150_000) for _ in range(count)]

    if name == "offline-mix":
        return [(ids(rng.randint(100, 1024)), rng.randint(100, 1024)) for _ in range(256)]
    if name == "decode-bs1":
        return [(ids(512), 256)]
    if name == "decode-bs64":
        return [(ids(1024), 256) for _ in range(64)]
    if name == "prefill":
        return [(ids(4096), 1) for _ in range(32)]
    if name == "shared-prefix":
        shared = ids(4096)
        return [(shared + ids(128), 64) for _ in range(128)]
    if name == "long":
        return [(ids(32_768), 128) for _ in range(8)]
    raise ValueError(f"unknown case {name!r}; known: {', '.join(CASES)}")


def write_config(shape: str, folder: Path) -> Path:
    """A model directory with a config.json and no weights, for --load-format dummy."""
    path = folder / shape
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(SHAPES[shape], indent=1))
    return path
