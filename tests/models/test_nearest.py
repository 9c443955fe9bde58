"""A refused config.json is compared with every family; an edit that would serve it is offered if safe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ridgeline.models.errors import UnsupportedModel
from ridgeline.models.nearest import nearest_to_config
from ridgeline.models.spec.read_spec import read_spec
from tests.models.test_spec_hf import LLAMA, without

FOO = {**LLAMA, "model_type": "foo", "architectures": ["FooForCausalLM"]}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}


def refused(directory: Path, config: dict[str, Any]) -> str:
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel) as refusal:
        read_spec(directory)
    return str(refusal.value)


def test_a_config_with_the_keys_of_llama_alone_is_offered_the_edit_and_the_edit_works(tmp_path: Path) -> None:
    said = refused(tmp_path, FOO)
    assert "the family 'foo' is not supported. Its config.json has only keys of the family llama" in said
    assert '"model_type": "llama" and "architectures": ["LlamaForCausalLM"]' in said
    edited = {**FOO, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(edited))
    assert read_spec(tmp_path).family == "llama"


def test_a_model_with_its_own_code_is_not_offered_the_edit(tmp_path: Path) -> None:
    said = refused(tmp_path, {**FOO, "auto_map": {"AutoModelForCausalLM": "modeling_foo.FooForCausalLM"}})
    assert "brings its own code (auto_map)" in said
    assert '"model_type"' not in said


def test_a_key_that_no_family_reads_is_named_and_no_edit_is_offered(tmp_path: Path) -> None:
    said = refused(tmp_path, {**FOO, "foo_gain": 1.5})
    assert "The nearest supported family is llama, which does not read foo_gain." in said
    assert '"model_type"' not in said


def test_a_feature_without_a_family_is_named_with_the_nearest(tmp_path: Path) -> None:
    said = refused(tmp_path, {**FOO, "kv_lora_rank": 512, **EXPERTS})
    assert "it needs multi-head latent attention (MLA) (kv_lora_rank = 512)" in said
    assert "The nearest supported family is qwen" in said


def test_a_known_family_with_a_feature_that_it_does_not_have_is_named(tmp_path: Path) -> None:
    said = refused(tmp_path, {**LLAMA, "alibi": True})
    assert (
        "llama with ALiBi positions (alibi = true) is not supported. Other models of the family llama" in said
    )
    said = refused(tmp_path, {**LLAMA, "no_rope_layer_interval": 4})
    assert "Other models of the family llama are supported; smollm3 reads all of its keys" in said


@pytest.mark.parametrize(
    ("config", "family"),
    [
        (FOO, "llama"),
        ({**FOO, **EXPERTS}, "qwen3_moe"),
        ({**without(FOO, "hidden_act"), "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 64,
          "query_pre_attn_scalar": 8, "attn_logit_softcapping": 50.0}, "gemma2"),
        ({"model_type": "qwen3_vl", "text_config": {**FOO, "model_type": "qwen3_vl_text"}}, "qwen3"),
        ({**FOO, "num_local_experts": 8, "num_experts_per_tok": 2}, "mixtral"),
    ],
)  # fmt: skip
def test_the_nearest_family_is_found_by_structure(config: dict[str, Any], family: str) -> None:
    assert nearest_to_config(config).family.name == family
