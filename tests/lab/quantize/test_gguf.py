"""`ridgeline quantize --to q4_k_m` and the like: the file, its importances, and what is refused."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ridgeline import __version__
from ridgeline.cli.lab import quantize as verb
from ridgeline.cli.main import main
from ridgeline.lab.quantize.gguf_text import importances, read_text
from ridgeline.lab.quantize.options import QuantizeOptions
from ridgeline.models.decoders.reference import Decoder, allocate_kv
from ridgeline.models.files.gguf import GgufFile
from ridgeline.models.gguf_output.recipes import RECIPES
from ridgeline.models.spec.read_spec import read_spec
from ridgeline.models.weights.dequant import dequantize
from ridgeline.models.weights.torch_weights import load_weights
from ridgeline.ops.backend import select_backend
from ridgeline.ops.inputs import InputRow, StepInputs
from tests.models.gguf_output.tiny_tokenizers import save_letters
from tests.models.tiny_checkpoints import gguf_tensors, tiny_model

LENGTH = ["--length", "32"]
Ints = NDArray[np.int64]


@pytest.fixture(scope="module", params=["llama", "qwen3-moe"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tiny = tiny_model(name)
    tiny.save_pretrained(folder)
    save_letters(folder, tiny.config.vocab_size)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    letters = np.random.default_rng(0).choice(list("abcdefgh 123"), 1500)
    path.write_text("".join(letters))
    return path


def quantize(*arguments: object) -> int:
    return main(["quantize", *map(str, arguments)])


def test_the_help_names_every_recipe() -> None:
    assert set(RECIPES) == set(verb.GGUF_TARGETS)
    for recipe in RECIPES:
        assert recipe in verb.DESCRIPTION


def test_a_gguf_file_is_written_from_the_command_line(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quantize(model, "--to", "Q8_0", "--out", tmp_path) == 0
    shown = capsys.readouterr()
    file = tmp_path / "tiny-q8_0.gguf"
    assert f"ridgeline serve {file}" in shown.out
    assert "bits a weight" in shown.out
    assert "weights:" in shown.err
    assert GgufFile(file).tensors["token_embd.weight"].type == "Q8_0"
    assert quantize(model, "--to", "q8_0", "--out", tmp_path) == 2
    assert "is there already" in capsys.readouterr().err


def test_calibration_text_lowers_the_error_of_what_the_model_computes(
    model: Path, name: str, text: Path, tmp_path: Path
) -> None:
    for path, more in (("plain.gguf", []), ("text.gguf", ["--calibration", text, *LENGTH])):
        assert quantize(model, "--to", "q4_0", "--out", tmp_path / path, *more) == 0
    stem = "ffn_down_exps" if name == "qwen3-moe" else "ffn_down"
    tensor = f"blk.1.{stem}.weight"
    weights = gguf_tensors(tiny_model(name))[tensor]
    options = QuantizeOptions(calibration=str(text), length=32)
    squares = importances(read_text(model, options), tmp_path, lambda *_: None)[tensor]
    losses = []
    for path in ("plain.gguf", "text.gguf"):
        file = GgufFile(tmp_path / path)
        values = dequantize(file.raw(tensor), file.tensors[tensor].type).reshape(weights.shape)
        losses.append(float((np.square(values - weights) * squares[..., None, :]).sum()))
    assert losses[1] < 0.98 * losses[0]
    assert GgufFile(tmp_path / "text.gguf").metadata["quantize.calibration.file"] == "text.txt"


@pytest.fixture(scope="module", params=["llama", "qwen3-moe", "gemma3"])
def measured(
    request: pytest.FixtureRequest, text: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, GgufFile, dict[str, Any]]:
    """A model, the file made of it, and what --json printed. Rotated pairs, stacks, norms with their 1."""
    folder = tmp_path_factory.mktemp("measured")
    tiny = tiny_model(request.param)
    tiny.save_pretrained(folder / "tiny")
    save_letters(folder / "tiny", tiny.config.vocab_size)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        more = ("--out", folder, "--calibration", text, "--json", *LENGTH)
        assert quantize(folder / "tiny", "--to", "q4_0", *more) == 0
    return folder / "tiny", GgufFile(folder / "tiny-q4_0.gguf"), json.loads(printed.getvalue())


def logprobs(path: Path, tokens: Ints) -> torch.Tensor:
    """By the torch decoder, from the file as any reader sees it."""
    spec = read_spec(path)
    decoder = Decoder(spec, load_weights(path, spec, torch.float32), select_backend("torch"), tokens.shape[1])
    blocks = -(-tokens.shape[1] // 16)
    rows = [
        InputRow(ids, 0, list(range(at * blocks, (at + 1) * blocks)), 0)
        for at, ids in enumerate(tokens.tolist())
    ]
    with torch.inference_mode():
        kv = allocate_kv(spec, blocks * len(rows), 16, torch.float32)
        logits = decoder.forward(StepInputs.from_rows(rows, 16), kv)
    return torch.log_softmax(logits.double(), -1).view(*tokens.shape, -1)


def test_the_file_says_what_it_lost(measured: tuple[Path, GgufFile, dict[str, Any]], text: Path) -> None:
    """The metadata's figures come from one layer after the other, these from both files as they are read."""
    model, file, printed = measured
    tokens = read_text(model, QuantizeOptions(calibration=str(text), length=32)).text.held_out
    p, q = logprobs(model, tokens)[:, :-1], logprobs(file.path, tokens)[:, :-1]
    kl = float((p.exp() * (p - q)).sum(-1).mean())
    flips = float((p.argmax(-1) != q.argmax(-1)).float().mean())
    told = file.metadata
    assert kl > 1e-5
    assert told["quantize.loss.kl"] == pytest.approx(kl, rel=1e-3)
    assert told["quantize.loss.flips"] == pytest.approx(flips, abs=1e-6)
    assert told["quantize.loss.positions"] == p.shape[0] * p.shape[1]
    assert told["quantize.loss.kl_low"] <= told["quantize.loss.kl"] <= told["quantize.loss.kl_high"]
    assert printed["losses"]["mean_kl"] == pytest.approx(told["quantize.loss.kl"], rel=1e-6)
    assert told["quantize.held_out.file"] == "text.txt"


def test_the_file_says_its_versions_and_the_error_of_each_tensor(
    measured: tuple[Path, GgufFile, dict[str, Any]],
) -> None:
    _, file, printed = measured
    told = file.metadata
    assert told["quantize.versions.ridgeline"] == __version__
    assert told["quantize.versions.torch"] == torch.__version__
    errors = dict(zip(file.tensors, told["quantize.errors"], strict=True))
    assert errors["output_norm.weight"] == 0.0
    assert 0.01 < errors["blk.1.attn_q.weight"] < 0.2
    assert {name: error for name, error in errors.items() if error} == pytest.approx(printed["errors"])


def test_without_text_there_is_no_loss_in_the_file(model: Path, tmp_path: Path) -> None:
    assert quantize(model, "--to", "q8_0", "--out", tmp_path / "a.gguf") == 0
    told = GgufFile(tmp_path / "a.gguf").metadata
    assert not [key for key in told if key.startswith(("quantize.loss.", "quantize.calibration."))]
    assert max(told["quantize.errors"]) > 0


def test_text_for_q8_0_is_read_for_the_loss_alone(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--calibration", text, "--held-out", text, *LENGTH]
    assert quantize(model, "--to", "q8_0", "--out", tmp_path / "a.gguf", *more) == 0
    assert "held-out text: KL 0.0" in capsys.readouterr().out
    told = GgufFile(tmp_path / "a.gguf").metadata
    assert 0 < told["quantize.loss.kl"] < 0.01
    assert "quantize.calibration.file" not in told


def test_kept_modules_stay_as_the_source_has_them(
    model: Path, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep = ["--keep", "layers.1.self_attn", "--keep", "lm_head", "--keep", "ffn_down*"]
    assert quantize(model, "--to", "q4_0", "--out", tmp_path / "a.gguf", *keep) == 0
    file = GgufFile(tmp_path / "a.gguf")
    types = {tensor: found.type for tensor, found in file.tensors.items()}
    stem = "ffn_down_exps" if name == "qwen3-moe" else "ffn_down"
    assert types["blk.1.attn_q.weight"] == types["blk.1.attn_output.weight"] == "F32"  # the source's
    assert types[f"blk.0.{stem}.weight"] == types[f"blk.1.{stem}.weight"] == "F32"
    assert types["blk.0.attn_q.weight"] == "Q4_0"
    assert types.get("output.weight", types["token_embd.weight"]) == "F32"
    assert list(file.metadata["quantize.keep"]) == ["layers.1.self_attn", "lm_head", "ffn_down*"]
    assert quantize(model, "--to", "q4_0", "--out", tmp_path / "b.gguf", "--keep", "self_atn") == 1
    assert "the model has no such module; did you mean 'self_attn'" in capsys.readouterr().err
    assert not list(tmp_path.glob("b.gguf*"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--to", "q4_k_n"], "unknown format; did you mean 'q4_k_"),
        (["--to", "q4_0", "--method", "hadamard"], "--method is for compressed-tensors"),
        (["--to", "int4", "--group", "32", "--requantize"], "--requantize is for GGUF files"),
        (["--to", "q4_0", "--held-out", "x.txt"], "--held-out is read beside --calibration"),
    ],
)
def test_wrong_settings_are_refused(
    arguments: list[str], words: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quantize(model, *arguments, "--out", tmp_path / "out") == 2
    assert words in capsys.readouterr().err


def test_a_quantized_file_needs_a_flag(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small, again = tmp_path / "small.gguf", tmp_path / "again.gguf"
    assert quantize(model, "--to", "q8_0", "--out", small) == 0
    assert quantize(small, "--to", "q4_0", "--out", again) == 1
    assert "is quantized already" in capsys.readouterr().err
    assert not again.exists()
    assert quantize(small, "--to", "q4_0", "--requantize", "--out", again) == 0
    more = ["--requantize", "--calibration", text, "--out", tmp_path / "third.gguf"]
    assert quantize(small, "--to", "q4_0", *more) == 2
    assert "--calibration needs the folder" in capsys.readouterr().err
