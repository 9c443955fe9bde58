"""Quantized checkpoints through the real engine: the answers of their float twins, and cache hit = miss.

The torch backend and the native one in float32 multiply by the same numbers as for the twin. By default the
native library multiplies by packed weights with 8-bit inputs; the tolerance is stated for each.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ridgeline.engine.config import EngineConfig
from ridgeline.engine.start.build import BuiltEngine, build_engine
from tests.engine.test_family_promises import (  # noqa: F401
    ANSWERED,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    Promises,
    Scores,
    assert_same,
    machine_is_not_measured,
)
from tests.models.quantized.writers import LAYOUTS, write_quantized
from tests.models.tiny_checkpoints import tiny_model

CASES = [
    ("qwen3", "fp8-block"),
    ("qwen3", "gptq-act-order"),
    ("qwen3-moe", "int4"),
    ("qwen3-moe", "modelopt-nvfp4"),
]
FLOATS = {"weights": "float32", "kv_dtype": "float32"}
# backend, settings, the mean difference of a log-probability from the twin's: not the largest, because a
# rounded input may choose another expert
MODES: dict[str, tuple[str, dict[str, Any], float]] = {
    "torch": ("torch", {"weights": "float32"}, 1e-6),
    "native-float32": ("native", FLOATS, 1e-6),
    "native": ("native", {"deterministic": True}, 0.06),
}


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    model, layout = request.param
    folder = tmp_path_factory.mktemp(layout)
    tiny_model(model).save_pretrained(folder / "float")
    write_quantized(folder / "float", folder / "quantized", folder / "twin", LAYOUTS[layout])
    return folder / "quantized", folder / "twin"


def built(path: Path, backend: str, settings: dict[str, Any]) -> BuiltEngine:
    config = EngineConfig(
        model=str(path), backend=backend, kv_tokens=1024, step_tokens=128, threads=1, **settings
    )
    return build_engine(config, path)


def differences(a: Scores, b: Scores) -> list[float]:
    """Of the prompt's log-probabilities: the same tokens in both."""
    return [abs(x[1] - y[1]) for x, y in zip(a[: PROMPT_TOKENS - 1], b[: PROMPT_TOKENS - 1], strict=True)]


@pytest.mark.parametrize("mode", MODES)
def test_the_answers_are_the_twins_and_a_hit_is_a_miss(
    mode: str, pair: tuple[Path, Path], weights_are_not_kept: None
) -> None:
    backend, settings, tolerance = MODES[mode]
    quantized, twin = pair
    engine = built(quantized, backend, settings)
    stored = ("expanded to float32", "rounded to", "repacked")
    assert any(words in note for note in engine.notes for words in stored) or settings.get("weights")
    ours, _ = Promises(engine).scores(prefix_cache=False)
    theirs, _ = Promises(built(twin, backend, {**settings, **FLOATS})).scores(prefix_cache=False)
    found = differences(ours, theirs)
    assert sum(found) / len(found) <= tolerance
    promises = Promises(engine)
    miss, none = promises.scores(params=ANSWERED)
    hit, cached = promises.scores(params=ANSWERED, rounds=2)
    assert (none, len(hit)) == (0, OUTPUT_TOKENS)
    assert cached >= PROMPT_TOKENS // 16 * 16 - 16
    assert_same(hit, miss, 0.0 if settings.get("deterministic") else 1e-4)


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_a_file_that_quantizes_the_kv_cache_alone_is_served_and_the_start_says_what_is_used(
    backend: str, tmp_path: Path, weights_are_not_kept: None
) -> None:
    tiny_model("qwen3").save_pretrained(tmp_path)
    scales = {f"model.layers.0.self_attn.{part}_proj.{part}_scale": torch.tensor(0.5) for part in "kv"}
    weights = tmp_path / "model.safetensors"
    save_file(load_file(weights) | scales, weights)
    settings = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(settings), encoding="utf-8")
    engine = built(tmp_path, backend, {})
    (note,) = (note for note in engine.notes if "KV cache" in note)
    assert f"is in {engine.kv_dtype} (--kv-dtype), not in FP8 as the file asks" in note
    assert "scales of keys and values (k_scale, v_scale) are not used" in note
