"""`quantize` from a checkpoint to a checkpoint: what it writes, what it reports, and how it continues."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ridgeline import LLM, SamplingParams
from ridgeline.lab.quantize.driver import Quantized, close, prepare, quantize
from ridgeline.lab.quantize.journal import FOLDER, Journal
from ridgeline.lab.quantize.options import QuantizeOptions
from ridgeline.lab.quantize.report import make_report, report_text, write_report
from ridgeline.lab.quantize.scan import HTML, JSON, SVG, advice, scan
from ridgeline.models.decoders.reference import Decoder, allocate_kv
from ridgeline.models.quantized.format import QuantFormat
from ridgeline.models.spec.read_spec import read_spec
from ridgeline.models.weights.torch_weights import load_weights
from ridgeline.ops.backend import select_backend
from ridgeline.ops.inputs import InputRow, StepInputs
from tests.lab.quantize.tiny_models import save_text, save_tiny
from tests.tiny_thinker import save_thinker

VOCAB, LENGTH, SAMPLES = 131, 24, 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("model"), dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text(tmp_path_factory.mktemp("text") / "text.txt", VOCAB, 60 * LENGTH)


def settings(text: Path | None, **others: Any) -> QuantizeOptions:
    calibration = None if text is None else str(text)
    return QuantizeOptions(
        **{"group": 32, "length": LENGTH, "samples": SAMPLES, "calibration": calibration, **others}
    )


def made(model: Path, out: Path, to: str, options: QuantizeOptions) -> Quantized:
    found = quantize(prepare(model, to, options), out, lambda *_: None)
    write_report(make_report(found), out)
    close(found)
    return found


def logprobs(path: Path, tokens: np.ndarray) -> torch.Tensor:
    """By the torch decoder, from the checkpoint as any reader sees it."""
    spec = read_spec(path)
    decoder = Decoder(spec, load_weights(path, spec, torch.float32), select_backend("torch"), LENGTH)
    rows = [InputRow(ids, 0, [2 * at, 2 * at + 1], 0) for at, ids in enumerate(tokens.tolist())]
    with torch.inference_mode():
        kv = allocate_kv(spec, 2 * len(rows), 16, torch.float32)
        logits = decoder.forward(StepInputs.from_rows(rows, 16), kv)
    return torch.log_softmax(logits.double(), -1).view(*tokens.shape, -1)


TARGETS = {
    "int4": ("int4", "rtn", {}),
    "int4 with zero points": ("int4", "gptq", {"zero_points": True}),
    "w8a16": ("w8a16", "rtn", {}),
    "mxfp4": ("mxfp4", "gptq", {}),
    "nvfp4": ("nvfp4", "rtn", {}),
    "int4 awq": ("int4", "awq", {}),
    "int4 rotated": ("int4", "hadamard+gptq", {}),
}


@pytest.mark.parametrize("case", TARGETS)
def test_the_written_model_loses_what_the_report_says(
    case: str, model: Path, text: Path, tmp_path: Path
) -> None:
    """The report's figures come from the fake-quantized model, these from the file: they are one model."""
    to, method, others = TARGETS[case]
    found = made(model, tmp_path / "out", to, settings(text, method=method, **others))
    assert found.job.calibration is not None
    assert found.losses is not None
    tokens = found.job.calibration.held_out
    p, q = logprobs(model, tokens)[:, :-1], logprobs(tmp_path / "out", tokens)[:, :-1]
    kl = float((p.exp() * (p - q)).sum(-1).mean())
    assert kl == pytest.approx(found.losses.mean_kl, rel=1e-3)
    assert 1 - found.losses.same_top == pytest.approx(float((p.argmax(-1) != q.argmax(-1)).float().mean()))


@pytest.mark.parametrize("to", ["fp8", "fp8-block", "int8"])
def test_formats_that_round_inputs_report_that_too(to: str, model: Path, text: Path, tmp_path: Path) -> None:
    found = made(model, tmp_path / "out", to, settings(text))
    assert found.job.calibration is not None
    assert found.losses is not None
    tokens = found.job.calibration.held_out
    p, q = logprobs(model, tokens)[:, :-1], logprobs(tmp_path / "out", tokens)[:, :-1]
    weights_alone = float((p.exp() * (p - q)).sum(-1).mean())
    assert 0 < weights_alone < found.losses.mean_kl < 0.05
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert "inputs rounded to" in " ".join(report["notes"])


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_the_engine_serves_it_with_the_text_of_the_fake_quantized_model(backend: str, tmp_path: Path) -> None:
    """A model with a byte-level tokenizer: the engine streams no others."""
    model, out, text = tmp_path / "model", tmp_path / "out", tmp_path / "text.txt"
    model.mkdir()
    save_thinker(model)
    text.write_text("The quick brown fox jumps over the lazy dog, and the dog does not mind. " * 20)
    made(model, out, "int4", settings(text, method="gptq"))
    prompt, count = [5, 9, 40, 77, 12], 12
    ids = list(prompt)
    for _ in range(count):
        padded = np.array([ids + [3] * (LENGTH - len(ids))])
        ids.append(int(logprobs(out, padded)[0, len(ids) - 1].argmax()))
    llm = LLM(str(out), kv_tokens=256, backend=backend)
    (answer,) = llm.generate([prompt], SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True))
    assert answer.completions[0].tokens == ids[len(prompt) :]


def test_a_resumed_run_ends_with_the_same_bytes(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = settings(text, method="hadamard+gptq")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    made(model, whole, "int4", options)
    committed = Journal.finish_layer

    def stop_before(layer: int) -> None:
        def finish(self: Journal, record: Any) -> None:
            if record.layer == layer:
                raise KeyboardInterrupt  # its part and its streams are written, the journal is not
            committed(self, record)

        monkeypatch.setattr(Journal, "finish_layer", finish)

    for layer in (1, 2):
        stop_before(layer)
        with pytest.raises(KeyboardInterrupt):
            made(model, parts, "int4", options)
        assert not (parts / "config.json").exists()  # nothing takes it for a model
    monkeypatch.setattr(Journal, "finish_layer", committed)
    found = made(model, parts, "int4", options)
    assert found.resumed_at == 2
    names = sorted(path.name for path in whole.iterdir())
    assert names == sorted(path.name for path in parts.iterdir())
    for name in names:
        if not name.startswith("report."):  # they have times in them
            assert (whole / name).read_bytes() == (parts / name).read_bytes(), name
    one, other = (json.loads((folder / "report.json").read_text()) for folder in (whole, parts))
    assert one["losses"] == other["losses"]
    assert not (parts / FOLDER).exists()


def test_the_report_says_how_the_model_was_made(model: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = settings(text, method="gptq", keep=("layers.0", "down_proj"))
    found = made(model, out, "int4", options)
    report = json.loads((out / "report.json").read_text())
    assert report["to"] == "int4"
    assert report["method"] == "gptq"
    assert report["options"] == {"group": 32, "damping": 0.01, "act_order": True}
    assert report["calibration"]["source"] == "text.txt"
    assert report["calibration"]["held_out_samples"] == 3
    assert report["calibration"]["samples"] == SAMPLES - 3
    assert report["losses"]["positions"] == 3 * (LENGTH - 1)
    assert report["flips"] == pytest.approx(1 - report["losses"]["same_top"])
    assert report["versions"].keys() == {"ridgeline", "torch", "python"}
    assert report["written_bytes"] < report["stored_bytes"]
    assert [layer["layer"] for layer in report["layers"]] == [0, 1, 2]
    assert report["layers"][0]["matrices"] == {}  # kept
    assert report["layers"][0]["output_error"] == 0.0
    assert all(not name.endswith("down_proj") for name in report["layers"][1]["matrices"])
    assert 0 < report["layers"][1]["matrices"]["model.layers.1.self_attn.q_proj"] < 0.1
    page = (out / "report.html").read_text()
    assert "top-1 flips" in page
    assert "<svg" in page
    assert f"KL {report['losses']['mean_kl']:.5f}" in report_text(make_report(found), out)


def test_kept_modules_keep_their_bytes_and_are_named_in_the_config(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    made(model, out, "int4", settings(None, keep=("layers.0", "down_proj")))
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert "lm_head" in config["ignore"]
    assert "model.layers.0.self_attn.q_proj" in config["ignore"]
    assert "model.layers.1.mlp.down_proj" in config["ignore"]
    assert "model.layers.1.mlp.up_proj" not in config["ignore"]
    spec = read_spec(out)
    assert spec.quantization is not None
    format = spec.quantization.format_of("model.layers.1.mlp.up_proj")
    assert isinstance(format, QuantFormat)
    assert format.bits == 4
    one, other = (load_weights(path, read_spec(path), torch.float32) for path in (model, out))
    assert torch.equal(one.layers[0].qkv.tensor, other.layers[0].qkv.tensor)
    assert torch.equal(one.embed.tensor, other.embed.tensor)
    assert torch.equal(one.lm_head.tensor, other.lm_head.tensor)
    assert not torch.equal(one.layers[1].qkv.tensor, other.layers[1].qkv.tensor)
    assert (out / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("name", ["gpt2", "phi3", "qwen2-moe-published", "mistral3"])
def test_other_layouts_are_written_as_they_are_read(name: str, text: Path, tmp_path: Path) -> None:
    """Transposed and fused matrices, experts, tensors of a vision tower."""
    model = save_tiny(name, tmp_path / "model")
    found = made(model, tmp_path / "out", "int4", settings(text, method="gptq", group=8))
    assert found.job.calibration is not None
    assert found.losses is not None
    tokens = found.job.calibration.held_out
    p, q = logprobs(model, tokens)[:, :-1], logprobs(tmp_path / "out", tokens)[:, :-1]
    assert float((p.exp() * (p - q)).sum(-1).mean()) == pytest.approx(found.losses.mean_kl, rel=2e-3)


def test_the_scan_finds_the_layer_that_loses_most(text: Path, tmp_path: Path) -> None:
    """Large weights that read only zeros: they change no output, and their groups have coarse steps."""
    from safetensors.torch import load_file, save_file

    model = save_tiny("llama", tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    for name in tensors:
        if "layers.1." in name and name.endswith("layernorm.weight"):
            tensors[name][::32] = 0
        elif "layers.1." in name and not name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name][:, ::32] *= 100
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    out = tmp_path / "scan"
    found = scan(prepare(model, "int4", settings(text, scan=True)), out, lambda *_: None)
    assert [one.layer for one in found.worst()] == [1]
    assert advice(found).endswith("--keep layers.1")
    stored = json.loads((out / JSON).read_text())
    assert [layer["layer"] for layer in stored["layers"]] == [0, 1, 2]
    assert (out / SVG).read_text().startswith("<svg")
    assert "--keep layers.1" in (out / HTML).read_text()
    assert sorted(path.name for path in out.iterdir()) == sorted([JSON, SVG, HTML])


def test_a_scanned_layer_loses_what_it_loses_alone(model: Path, text: Path, tmp_path: Path) -> None:
    options = settings(text, method="gptq", scan=True)
    found = scan(prepare(model, "int4", options), tmp_path / "scan", lambda *_: None)
    alone = made(
        model, tmp_path / "alone", "int4", settings(text, method="gptq", keep=("layers.0", "layers.2"))
    )
    assert alone.losses is not None
    assert found.layers[1].losses.mean_kl == pytest.approx(alone.losses.mean_kl, rel=1e-4)
