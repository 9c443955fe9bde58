"""Checkpoints that are not served as they are: the error says what they are, and its command is run here."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from ridgeline.models.errors import BrokenModel, UnsupportedModel
from ridgeline.models.files.checkpoint_files import weights_file
from ridgeline.models.files.registry import resolve
from ridgeline.models.spec.families import FAMILIES
from ridgeline.models.spec.read_spec import read_spec
from ridgeline.models.text.tokenizer import Tokenizer
from tests.models.tiny_sentencepiece import VOCAB_SIZE, train

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content))


def code_of(error: pytest.ExceptionInfo[Exception]) -> str:
    """The Python code of the command that the message ends with, as a shell would take it apart."""
    python, flag, code = shlex.split(str(error.value).rpartition(" && ")[2])
    assert (python, flag) == ("python", "-c")
    return code


@pytest.fixture(scope="module")
def sentencepiece_model() -> bytes:
    return train(prefix_space=True, user_defined=[]).serialized_model_proto()


@pytest.fixture
def older_checkpoint(tmp_path: Path, sentencepiece_model: bytes) -> Path:
    """As checkpoints were published in 2023: tokenizer.model, and no tokenizer.json."""
    directory = tmp_path / "it's older"  # a path that a shell must be told about
    directory.mkdir()
    write_json(directory / "config.json", CONFIG)
    write_json(directory / "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer"})
    (directory / "tokenizer.model").write_bytes(sentencepiece_model)
    return directory


def test_the_command_for_an_older_tokenizer_makes_one_that_is_read(
    older_checkpoint: Path, sentencepiece_model: bytes
) -> None:
    transformers = pytest.importorskip("transformers")
    with pytest.raises(
        BrokenModel, match=r"has no tokenizer\.json, and tokenizer\.model is not supported"
    ) as error:
        Tokenizer.load(older_checkpoint)
    assert "pip install transformers sentencepiece protobuf" in str(error.value)
    before = transformers.AutoTokenizer.from_pretrained(str(older_checkpoint)).encode("abc aaaa")
    exec(code_of(error))
    assert Tokenizer.load(older_checkpoint).encode("abc aaaa") == before


def test_the_command_for_pickled_weights_makes_a_model_that_is_read(older_checkpoint: Path) -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(str(older_checkpoint))
    )
    torch.save(model.state_dict(), older_checkpoint / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match=r"pytorch_model\.bin: is a pickle") as error:
        resolve(str(older_checkpoint))
    exec(code_of(error))
    converted = resolve(f"{older_checkpoint}-safetensors").path
    assert read_spec(converted).num_layers == 1
    assert weights_file(converted).name == "model.safetensors"
    assert Tokenizer.load(converted).vocab_size == VOCAB_SIZE


@pytest.mark.parametrize("weights", ["adapter_model.safetensors", "adapter_model.bin"])
@pytest.mark.parametrize("beside", [None, "config.json", "training_args.bin"])
def test_an_adapter_is_called_one_and_its_base_is_named(
    tmp_path: Path, weights: str, beside: str | None
) -> None:
    write_json(tmp_path / "adapter_config.json", {"peft_type": "LORA", "base_model_name_or_path": "org/base"})
    (tmp_path / weights).write_bytes(b"")
    if beside is not None:
        write_json(tmp_path / beside, CONFIG)
    with pytest.raises(
        UnsupportedModel, match=r"PEFT adapter \(LORA\) for org/base.*pip install peft"
    ) as error:
        resolve(str(tmp_path))
    code = code_of(error)
    compile(code, "command", "exec")
    assert f"from_pretrained('{tmp_path}'" in code
    assert "T.from_pretrained('org/base')" in code


def test_a_merged_model_may_keep_its_adapter_config(tmp_path: Path) -> None:
    write_json(tmp_path / "adapter_config.json", {"peft_type": "LORA"})
    write_json(tmp_path / "config.json", CONFIG)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert resolve(str(tmp_path)).path == tmp_path


def test_a_hub_model_is_converted_by_its_id_into_a_directory_of_the_users(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--old" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    write_json(snapshot / "config.json", CONFIG)
    for read in (weights_file, Tokenizer.load):
        with pytest.raises(BrokenModel) as error:
            read(snapshot)
        code = code_of(error)
        compile(code, "command", "exec")
        assert "M.from_pretrained('org/old'" in code
        assert "save_pretrained('./old')" in code


def test_families_that_are_not_served_are_not_offered(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"model_type": "mamba2"})
    with pytest.raises(UnsupportedModel, match=r"nearest supported family is (\w+)") as refused:
        read_spec(tmp_path)
    assert str(refused.value).partition("family is ")[2].partition(".")[0] in FAMILIES
