"""The engine counts the tokens that choose each expert: all but the warm-up, alike on each backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from ridgeline.engine.config import EngineConfig
from ridgeline.engine.run.core import EngineCore
from ridgeline.engine.schedule.request import Request, SamplingParams
from ridgeline.engine.start.build import build_engine
from ridgeline.models.spec.ffn import Experts
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.read_spec import read_spec
from tests.models.tiny_checkpoints import tiny_model

PROMPTS = ([5, 9, 7, 30, 11], [8] * 20, [40])
OUTPUT_TOKENS = 6
# A wrong guess is computed, and counted, as well.
FLOATS = {"weights": "float32", "kv_dtype": "float32", "kv_tokens": 1024, "threads": 1, "speculate": "off"}


def counts_of(path: Path, backend: str) -> dict[int, list[int]]:
    built = build_engine(EngineConfig(model=str(path), backend=backend, **FLOATS), path)
    core = built.core
    assert all(sum(tokens) == 0 for tokens in core.expert_counts().values()), "the warm-up is not counted"
    serve(core)
    return core.expert_counts()


def serve(core: EngineCore) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    for number, prompt in enumerate(PROMPTS):
        core.add(Request(str(number), list(prompt), greedy))
    while core.has_work:
        core.step()


def computed_tokens(backend: str, *, last_layer: bool) -> int:
    """The last output token of a sequence is never computed. After its last attention the native library goes
    on with the tokens that are sampled from."""
    if backend == "native" and last_layer:
        return len(PROMPTS) * OUTPUT_TOKENS
    return sum(len(prompt) + OUTPUT_TOKENS - 1 for prompt in PROMPTS)


def expert_layers(spec: ModelSpec) -> dict[int, Experts]:
    return {number: layer.ffn for number, layer in enumerate(spec.layers) if isinstance(layer.ffn, Experts)}


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("family", ["mixtral", "qwen2-moe", "phimoe"])
def test_every_token_of_every_layer_is_counted_once_per_chosen_expert(
    family: str, backend: str, tmp_path: Path, weights_are_not_kept: None
) -> None:
    tiny_model(family).save_pretrained(tmp_path)
    spec = read_spec(tmp_path)
    counts, layers = counts_of(tmp_path, backend), expert_layers(spec)
    assert counts.keys() == layers.keys()
    for number, ffn in layers.items():
        tokens = computed_tokens(backend, last_layer=number == spec.num_layers - 1)
        assert len(counts[number]) == ffn.num
        assert sum(counts[number]) == tokens * ffn.per_token


def test_the_backends_count_alike(tmp_path: Path, weights_are_not_kept: None) -> None:
    tiny_model("mixtral").save_pretrained(tmp_path)
    torch, native = (counts_of(tmp_path, backend) for backend in ("torch", "native"))
    last = read_spec(tmp_path).num_layers - 1
    assert all(torch[layer] == native[layer] for layer in torch if layer != last)
    assert all(ours <= theirs for ours, theirs in zip(native[last], torch[last], strict=True))


def test_a_dense_model_has_no_counts(tmp_path: Path, weights_are_not_kept: None) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    assert counts_of(tmp_path, "torch") == {}
