"""`--to q4_k_m` and the like: one GGUF file, with importances of columns from calibration text.

The writer is `models.gguf_output`. With text, one forward pass of the original model, a layer at a time,
gives the mean square of each matrix's inputs. Imports torch for that pass only.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ridgeline.lab.errors import BadInput
from ridgeline.lab.quantize.options import QuantizeOptions
from ridgeline.models.files.checkpoint_files import weights_file
from ridgeline.models.files.gguf_writer import Value
from ridgeline.models.gguf_output.recipes import FLOAT_TYPES, find_recipe
from ridgeline.models.gguf_output.write import GgufReport, write_gguf
from ridgeline.models.spec.ffn import Experts

if TYPE_CHECKING:
    from torch import Tensor

OnProgress = Callable[[str, int, int], None]  # (what, done, total)
Floats = np.ndarray[Any, np.dtype[np.float32]]
SUFFIX = ".gguf"
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


def quantize_to_gguf(
    model: Path, to: str, out: Path, options: QuantizeOptions, on_progress: OnProgress
) -> GgufReport:
    """Write `out`: a .gguf file, or a folder for MODEL-TO.gguf."""
    refuse_other_options(to, options)
    if out.suffix != SUFFIX:
        out.mkdir(parents=True, exist_ok=True)
        out = out / f"{_name(model)}-{to}{SUFFIX}"
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.exists():
        raise BadInput(f"--out {out}: is there already; choose another name")
    importance: dict[str, Floats] = {}
    facts: dict[str, Value] = {}
    if options.calibration:
        importance, facts = _importance(model, options, out.parent, on_progress)
    return write_gguf(
        model,
        to,
        out,
        lambda done, total: on_progress("weights", done, total),
        importance=importance,
        requantize=options.requantize,
        facts=facts,
    )


def refuse_other_options(to: str, options: QuantizeOptions) -> None:
    """BadInput for options that a GGUF file has no use for."""
    defaults = QuantizeOptions()
    for name in ("method", "group", "zero_points", "keep", "held_out", "scan"):
        if getattr(options, name) != getattr(defaults, name):
            flag = name.replace("_", "-")
            raise BadInput(
                f"--{flag} is for compressed-tensors formats; --to {to} writes a GGUF file, whose types and "
                "groups are fixed: leave it out"
            )
    if options.calibration and find_recipe(to).type in (*FLOAT_TYPES, "Q8_0"):
        raise BadInput(
            f"--calibration: --to {to} rounds to nearest and learns nothing from text: leave it out"
        )


def report_text(report: GgufReport) -> str:
    types = ", ".join(
        f"{count} {name}" for name, count in sorted(report.types.items(), key=lambda at: -at[1])
    )
    lines = [
        f"{report.path}: {report.nbytes / 1e6:,.1f} MB, {report.bits_per_weight:.2f} bits a weight ({types})"
    ]
    if report.errors:
        worst = max(report.errors, key=lambda name: report.errors[name])
        mean = float(np.mean(list(report.errors.values())))
        lines.append(
            f"error of the weights, relative rms: {mean:.4f} on average, "
            f"at most {report.errors[worst]:.4f} ({worst})"
        )
    return "\n".join([*lines, f"ridgeline serve {report.path}"])


def _name(model: Path) -> str:
    return model.stem if model.suffix == SUFFIX else model.name


def _importance(
    model: Path, options: QuantizeOptions, folder: Path, on_progress: OnProgress
) -> tuple[dict[str, Floats], dict[str, Value]]:
    """Mean squares of inputs by tensor, and what they were learned from, for the file's metadata."""
    if weights_file(model).suffix == SUFFIX:
        raise BadInput(
            f"{model}: is a GGUF file; --calibration needs the folder with 16-bit .safetensors, which the "
            "model computes with"
        )
    from ridgeline.lab.quantize.calibration import read_calibration
    from ridgeline.lab.quantize.checkpoint import Checkpoint
    from ridgeline.lab.quantize.forward import Forward
    from ridgeline.models.text.tokenizer import Tokenizer

    assert options.calibration is not None
    checkpoint = Checkpoint(model)
    length = min(options.length, checkpoint.spec.max_context)
    path = Path(options.calibration).expanduser()
    text = read_calibration(path, Tokenizer.load(model), options.samples, length)
    tokens = np.concatenate([text.fitted, text.held_out])
    forward = Forward(checkpoint, text.length)
    found: dict[str, Floats] = {}
    with tempfile.TemporaryDirectory(dir=folder) as states:
        stream = forward.embed(tokens, Path(states) / "0.npy", checkpoint.read(None))
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
    facts: dict[str, Value] = {
        "quantize.calibration.file": text.source,
        "quantize.calibration.sha256": text.sha256,
        "quantize.calibration.tokens": int(tokens.size),
    }
    return found, facts


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
