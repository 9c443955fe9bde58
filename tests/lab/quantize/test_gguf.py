"""`ridgeline quantize --to q4_k_m` and the like: the file, its importances, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ridgeline.cli.lab import quantize as verb
from ridgeline.cli.main import main
from ridgeline.lab.quantize.gguf import _importance
from ridgeline.lab.quantize.options import QuantizeOptions
from ridgeline.models.files.gguf import GgufFile
from ridgeline.models.gguf_output.recipes import RECIPES
from ridgeline.models.weights.dequant import dequantize
from tests.models.gguf_output.tiny_tokenizers import save_letters
from tests.models.tiny_checkpoints import gguf_tensors, tiny_model

LENGTH = ["--length", "32"]


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
    squares = _importance(model, options, tmp_path, lambda *_: None)[0][tensor]
    losses = []
    for path in ("plain.gguf", "text.gguf"):
        file = GgufFile(tmp_path / path)
        values = dequantize(file.raw(tensor), file.tensors[tensor].type).reshape(weights.shape)
        losses.append(float((np.square(values - weights) * squares[..., None, :]).sum()))
    assert losses[1] < 0.98 * losses[0]
    assert GgufFile(tmp_path / "text.gguf").metadata["quantize.calibration.file"] == "text.txt"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--to", "q4_k_n"], "unknown format; did you mean 'q4_k_"),
        (["--to", "q4_0", "--method", "hadamard"], "--method is for compressed-tensors"),
        (["--to", "q4_0", "--keep", "layers.0"], "--keep is for compressed-tensors"),
        (["--to", "int4", "--group", "32", "--requantize"], "--requantize is for GGUF files"),
        (["--to", "q8_0", "--calibration", "x.txt"], "learns nothing from text"),
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
