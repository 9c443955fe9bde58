"""Scaling and rotation change no output of an unquantized model, and lose less where channels stand out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ridgeline.lab.errors import BadInput
from ridgeline.lab.quantize.checkpoint import Checkpoint
from ridgeline.lab.quantize.driver import prepare, quantize
from ridgeline.lab.quantize.forward import Forward, Stream
from ridgeline.lab.quantize.inputs import Statistics
from ridgeline.lab.quantize.methods.awq import scale_by_activations
from ridgeline.lab.quantize.methods.hadamard import Rotation
from ridgeline.lab.quantize.methods.scalings import scalings_of
from ridgeline.lab.quantize.methods.smoothquant import smooth
from ridgeline.lab.quantize.options import QuantizeOptions
from ridgeline.models.decoders.reference import Decoder, allocate_kv
from ridgeline.models.quantized.format import int4_format
from ridgeline.models.weights.torch_weights import load_weights
from ridgeline.ops.backend import select_backend
from ridgeline.ops.inputs import InputRow, StepInputs
from tests.lab.quantize.tiny_models import save_text, save_tiny

LENGTH = 24
FAMILIES = (
    *("llama", "llama-tied-biased", "qwen2", "qwen3", "gemma3", "phi3", "olmo2", "granite", "cohere"),
    *("starcoder2", "gpt-neox", "gpt2", "internlm2", "mixtral", "qwen2-moe-published"),
)
ROTATED = ("llama", "llama-tied-biased", "qwen2", "qwen3", "phi3", "granite", "internlm2")


def tokens_of(checkpoint: Checkpoint, samples: int = 3) -> np.ndarray:
    random = np.random.default_rng(0)
    return random.integers(3, checkpoint.spec.vocab_size, (samples, LENGTH))


def folded_logits(checkpoint: Checkpoint, folder: Path, method: str) -> torch.Tensor:
    """Logits of the unquantized model after a fold of every layer; "": as it is."""
    forward, tokens = Forward(checkpoint, LENGTH), tokens_of(checkpoint)
    top = checkpoint.read(None)
    rotation = Rotation(checkpoint, seed=1) if method == "hadamard" else None
    if rotation is not None:
        rotation.fold_top(top)
    stream = forward.embed(tokens, folder / f"{method}-0.npy", top)
    changed = 0
    for number in range(checkpoint.layers):
        tensors = checkpoint.read(number)
        statistics = Statistics(with_gram=True)
        if rotation is not None:
            rotation.fold_layer(number, tensors)
        elif method:
            forward.advance(number, tensors, stream, observe=statistics.observe)
            before = {name: tensor.clone() for name, tensor in tensors.items()}
            scalings = scalings_of(checkpoint, number)
            if method == "awq":
                scale_by_activations(scalings, tensors, statistics, int4_format(8), checkpoint.is_matrix)
            else:
                smooth(scalings, tensors, statistics, 0.5)
            changed += sum(not torch.equal(before[name], tensors[name]) for name in before)
        following = forward.advance(number, tensors, stream, path=folder / f"{method}-{number + 1}.npy")
        assert following is not None
        stream = following
    assert changed or method not in ("awq", "smoothquant"), "nothing was scaled: the test shows nothing"
    return forward.logits(top, stream.get(slice(None)))


@pytest.mark.parametrize("name", FAMILIES)
def test_folds_change_no_output(name: str, tmp_path: Path) -> None:
    """Layer by layer computes what the decoder computes, as it is and after every fold that fits."""
    checkpoint = Checkpoint(save_tiny(name, tmp_path))
    spec, tokens = checkpoint.spec, tokens_of(checkpoint)
    decoder = Decoder(spec, load_weights(tmp_path, spec, torch.float32), select_backend("torch"), LENGTH)
    rows = [InputRow(ids, 0, [2 * at, 2 * at + 1], 0) for at, ids in enumerate(tokens.tolist())]
    with torch.inference_mode():
        kv = allocate_kv(spec, 2 * len(rows), 16, torch.float32)
        expected = decoder.forward(StepInputs.from_rows(rows, 16), kv)
    smoothed = ("smoothquant",) if name != "olmo2" else ()  # it has no norm before its parts
    for method in ("", "awq", *smoothed, *(("hadamard",) if name in ROTATED else ())):
        off = folded_logits(checkpoint, tmp_path, method) - expected
        assert float(off.abs().max()) < 1e-4 * float(expected.abs().max()), method


@pytest.mark.parametrize(
    ("name", "reason"), [("gemma3", "norms after"), ("olmo2", "norms after"), ("starcoder2", "not RMSNorm")]
)
def test_a_model_that_a_rotation_would_change_is_refused(name: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=reason):
        Rotation(Checkpoint(save_tiny(name, tmp_path)), seed=0)


def test_outliers_cost_less_after_each_fold(tmp_path: Path) -> None:
    """A model whose norms make channels that are 30 times as large as others."""
    model = save_tiny("llama", tmp_path / "model", outliers=True)
    text = save_text(tmp_path / "text.txt", 131, 40 * LENGTH)

    def error(to: str, method: str) -> float:
        options = QuantizeOptions(
            method=method, calibration=str(text), group=32, length=LENGTH, samples=32, seed=1
        )
        out = tmp_path / f"{to}-{method}"
        found = quantize(prepare(model, to, options), out, lambda *_: None)
        return sum(record.output_error or 0.0 for record in found.records)

    assert error("int8", "smoothquant") < 0.5 * error("int8", "rtn")
    nearest = error("int4", "rtn")
    assert error("int4", "awq") < 0.8 * nearest
    assert error("int4", "gptq") < 0.8 * nearest
    assert error("int4", "hadamard") < 0.8 * nearest


def test_a_stream_returns_what_was_put(tmp_path: Path) -> None:
    stream = Stream(tmp_path / "s.npy", (3, 2, 5))
    states = torch.arange(30.0).view(6, 5)
    stream.put(slice(0, 3), states)
    stream.flush()
    assert torch.equal(Stream(tmp_path / "s.npy").get(slice(1, 3)), states[2:])
