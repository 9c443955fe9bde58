"""What calibration text says of a GGUF file: the importances of columns before, the loss after.

Importances are the mean squares of each matrix's inputs in the original model. The loss is that of the file's
own values on text that was held out, in float32, as the report of a folder has it. Both are one pass a layer
at a time, with the hidden states in files.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ridgeline.lab.evaluate.statistics.divergence import Divergence
from ridgeline.lab.quantize.calibration import Calibration, read_calibration
from ridgeline.lab.quantize.checkpoint import Checkpoint, Tensors
from ridgeline.lab.quantize.forward import Forward
from ridgeline.lab.quantize.losses import Losses
from ridgeline.lab.quantize.options import QuantizeOptions
from ridgeline.models.files.gguf import GgufFile
from ridgeline.models.spec.ffn import Experts
from ridgeline.models.spec.readers.gguf_config import spec_from_gguf
from ridgeline.models.text.tokenizer import Tokenizer
from ridgeline.models.weights.checkpoint import checked_places
from ridgeline.models.weights.gguf_source import GgufSource

OnProgress = Callable[[str, int, int], None]  # (what, done, total)
Floats = np.ndarray[Any, np.dtype[np.float32]]
# A field of the decoder's layer, and the tensors of a GGUF file that read the same input.
_READERS = {
    "qkv": ("attn_q", "attn_k", "attn_v", "attn_qkv"),
    "o": ("attn_output",),
    "gate_up": ("ffn_gate", "ffn_up", "ffn_gate_shexp", "ffn_up_shexp"),
    "up": ("ffn_up",),
    "down": ("ffn_down", "ffn_down_shexp"),
    "experts_gate_up": ("ffn_gate_exps", "ffn_up_exps"),
    "experts_down": ("ffn_down_exps",),
}


@dataclass(frozen=True, slots=True)
class ModelText:
    """The original model and its text, in samples."""

    checkpoint: Checkpoint
    text: Calibration
    forward: Forward


def read_text(model: Path, options: QuantizeOptions) -> ModelText:
    assert options.calibration is not None
    checkpoint = Checkpoint(model)
    length = min(options.length, checkpoint.spec.max_context)
    path = Path(options.calibration).expanduser()
    held_out = Path(options.held_out).expanduser() if options.held_out else None
    text = read_calibration(path, Tokenizer.load(model), options.samples, length, held_out)
    return ModelText(checkpoint, text, Forward(checkpoint, text.length))


def importances(model: ModelText, folder: Path, on_progress: OnProgress) -> dict[str, Floats]:
    """By the names of the GGUF file's tensors. folder: for the hidden states."""
    checkpoint, forward = model.checkpoint, model.forward
    found: dict[str, Floats] = {}
    with tempfile.TemporaryDirectory(dir=folder) as states:
        stream = forward.embed(model.text.fitted, Path(states) / "0.npy", checkpoint.read(None))
        for number in range(checkpoint.layers):
            squares = _Squares()
            following = forward.advance(
                number,
                checkpoint.read(number),
                stream,
                path=Path(states) / f"{number + 1}.npy",
                observe=squares.observe,
            )
            assert following is not None
            stream.path.unlink()
            stream = following
            ffn = checkpoint.spec.layers[number].ffn
            found |= squares.by_tensor(number, ffn.num if isinstance(ffn, Experts) else 0)
            on_progress("importances", number + 1, checkpoint.layers)
    return found


def loss_of_file(model: ModelText, file: Path, folder: Path, on_progress: OnProgress) -> Divergence:
    """Of the values in a GGUF file of this model, on the held-out text."""
    checkpoint, forward, text = model.checkpoint, model.forward, model.text
    spec = spec_from_gguf(GgufFile(file))
    source = GgufSource(file, spec)
    places = checked_places(source, spec, file)

    def written(original: Tensors) -> Tensors:
        """The file's matrices. Vectors are the original's: GGUF has them in float32."""
        return {
            name: checkpoint.read_from(source, places, name) if tensor.ndim > 1 else tensor
            for name, tensor in original.items()
        }

    with tempfile.TemporaryDirectory(dir=folder) as states:

        def path(name: str, layer: int) -> Path:
            return Path(states) / f"{name}-{layer}.npy"

        top = checkpoint.read(None)
        new_top = written(top)
        streams = [
            forward.embed(text.held_out, path("original", 0), top),
            forward.embed(text.held_out, path("written", 0), new_top),
        ]
        for number in range(checkpoint.layers):
            tensors = checkpoint.read(number)
            for index, (name, values) in enumerate((("original", tensors), ("written", written(tensors)))):
                following = forward.advance(number, values, streams[index], path=path(name, number + 1))
                assert following is not None
                streams[index].path.unlink()
                streams[index] = following
            source.drop_pages()
            on_progress("loss", number + 1, checkpoint.layers)
        losses = Losses()
        for number, tokens in enumerate(text.held_out):
            one = slice(number, number + 1)
            losses.add(
                tokens,
                lambda x: forward.logits(top, x),
                streams[0].get(one),
                lambda x: forward.logits(new_top, x),
                streams[1].get(one),
            )
        return losses.summary()


class _Squares:
    """Σ x² and the number of inputs, by field and expert."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, int | None], tuple[Floats, int]] = {}

    def observe(self, key: tuple[str, int | None], x: Tensor) -> None:
        if not len(x):
            return
        before, count = self._sums.get(key, (np.zeros(x.shape[1], np.float32), 0))
        self._sums[key] = before + x.square().sum(0).numpy(), count + len(x)

    def by_tensor(self, layer: int, experts: int) -> dict[str, Floats]:
        """A stack has a row for each expert; one that no token reached has the mean of the others."""
        means: dict[str, dict[int | None, Floats]] = {}
        for (field, expert), (squares, count) in self._sums.items():
            means.setdefault(field, {})[expert] = squares / np.float32(count)
        found = {}
        for field, of_experts in means.items():
            values = of_experts[None] if None in of_experts else _stacked(of_experts, experts)
            for stem in _READERS.get(field, ()):
                found[f"blk.{layer}.{stem}.weight"] = values
        return found


def _stacked(of_experts: dict[int | None, Floats], experts: int) -> Floats:
    mean = np.mean(list(of_experts.values()), axis=0, dtype=np.float32)
    stack: Floats = np.stack([of_experts.get(number, mean) for number in range(experts)])
    return stack
