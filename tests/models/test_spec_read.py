"""From a path to a ModelSpec: directories, files, and errors for what is neither."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ridgeline.models.errors import BrokenModel, ModelNotFound, UnsupportedModel
from ridgeline.models.spec.read_spec import read_spec

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "eos_token_id": 2,
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "tiny-llama"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


def test_a_directory_is_read_with_what_lies_beside_its_config(checkpoint: Path) -> None:
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    (checkpoint / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    (checkpoint / "model-1.safetensors").write_bytes(bytes(70))
    (checkpoint / "model-2.safetensors").write_bytes(bytes(30))
    spec = read_spec(checkpoint)
    assert (spec.name, spec.eos_ids, spec.weight_format, spec.stored_bytes) == (
        "tiny-llama",
        (5, 6),
        "fp8",
        100,
    )


@pytest.mark.parametrize("end", ["<end>", {"content": "<end>", "lstrip": False}])
def test_the_tokenizer_s_end_token_ends_a_generation_too(checkpoint: Path, end: Any) -> None:
    """Fine-tunes name the end of a turn there, and leave config.json as the base model had it."""
    added = {"added_tokens": [{"id": 7, "content": "<pad>"}, {"id": 9, "content": "<end>"}]}
    (checkpoint / "tokenizer.json").write_text(json.dumps(added))
    assert read_spec(checkpoint).eos_ids == (2,)
    (checkpoint / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    assert read_spec(checkpoint).eos_ids == (2, 9)
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 5]}))
    assert read_spec(checkpoint).eos_ids == (9, 5)


@pytest.mark.parametrize("vocabulary", [{}, {"added_tokens": 7}, {"added_tokens": [7, {"content": "<end>"}]}])
def test_an_end_token_without_an_id_is_none(checkpoint: Path, vocabulary: Any) -> None:
    (checkpoint / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    (checkpoint / "tokenizer.json").write_text(json.dumps(vocabulary))
    assert read_spec(checkpoint).eos_ids == (2,)


def test_a_config_file_alone_is_enough(checkpoint: Path) -> None:
    spec = read_spec(checkpoint / "config.json")
    assert (spec.name, spec.stored_bytes) == ("tiny-llama", None)
    renamed = (checkpoint / "config.json").rename(checkpoint / "org--other_config.json")
    assert read_spec(renamed).name == "org--other"


def test_a_snapshot_of_a_hub_cache_bears_the_repository_s_name(checkpoint: Path) -> None:
    snapshot = checkpoint.parent / "models--org--tiny" / "snapshots" / "0123abcd"
    snapshot.parent.mkdir(parents=True)
    checkpoint.rename(snapshot)
    assert read_spec(snapshot).name == "org/tiny"


def test_a_gguf_file_is_read(smollm2_path: Path) -> None:
    assert read_spec(smollm2_path).parameters == 134_515_008


def test_a_path_that_is_not_there_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="nothing: no such file or directory"):
        read_spec(tmp_path / "nothing")


def test_a_directory_without_a_config_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"has no config\.json"):
        read_spec(tmp_path)


def test_a_directory_of_gguf_files_says_which_to_give(tmp_path: Path) -> None:
    (tmp_path / "model.Q4_K.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelNotFound, match=r"give one of them instead: model\.Q4_K\.gguf"):
        read_spec(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.ckpt"])
def test_a_directory_that_holds_only_pickles_is_refused_unopened(checkpoint: Path, name: str) -> None:
    (checkpoint / name).write_bytes(b"\x80\x04not opened")
    with pytest.raises(UnsupportedModel, match=f"{name}: is a pickle.*convert to safetensors"):
        read_spec(checkpoint)
    with pytest.raises(UnsupportedModel, match="convert to safetensors"):
        read_spec(checkpoint / name)


def test_pickles_beside_safetensors_do_no_harm(checkpoint: Path) -> None:
    (checkpoint / "pytorch_model.bin").write_bytes(b"\x80")
    (checkpoint / "model.safetensors").write_bytes(bytes(8))
    assert read_spec(checkpoint).num_layers == 2


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "hf_quant_config.json"])
@pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe\x00", b"[" * 100_000, b"[1]", b"null"])
def test_broken_json_is_refused_by_its_file_s_name(checkpoint: Path, name: str, content: bytes) -> None:
    (checkpoint / name).write_bytes(content)
    with pytest.raises(BrokenModel, match=name):
        read_spec(checkpoint)


def test_a_quantization_file_is_not_taken_for_a_config(checkpoint: Path) -> None:
    path = checkpoint / "hf_quant_config.json"
    path.write_text("{}")
    with pytest.raises(UnsupportedModel, match=r"give the config\.json next to it"):
        read_spec(path)


def test_a_single_weight_file_is_refused_with_what_to_give(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    path.write_bytes(bytes(8))
    with pytest.raises(UnsupportedModel, match=r"the directory with config\.json"):
        read_spec(path)


def test_an_altered_gguf_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUX" + bytes(100))
    with pytest.raises(BrokenModel, match=r"model\.gguf"):
        read_spec(path)
