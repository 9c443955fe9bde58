"""How a GGUF file states the routing of experts, and the values that are refused by the name of their key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest

from ridgeline.models.errors import UnsupportedModel
from ridgeline.models.spec.ffn import Experts, Router
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.read_spec import read_spec
from tests.models.tiny_checkpoints import packed_as, tiny_model, write_gguf


def read(tmp_path: Path, name: str, changes: dict[str, Any]) -> ModelSpec:
    path = tmp_path / "tiny.gguf"
    write_gguf(tiny_model(name), path, packed_as(gguf.GGMLQuantizationType.F16), changes=changes)
    return read_spec(path)


def router_of(spec: ModelSpec) -> Router:
    ffn = spec.layers[-1].ffn
    assert isinstance(ffn, Experts)
    return ffn.router


@pytest.mark.parametrize(
    ("name", "changes", "router"),
    [
        ("olmoe", {}, Router(normalized=False)),
        ("olmoe", {"expert_gating_func": 1}, Router(normalized=False)),
        ("olmoe", {"expert_gating_func": 1, "expert_weights_norm": True}, Router(normalized=True)),
        ("olmoe", {"expert_gating_func": 3}, Router(normalized=True)),
        ("olmoe", {"expert_gating_func": 3, "expert_weights_norm": True}, Router(normalized=True)),
        ("qwen3-moe", {}, Router(normalized=True)),
        ("qwen3-moe", {"expert_weights_norm": False}, Router(normalized=False)),
        ("qwen3-moe", {"expert_weights_scale": 2.5}, Router(scale=2.5)),
    ],
)
def test_the_router_is_as_the_file_states_it(
    name: str, changes: dict[str, Any], router: Router, tmp_path: Path
) -> None:
    assert router_of(read(tmp_path, name, changes)) == router


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("olmoe", {"expert_gating_func": 2}, "olmoe.expert_gating_func = 2 in the family olmoe"),
        ("olmoe", {"expert_gating_func": 9}, "olmoe.expert_gating_func = 9 in the family olmoe"),
        (
            "olmoe",
            {"expert_gating_func": 3, "expert_weights_norm": False},
            "olmoe.expert_weights_norm = false with olmoe.expert_gating_func = 3",
        ),
        ("phimoe-published", {"expert_used_count": 3}, "phimoe.expert_used_count = 3"),
        ("phimoe-published", {"expert_weights_norm": True}, "phimoe.expert_weights_norm = true"),
        ("phimoe-published", {"expert_weights_scale": 2.5}, "phimoe.expert_weights_scale = 2.5"),
        ("phimoe-published", {"expert_gating_func": 1}, "phimoe.expert_gating_func = 1"),
        ("llama4-published", {"attention.sliding_window": 4096}, "llama4.attention.sliding_window = 4096"),
        ("llama4-published", {"attention.sliding_window": 0}, "llama4.attention.sliding_window = 0"),
    ],
)
def test_routing_and_chunks_that_are_not_computed_are_refused_by_name(
    name: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel) as refusal:
        read(tmp_path, name, changes)
    assert words in str(refusal.value)
    assert "tiny.gguf" in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("phimoe-published", {"expert_used_count": 2, "expert_weights_norm": False}),
        ("llama4-published", {"attention.sliding_window": 8192}),
    ],
)
def test_a_stated_value_that_is_computed_changes_nothing(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    assert read(tmp_path, name, changes).layers == read(tmp_path, name, {}).layers
