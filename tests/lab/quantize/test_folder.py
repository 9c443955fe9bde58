"""The folder that `quantize` writes: one run at a time, a full disk, what is asked for when a run continues,
and tensors that keep the source's names and shapes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from ridgeline.cli.main import main
from ridgeline.lab.quantize import driver
from ridgeline.lab.quantize.journal import FOLDER, Journal
from ridgeline.lab.quantize.options import QuantizeOptions
from ridgeline.models.files.gguf_writer import GgufWriter, TensorEntry
from tests.lab.quantize.tiny_models import save_text, save_tiny
from tests.models.gguf_output.tiny_tokenizers import save_letters
from tests.models.tiny_checkpoints import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("model"), dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text(tmp_path_factory.mktemp("text") / "text.txt", 131, 1200)


def quantize(*arguments: object) -> int:
    return main(["quantize", *map(str, arguments)])


def shapes_of(folder: Path) -> dict[str, tuple[int, ...]]:
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            found |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    return found


# ---- one run at a time ----


def test_a_second_run_in_the_same_folder_is_refused_while_the_first_works(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, second = tmp_path / "out", []
    layer = driver._Run.layer

    def meanwhile(run: driver._Run, number: int) -> None:
        if not second:
            second.append(quantize(model, "--to", "fp8", "--out", out))
        layer(run, number)

    monkeypatch.setattr(driver._Run, "layer", meanwhile)
    assert quantize(model, "--to", "fp8", "--out", out) == 0
    assert second == [1]
    assert "another `ridgeline quantize` writes to this folder" in capsys.readouterr().err
    assert not (out / FOLDER).exists()


def test_a_run_that_finds_a_folder_finished_meanwhile_refuses_it(tmp_path: Path) -> None:
    """It has seen an unfinished run, which ends before the lock is taken."""
    (tmp_path / FOLDER).mkdir()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(Exception, match="is not empty"):
        Journal(tmp_path, {})


def test_a_gguf_file_has_one_writer(tmp_path: Path) -> None:
    entries = [TensorEntry("a.weight", "F32", (4,))]
    first = GgufWriter(tmp_path / "m.gguf", {}, entries)
    first.rows("a.weight")[:] = 7
    with pytest.raises(Exception, match="another process is writing this file"):
        GgufWriter(tmp_path / "m.gguf", {}, entries)
    first.finish()
    assert (tmp_path / "m.gguf").read_bytes().endswith(b"\x07" * 16 + b"\0" * 16)
    GgufWriter(tmp_path / "m.gguf", {}, entries).discard()  # a finished or discarded file leaves no lock
    GgufWriter(tmp_path / "m.gguf", {}, entries).discard()


# ---- a full disk ----

SMALL_DISK = "mount -t tmpfs -o size={size}k none {folder} && exec {command}"


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    """Runs a command with a disk of some KiB at tmp_path/disk."""
    folder = tmp_path / "disk"
    folder.mkdir()
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-rm", "true"], capture_output=True).returncode:
        pytest.skip("needs user namespaces, to mount a small disk")

    def run(size: int, *arguments: object) -> subprocess.CompletedProcess[str]:
        command = " ".join([sys.executable, "-m", "ridgeline.cli.main", *map(str, arguments)])
        script = SMALL_DISK.format(size=size, folder=folder, command=command)
        return subprocess.run([unshare, "-rm", "sh", "-c", script], capture_output=True, text=True)

    return run, folder


def test_a_disk_that_is_full_is_an_error_with_the_file_and_both_sizes(
    small_disk: Any, tmp_path: Path
) -> None:
    """Written through a memory map, a full disk would end the process with SIGBUS."""
    run, folder = small_disk
    model = tmp_path / "model"
    tiny_model("llama").save_pretrained(model)
    save_letters(model, tiny_model("llama").config.vocab_size)
    found = run(64, "quantize", model, "--to", "f32", "--out", folder / "m.gguf")
    said = found.stderr.strip().splitlines()[-1]
    assert (found.returncode, "m.gguf.partial: the disk is full: the file needs" in said) == (1, True), said
    assert "0.1 MB are free" in said


def test_a_disk_that_fills_up_while_layers_are_written_is_told(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    from ridgeline.models.files import reserve

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(reserve.os, "posix_fallocate", full)
    assert quantize(model, "--to", "fp8", "--out", tmp_path / "out") == 1
    said = capsys.readouterr().err
    assert "model-00001-of-00004.safetensors.unfinished: the disk is full" in said
    monkeypatch.undo()
    assert quantize(model, "--to", "fp8", "--out", tmp_path / "out") == 0


def test_a_run_that_continues_asks_for_the_space_that_it_does_not_have(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for again after two of three layers: what a new run asks for, less parts and streams on disk."""
    out = tmp_path / "out"
    options = QuantizeOptions(method="gptq", group=32, length=24, samples=24, calibration=str(text))
    job = driver.prepare(model, "int4", options)

    class Disk:
        def __init__(self, free: int) -> None:
            self.free = free

    def needed(folder: Path) -> int:
        """The least free space that is not refused."""
        low, high = 0, 1 << 30
        while low < high:
            free = (low + high) // 2
            with monkeypatch.context() as patched:
                patched.setattr(driver.shutil, "disk_usage", lambda _, free=free: Disk(free))
                patched.setattr(driver._Run, "begin", _stop)
                patched.setattr(driver._Run, "layer", _stop)
                try:
                    driver.quantize(job, folder, lambda *_: None)
                except KeyboardInterrupt:
                    high = free
                except driver.LabError:
                    low = free + 1
        return low

    at_first = needed(tmp_path / "new")
    layer = driver._Run.layer

    def two(run: driver._Run, number: int) -> None:
        if number == 2:
            raise KeyboardInterrupt
        layer(run, number)

    with monkeypatch.context() as patched:
        patched.setattr(driver._Run, "layer", two)
        with pytest.raises(KeyboardInterrupt):
            driver.quantize(job, out, lambda *_: None)
    parts = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    streams = sum(file.stat().st_size for file in (out / FOLDER).glob("*.npy"))
    assert parts > 20_000
    assert at_first - needed(out) == pytest.approx(parts + streams, rel=0.1)


def _stop(*_: Any) -> None:
    raise KeyboardInterrupt


# ---- names and shapes of the source ----


@pytest.mark.parametrize(("family", "head"), [("gpt-neox", "embed_out"), ("llama", "lm_head")])
def test_the_head_is_named_as_the_model_names_it(family: str, head: str, tmp_path: Path) -> None:
    source = save_tiny(family, tmp_path / "model")
    assert quantize(source, "--to", "fp8", "--keep", head, "--out", tmp_path / "out") == 0
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert settings["ignore"][-1] == head
    assert f"{head}.weight" in shapes_of(tmp_path / "out")


def test_a_tied_copy_of_the_head_is_left_out_whatever_its_name(tmp_path: Path) -> None:
    """Some producers store it beside the embedding."""
    from safetensors.torch import load_file, save_file

    source = save_tiny("gpt-neox", tmp_path / "model")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    file = source / "model.safetensors"
    tensors = load_file(file)
    tensors["embed_out.weight"] = tensors["gpt_neox.embed_in.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    assert quantize(source, "--to", "fp8", "--out", tmp_path / "out") == 0
    assert "embed_out.weight" not in shapes_of(tmp_path / "out")
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert settings["ignore"] == ["embed_out"]


def test_norms_of_heads_keep_a_row_for_each_head(tmp_path: Path) -> None:
    """Cohere's q_norm is [heads, head size]: transformers and vLLM refuse a flat one."""
    source = save_tiny("cohere", tmp_path / "model")
    assert quantize(source, "--to", "fp8", "--out", tmp_path / "out") == 0
    before, after = shapes_of(source), shapes_of(tmp_path / "out")
    norms = [name for name in before if "q_norm" in name or "k_norm" in name]
    assert len(norms) == 6
    assert {name: after[name] for name in norms} == {name: before[name] for name in norms}
    assert all(len(before[name]) == 2 for name in norms)


@pytest.mark.parametrize(("family", "method"), [("llama", "gptq"), ("qwen3-moe", "rtn")])
def test_matrices_that_engines_join_have_one_nvfp4_tensor_scale(
    family: str, method: str, text: Path, tmp_path: Path
) -> None:
    """vLLM multiplies by q, k and v as one matrix with one scale, and by gate and up."""
    source = save_tiny(family, tmp_path / "model", dtype=torch.bfloat16)
    more = ["--method", method, "--calibration", text, "--length", 24]
    assert quantize(source, "--to", "nvfp4", *more, "--out", tmp_path / "out") == 0
    scales: dict[str, float] = {}
    largest: dict[str, float] = {}
    for folder in (source, tmp_path / "out"):
        for file in folder.glob("*.safetensors"):
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    module, _, part = name.rpartition(".")
                    if part == "weight_global_scale":
                        scales[module] = float(tensors.get_tensor(name))
                    elif folder == source and module.endswith("_proj"):
                        largest[module] = float(tensors.get_tensor(name).abs().max())
    sets = [[one.replace("q_proj", f"{part}_proj") for part in "qkv"] for one in scales if "q_proj" in one]
    sets += [[one, one.replace("gate_proj", "up_proj")] for one in scales if "gate_proj" in one]
    assert len(sets) > 5
    for modules in sets:
        assert len({scales[module] for module in modules}) == 1, modules
        # The largest weight of all is the largest number: 6 · 448 / scale.
        most = max(largest[module] for module in modules)
        assert 6 * 448 / scales[modules[0]] == pytest.approx(most, rel=1e-6)
    assert len({round(value, 3) for value in scales.values()}) > len(sets) / 2  # others have their own
