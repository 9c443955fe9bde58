"""`--to q4_k_m` and the like: one GGUF file, with a report in its metadata.

The writer is `models.gguf_output`. With text, the columns have importances, and the file's loss on held-out
text is measured before it gets its name. Imports torch for that only. An interrupted run starts over.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ridgeline import __version__
from ridgeline.lab.errors import BadInput
from ridgeline.lab.quantize.options import QuantizeOptions
from ridgeline.models.files.checkpoint_files import weights_file
from ridgeline.models.files.gguf_writer import Value
from ridgeline.models.gguf_output.recipes import FLOAT_TYPES, find_recipe
from ridgeline.models.gguf_output.write import GgufReport, write_gguf

if TYPE_CHECKING:
    from ridgeline.lab.evaluate.statistics.divergence import Divergence
    from ridgeline.lab.quantize.gguf_text import ModelText

OnProgress = Callable[[str, int, int], None]  # (what, done, total)
SUFFIX = ".gguf"
LOSS = "quantize.loss."


@dataclass(frozen=True, slots=True)
class QuantizedGguf:
    """losses: on held-out text; None without text."""

    written: GgufReport
    losses: Divergence | None
    versions: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        import msgspec

        losses = None if self.losses is None else msgspec.structs.asdict(self.losses)
        flips = None if self.losses is None else 1 - self.losses.same_top
        return {**asdict(self.written), "losses": losses, "flips": flips, "versions": self.versions}


def quantize_to_gguf(
    model: Path, to: str, out: Path, options: QuantizeOptions, on_progress: OnProgress
) -> QuantizedGguf:
    """Write `out`: a .gguf file, or a folder for MODEL-TO.gguf."""
    refuse_other_options(to, options)
    if out.suffix != SUFFIX:
        out.mkdir(parents=True, exist_ok=True)
        out = out / f"{_name(model)}-{to}{SUFFIX}"
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.exists():
        raise BadInput(f"--out {out}: is there already; choose another name")
    versions = {"ridgeline": __version__, "python": platform.python_version()}
    facts: dict[str, Value] = {"quantize.keep": list(options.keep)} if options.keep else {}
    text = _read_text(model, options)
    importance = {}
    measured: list[Divergence] = []
    if text is not None:
        import torch

        from ridgeline.lab.quantize.gguf_text import importances, loss_of_file

        versions["torch"] = str(torch.__version__)
        facts |= {
            "quantize.held_out.file": text.text.held_out_source,
            "quantize.held_out.tokens": int(text.text.held_out.size),
            **_loss_facts(None),
        }
        if find_recipe(to).type not in (*FLOAT_TYPES, "Q8_0"):  # these round to nearest and learn nothing
            importance = importances(text, out.parent, on_progress)
            facts |= {
                "quantize.calibration.file": text.text.source,
                "quantize.calibration.sha256": text.text.sha256,
                "quantize.calibration.tokens": int(text.text.fitted.size),
            }

    def measure(file: Path) -> Mapping[str, Value]:
        assert text is not None
        measured.append(loss_of_file(text, file, out.parent, on_progress))
        return _loss_facts(measured[0])

    report = write_gguf(
        model,
        to,
        out,
        lambda done, total: on_progress("weights", done, total),
        importance=importance,
        requantize=options.requantize,
        keep=options.keep,
        facts=facts | {f"quantize.versions.{name}": version for name, version in versions.items()},
        measure=None if text is None else measure,
    )
    return QuantizedGguf(report, measured[0] if measured else None, versions)


def refuse_other_options(to: str, options: QuantizeOptions) -> None:
    """BadInput for options that a GGUF file has no use for."""
    defaults = QuantizeOptions()
    for name in ("method", "group", "zero_points", "scan"):
        if getattr(options, name) != getattr(defaults, name):
            flag = name.replace("_", "-")
            raise BadInput(
                f"--{flag} is for compressed-tensors formats; --to {to} writes a GGUF file, whose types and "
                "groups are fixed: leave it out"
            )


def report_text(found: QuantizedGguf) -> str:
    report = found.written
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
    if (lost := found.losses) is not None:
        from ridgeline.lab.quantize.report import loss_text

        lines.append(loss_text(lost))
    return "\n".join([*lines, f"ridgeline serve {report.path}"])


def _name(model: Path) -> str:
    return model.stem if model.suffix == SUFFIX else model.name


def _read_text(model: Path, options: QuantizeOptions) -> ModelText | None:
    if not options.calibration:
        return None
    if weights_file(model).suffix == SUFFIX:
        raise BadInput(
            f"{model}: is a GGUF file; --calibration needs the folder with 16-bit .safetensors, which the "
            "model computes with"
        )
    from ridgeline.lab.quantize.gguf_text import read_text

    return read_text(model, options)


def _loss_facts(lost: Divergence | None) -> dict[str, Value]:
    """None: zeros, until the file is complete."""
    values: dict[str, float] = dict.fromkeys(
        ("kl", "kl_low", "kl_high", "kl_p99", "flips", "perplexity_before", "perplexity"), 0.0
    )
    if lost is not None:
        values = {
            "kl": lost.mean_kl,
            "kl_low": lost.kl_low,
            "kl_high": lost.kl_high,
            "kl_p99": lost.kl_p99,
            "flips": 1 - lost.same_top,
            "perplexity_before": lost.reference_ppl,
            "perplexity": lost.reference_ppl + lost.delta_ppl,
        }
    positions: Value = 0 if lost is None else lost.positions
    return {f"{LOSS}positions": positions, **{f"{LOSS}{name}": value for name, value in values.items()}}
