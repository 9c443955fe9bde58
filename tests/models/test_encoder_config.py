"""EncoderSpec: read strictly from config.json and sentence-transformers' files, or refused with why."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from ridgeline.cli.main import main
from ridgeline.models.encoders.weights import load_encoder_weights
from ridgeline.models.errors import BrokenModel, UnsupportedModel
from ridgeline.models.files.pull import ensure
from ridgeline.models.spec.read_spec import read_spec
from ridgeline.models.spec.readers.encoder_config import is_encoder, read_encoder_spec

CONFIG = {
    "model_type": "bert", "architectures": ["BertModel"], "hidden_size": 48, "num_attention_heads": 4,
    "num_hidden_layers": 2, "intermediate_size": 96, "hidden_act": "gelu", "layer_norm_eps": 1e-12,
    "max_position_embeddings": 64, "type_vocab_size": 2, "vocab_size": 100, "pad_token_id": 0,
}  # fmt: skip


def written(folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return folder


def modules(folder: Path, *kinds: str, pooling: dict[str, Any] | None = None) -> Path:
    entries = [
        {"path": f"{i}_{kind}", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(entries))
    for entry in entries:
        (folder / entry["path"]).mkdir()
        (folder / entry["path"] / "config.json").write_text(json.dumps(pooling or {}))
    return folder


def test_minilm_is_described_by_its_own_files() -> None:
    path = ensure("all-minilm-l6-v2").path
    spec = read_encoder_spec(path)
    weights = load_encoder_weights(path, spec)
    assert spec.parameters == sum(math.prod(tensor.shape) for tensor in weights.values())
    assert (spec.max_tokens, spec.max_positions, spec.pooling, spec.normalize) == (256, 512, "mean", True)
    matrices = 6 * (4 * 384 * 384 + 2 * 384 * 1536)
    assert spec.flops(10) == 2 * matrices * 10 + 6 * 4 * 384 * 100


def test_inspect_and_list_know_encoders(capsys: pytest.CaptureFixture[str]) -> None:
    ensure("all-minilm-l6-v2")
    assert main(["models", "inspect", "all-minilm-l6-v2"]) == 0
    assert "/v1/embeddings" in capsys.readouterr().out
    assert main(["models", "inspect", "all-minilm-l6-v2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == 22_565_376


def test_positions_of_roberta_begin_behind_its_padding(tmp_path: Path) -> None:
    changes = {"model_type": "roberta", "architectures": ["RobertaModel"], "pad_token_id": 1}
    spec = read_encoder_spec(written(tmp_path, **changes))
    assert (spec.first_position, spec.max_tokens) == (2, 62)


def test_without_modules_the_mean_is_taken_and_that_is_noted(tmp_path: Path) -> None:
    spec = read_encoder_spec(written(tmp_path))
    assert (spec.pooling, spec.normalize, spec.max_tokens) == ("mean", True, 64)
    assert "modules.json" in spec.notes[0]


def test_a_stated_length_holds_as_far_as_there_are_positions(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 1000000000000000019884624838656}')
    assert read_encoder_spec(written(tmp_path)).max_tokens == 64
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 32}')
    assert read_encoder_spec(tmp_path).max_tokens == 32


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "deberta-v2"}, "relative positions"),
        ({"model_type": "modernbert"}, "rotary"),
        ({"architectures": ["BertLMHeadModel"]}, "not a text encoder"),
        ({"architectures": ["BertForSequenceClassification"]}, "2 labels"),
        ({"position_embedding_type": "relative_key"}, "relative_key"),
        ({"is_decoder": True}, "is_decoder"),
        ({"hidden_act": "silu"}, "activation 'silu'"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "awq-4bit"),
    ],
)
def test_what_is_not_served_is_refused_with_the_reason(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    assert is_encoder(written(tmp_path, **changes))
    with pytest.raises(UnsupportedModel, match=words):
        read_encoder_spec(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 50}, "do not divide"),
        ({"hidden_size": "48"}, "hidden_size is"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"type_vocab_size": None}, "type_vocab_size"),
    ],
)
def test_a_config_that_contradicts_itself_is_named(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(BrokenModel, match=words):
        read_encoder_spec(written(tmp_path, **changes))


@pytest.mark.parametrize(
    ("kinds", "pooling", "words"),
    [
        (("Transformer", "Pooling", "Dense"), {"pooling_mode": "mean"}, "module Dense"),
        (("Transformer", "Pooling"), {"pooling_mode": "weightedmean"}, "weightedmean"),
        (("Pooling",), {"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True}, r"cls \+ max"),
        (("Pooling",), {"pooling_mode": ["mean", "max"]}, r"mean \+ max"),
        (("Pooling",), {}, "none"),
    ],
)
def test_modules_that_are_not_computed_are_refused(
    tmp_path: Path, kinds: tuple[str, ...], pooling: dict[str, Any], words: str
) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        read_encoder_spec(modules(written(tmp_path), *kinds, pooling=pooling))


def test_a_decoder_is_no_encoder(tmp_path: Path, smollm2_path: Path) -> None:
    assert not is_encoder(written(tmp_path, model_type="llama"))
    assert not is_encoder(smollm2_path)


def test_who_wants_text_of_an_encoder_is_told_what_it_is_for(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="an encoder, which computes vectors"):
        read_spec(written(tmp_path))
