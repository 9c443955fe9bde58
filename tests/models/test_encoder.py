"""The encoder, plain and native, against transformers and sentence-transformers on the same checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from ridgeline.models.encoders.packed import POOLINGS, encoder_table, encoder_weights
from ridgeline.models.encoders.reference import TorchEncoder
from ridgeline.models.encoders.weights import load_encoder_weights
from ridgeline.models.spec.readers.encoder_config import read_encoder_spec
from ridgeline.ops.cpu.encoder import NativeEncoder
from ridgeline.ops.cpu.interface import Format
from ridgeline.ops.cpu.library import available_isas

VOCAB = 200
# Sizes that are not multiples of a vector, and heads of odd sizes.
SIZES = {"hidden_size": 84, "num_attention_heads": 6, "num_hidden_layers": 2, "intermediate_size": 150}
DISTIL_SIZES = {"dim": 48, "n_heads": 3, "n_layers": 2, "hidden_dim": 100}
TEXTS = [[2, 5, 9, 11, 3], [2, 3], [2, *range(10, 70), 3], [2, 17, 3]]


def checkpoint(folder: Path, family: str, kind: str = "Model", **changes: Any) -> Any:
    """A random model of this family, saved as transformers saves it; returned as transformers computes it."""
    torch.manual_seed(5)
    sizes = DISTIL_SIZES if family == "DistilBert" else SIZES
    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCAB, max_position_embeddings=80, pad_token_id=1, **(sizes | changes)
    )
    model = getattr(transformers, f"{family}{kind}")(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # transformers starts them at zero, which would hide a lost one
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return model


def hidden_states(model: Any, text: list[int]) -> Any:
    with torch.inference_mode():
        return model(torch.tensor([text])).last_hidden_state[0].numpy()


def starts_of(texts: list[list[int]]) -> Any:
    return np.cumsum([0, *map(len, texts)]).astype(np.int32)


def native_of(folder: Path) -> tuple[Any, NativeEncoder]:
    spec = read_encoder_spec(folder)
    return spec, NativeEncoder(encoder_table(spec, load_encoder_weights(folder, spec), 160), threads=2)


def run(spec: Any, encoder: NativeEncoder, texts: list[list[int]]) -> Any:
    ids = np.concatenate([np.array(text, np.int32) for text in texts])
    pooling = POOLINGS[spec.pooling]
    return encoder.execute(ids, starts_of(texts), pooling=pooling, normalize=spec.normalize)


@pytest.mark.parametrize("family", ["Bert", "Roberta", "XLMRoberta", "DistilBert"])
def test_both_encoders_are_the_mean_of_what_transformers_computes(tmp_path: Path, family: str) -> None:
    model = checkpoint(tmp_path, family)
    spec, native = native_of(tmp_path)
    plain = TorchEncoder(spec, load_encoder_weights(tmp_path, spec)).encode(TEXTS)
    fast = run(spec, native, TEXTS)
    for text, ours, theirs_fast in zip(TEXTS, plain, fast, strict=True):
        expected = hidden_states(model, text).mean(0)
        expected /= np.linalg.norm(expected)
        assert np.abs(ours.numpy() - expected).max() < 1e-5
        assert np.abs(theirs_fast - expected).max() < 1e-5


@pytest.mark.parametrize("activation", ["gelu_new", "relu"])
def test_other_activations_are_computed_too(tmp_path: Path, activation: str) -> None:
    model = checkpoint(tmp_path, "Bert", hidden_act=activation)
    spec, native = native_of(tmp_path)
    (vector,) = run(spec, native, TEXTS[2:3])
    expected = hidden_states(model, TEXTS[2]).mean(0)
    assert np.abs(vector - expected / np.linalg.norm(expected)).max() < 1e-5


@pytest.mark.parametrize("mode", ["cls", "mean", "max", "mean_sqrt_len_tokens", "lasttoken"])
def test_poolings_are_those_of_sentence_transformers(tmp_path: Path, mode: str) -> None:
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    model = checkpoint(tmp_path, "Bert")
    (tmp_path / "1_Pooling").mkdir()
    pooling = modules.Pooling(SIZES["hidden_size"], pooling_mode=mode)
    pooling.save(str(tmp_path / "1_Pooling"))
    (tmp_path / "modules.json").write_text(
        '[{"path": "", "type": "sentence_transformers.models.Transformer"},'
        ' {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]'
    )
    spec, native = native_of(tmp_path)
    assert not spec.normalize
    plain = TorchEncoder(spec, load_encoder_weights(tmp_path, spec)).encode(TEXTS)
    for text, ours, fast in zip(TEXTS, plain, run(spec, native, TEXTS), strict=True):
        hidden = torch.from_numpy(hidden_states(model, text))[None]
        features = {"token_embeddings": hidden, "attention_mask": torch.ones(1, len(text), dtype=torch.long)}
        expected = pooling(features)["sentence_embedding"][0].numpy()
        assert np.abs(ours.numpy() - expected).max() < 1e-5
        assert np.abs(fast - expected).max() < 1e-5


@pytest.mark.parametrize("format", [Format.F32, Format.BF16], ids=lambda one: one.name)
@pytest.mark.parametrize("isa", ["amx", "avx512", "avx512vnni", "avxvnni", "avx2", "portable"])
def test_a_text_has_the_same_vector_alone_and_in_any_company(
    tmp_path: Path, isa: str, format: Format
) -> None:
    if isa not in available_isas():
        pytest.skip(f"{isa} does not run here")
    checkpoint(tmp_path, "Bert")
    spec = read_encoder_spec(tmp_path)
    native = NativeEncoder(encoder_table(spec, load_encoder_weights(tmp_path, spec), 160, format), 2, isa)
    together = run(spec, native, TEXTS)
    backwards = run(spec, native, TEXTS[::-1])[::-1]
    alone = np.concatenate([run(spec, native, [text]) for text in TEXTS])
    assert np.array_equal(together, backwards)
    assert np.array_equal(together, alone)


@pytest.mark.parametrize("isa", [isa for isa in ("amx", "avx512", "avx2") if isa in available_isas()])
def test_bfloat16_keeps_the_direction_of_every_vector_of_a_real_model(isa: str) -> None:
    from ridgeline.models.files.pull import ensure

    path = ensure("all-minilm-l6-v2").path
    spec = read_encoder_spec(path)
    weights = load_encoder_weights(path, spec)
    rng = np.random.default_rng(3)
    texts = [[101, *map(int, rng.integers(1996, 20000, length)), 102] for length in (1, 6, 30, 100, 250)]
    exact, rounded = (
        run(spec, NativeEncoder(encoder_table(spec, weights, 400, format), 2, isa), texts)
        for format in (Format.F32, Format.BF16)
    )
    cosines = (exact * rounded).sum(axis=1)
    assert cosines.min() > 0.9998  # random ids: 0.99995
    assert cosines.max() < 1 - 1e-7  # it was rounded


def test_auto_rounds_where_there_are_bf16_products_and_never_a_score(tmp_path: Path) -> None:
    checkpoint(tmp_path / "vectors", "Bert")
    checkpoint(tmp_path / "scores", "Bert", "ForSequenceClassification", num_labels=1)
    vectors, scores = (read_encoder_spec(tmp_path / name) for name in ("vectors", "scores"))
    assert [encoder_weights("auto", vectors, isa) for isa in ("amx", "avx512")] == ["bfloat16"] * 2
    assert {encoder_weights("auto", vectors, isa) for isa in ("avx512vnni", "avx2", "neon", "")} == {
        "float32"
    }
    assert encoder_weights("auto", scores, "avx512") == "float32"
    assert encoder_weights("float32", vectors, "avx512") == "float32"


@pytest.mark.parametrize("family", ["Bert", "Roberta", "DistilBert"])
def test_a_cross_encoder_scores_as_transformers_does(tmp_path: Path, family: str) -> None:
    model = checkpoint(tmp_path, family, "ForSequenceClassification", num_labels=1)
    spec = read_encoder_spec(tmp_path)
    assert spec.output == "score"
    scores = TorchEncoder(spec, load_encoder_weights(tmp_path, spec)).encode(TEXTS)
    for text, score in zip(TEXTS, scores, strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([text])).logits[0]
        assert torch.allclose(score, expected, atol=1e-5)
