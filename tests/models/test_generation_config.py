"""Where sampling defaults come from: the model's files, a file that is named, the registry, overrides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest

from ridgeline.models.errors import BrokenModel, ModelNotFound
from ridgeline.models.files.generation_config import SamplingDefaults, parse_overrides, sampling_defaults
from ridgeline.models.files.registry import find_known

# As published with Qwen2.5-7B-Instruct.
QWEN = {
    "bos_token_id": 151643,
    "pad_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "repetition_penalty": 1.05,
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
    "transformers_version": "4.37.0",
}


def written(directory: Path, values: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "generation_config.json").write_text(json.dumps(values))
    return directory


def gguf_with(path: Path, **sampling: float) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in sampling.items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        add(f"general.sampling.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_published_generation_config_gives_its_sampling(tmp_path: Path) -> None:
    found = sampling_defaults(written(tmp_path, QWEN))
    assert found.values() == {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
    assert found.source == str(tmp_path / "generation_config.json")
    assert found.text() == "temperature 0.7, top_p 0.8, top_k 20, repetition_penalty 1.05"


def test_max_new_tokens_is_the_length_and_null_is_nothing(tmp_path: Path) -> None:
    found = sampling_defaults(written(tmp_path, {"max_new_tokens": 2048, "temperature": None, "top_k": -1}))
    assert found.values() == {"max_tokens": 2048, "top_k": 0}


def test_a_model_without_the_file_has_no_defaults(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == SamplingDefaults()


def test_a_gguf_file_gives_its_sampling_keys(tmp_path: Path) -> None:
    path = gguf_with(tmp_path / "m.gguf", temp=0.5, top_k=40, top_p=0.75, min_p=0.25, penalty_repeat=1.5)
    assert sampling_defaults(path).values() == {
        "temperature": 0.5,
        "top_k": 40,
        "top_p": 0.75,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
    }
    assert "m.gguf" in sampling_defaults(path).source


def test_the_registry_speaks_only_where_the_files_say_nothing(tmp_path: Path) -> None:
    known = find_known("smollm2")
    assert known is not None
    silent, telling = gguf_with(tmp_path / "silent.gguf"), gguf_with(tmp_path / "telling.gguf", temp=0.5)
    assert sampling_defaults(silent, recommended=known.sampling) == known.sampling
    assert sampling_defaults(telling, recommended=known.sampling).values() == {"temperature": 0.5}
    for off in ("none", "vllm"):  # vLLM's word for none
        assert sampling_defaults(silent, off, recommended=known.sampling) == SamplingDefaults()


def test_another_file_replaces_the_models_and_overrides_come_last(tmp_path: Path) -> None:
    model, other = written(tmp_path / "model", QWEN), written(tmp_path / "other", {"temperature": 0.1})
    assert sampling_defaults(model, str(other)).values() == {"temperature": 0.1}
    assert sampling_defaults(model, str(other / "generation_config.json")).values() == {"temperature": 0.1}
    found = sampling_defaults(model, "auto", '{"top_k": 5, "max_new_tokens": 9}')
    assert (found.temperature, found.top_k, found.max_tokens) == (0.7, 5, 9)
    assert found.source.endswith("generation_config.json and --override-generation-config")
    with pytest.raises(ModelNotFound, match=r"--generation-config .*absent: no such file"):
        sampling_defaults(model, str(tmp_path / "absent"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": "warm"}, 'temperature is "warm"; a number was expected; --generation-config none'),
        ({"top_k": 1.5}, "top_k is 1.5; an integer was expected"),
        ([], "holds list"),
    ],
)
def test_a_file_that_cannot_be_meant_is_named(tmp_path: Path, values: Any, message: str) -> None:
    with pytest.raises(BrokenModel, match=message):
        sampling_defaults(written(tmp_path, values))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("temperature=1", "is not JSON"),
        ("[1]", "must be a JSON object"),
        ('{"temprature": 1}', "did you mean temperature"),
        ('{"ignore_eos": 1}', "known are temperature"),
        ('{"top_k": true}', "top_k is true; an integer"),
    ],
)
def test_overrides_that_cannot_be_meant_say_why(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_overrides(text)
