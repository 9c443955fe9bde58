"""The report inside a quantized checkpoint: report.json for programs, report.html for readers.

Says what was lost on held-out text, how the checkpoint was made, and with which versions.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import msgspec
import torch

from ridgeline import __version__
from ridgeline.lab.charts import Axis, Bars, chart
from ridgeline.lab.evaluate.statistics.divergence import Divergence
from ridgeline.lab.page import charts, facts, heading, notes, page, table, tiles
from ridgeline.lab.quantize.driver import Quantized
from ridgeline.lab.quantize.journal import LayerRecord

JSON, HTML = "report.json", "report.html"


class Report(msgspec.Struct, frozen=True):
    """losses: of the quantized model against the original on held-out text; null without calibration text.
    flips: the share of positions whose most likely token changed. seconds: of all layers, earlier parts of an
    interrupted run included."""

    model: str
    to: str
    format: str
    method: str
    options: dict[str, Any]
    kept: list[str]
    stored_bytes: int
    written_bytes: int
    losses: Divergence | None
    flips: float | None
    calibration: dict[str, Any] | None
    versions: dict[str, str]
    seconds: float
    layers: list[LayerRecord]
    notes: list[str]


def make_report(found: Quantized) -> Report:
    job, losses = found.job, found.losses
    options = job.options
    used: dict[str, Any] = {"group": job.format.group[1]} if job.format.granularity == "group" else {}
    if options.rounding == "gptq":
        used |= {"damping": options.damping, "act_order": options.act_order}
    if options.scaling == "smoothquant":
        used["alpha"] = options.alpha
    if options.rotates:
        used["seed"] = options.seed
    return Report(
        model=job.checkpoint.spec.name,
        to=job.to,
        format=str(job.format),
        method=options.method,
        options=used,
        kept=job.keep.kept_modules,
        stored_bytes=found.stored_bytes,
        written_bytes=found.written_bytes,
        losses=losses,
        flips=None if losses is None else 1 - losses.same_top,
        calibration=_calibration(found),
        versions={
            "ridgeline": __version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        seconds=sum(record.seconds for record in found.records),
        layers=found.records,
        notes=_notes(found),
    )


def write_report(report: Report, folder: Path) -> None:
    (folder / JSON).write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2))
    (folder / HTML).write_text(report_page(report), encoding="utf-8")


def _calibration(found: Quantized) -> dict[str, Any] | None:
    text = found.job.calibration
    if text is None:
        return None
    return {
        "source": text.source,
        "held_out_source": text.held_out_source,
        "sha256": text.sha256,
        "samples": len(text.fitted),
        "held_out_samples": len(text.held_out),
        "length": text.length,
    }


def _notes(found: Quantized) -> list[str]:
    job = found.job
    said = []
    if found.losses is None:
        said.append("The loss was not measured: no --calibration text was given.")
    if job.options.rotates and job.checkpoint.spec.tied_embeddings:
        said.append("The head is stored apart from the embeddings: the rotation makes them differ.")
    if job.format.activations:
        said.append(
            f"The loss counts inputs rounded to {job.format.activations.name}, as the format says. Backends "
            "that keep inputs in 16 bits lose less."
        )
    unseen = [name for record in found.records for name in record.unseen]
    if unseen:
        said.append(
            f"{len(unseen)} matrices saw no calibration token and were rounded to nearest: "
            + ", ".join(unseen[:3])
            + (", …" if len(unseen) > 3 else "")
        )
    return said


def report_text(report: Report, folder: Path) -> str:
    """A few lines for a terminal."""
    lines = [
        f"{report.model} in {report.format}, by {report.method}: "
        f"{report.stored_bytes / 1e6:.1f} MB → {report.written_bytes / 1e6:.1f} MB"
    ]
    if report.losses is not None:
        lines.append(loss_text(report.losses))
    lines += report.notes
    lines.append(f"report: {folder / HTML}; serve it: ridgeline serve {folder}")
    return "\n".join(lines)


def loss_text(lost: Divergence) -> str:
    return (
        f"held-out text: KL {lost.mean_kl:.5f} ± {lost.kl_high - lost.mean_kl:.5f} nats, top-1 flips "
        f"{100 * (1 - lost.same_top):.2f} %, perplexity {lost.reference_ppl:.3f} → "
        f"{lost.reference_ppl + lost.delta_ppl:.3f} ({lost.positions} positions)"
    )


def report_page(report: Report) -> str:
    parts = []
    if report.losses is not None and report.flips is not None:
        lost = report.losses
        parts.append(
            tiles(
                [
                    (f"{lost.mean_kl:.5f}", "KL, nats per token", "mean over held-out positions"),
                    (f"{100 * report.flips:.2f} %", "top-1 flips", "the most likely token changed"),
                    (f"{lost.ppl_ratio:.4f} ×", "perplexity", "quantized / original"),
                    (f"{report.written_bytes / report.stored_bytes:.2f} ×", "size", "of the weights' files"),
                ]
            )
        )
    parts.append(notes(report.notes))
    parts.append(heading("How it was made"))
    made = {
        **{name: getattr(report, name) for name in ("to", "format", "method", "options", "kept")},
        "calibration": report.calibration or "none",
        "versions": report.versions,
        "seconds": round(report.seconds, 1),
        "bytes": {"before": report.stored_bytes, "after": report.written_bytes},
    }
    parts.append(facts(made))
    if report.losses is not None:
        parts.append(heading("Loss on held-out text"))
        parts.append(facts(msgspec.structs.asdict(report.losses)))
        parts.append(heading("Layers", "The error of each layer's own contribution, with the inputs it got."))
        parts.append(charts([_picture(report)], wide=True))
        rows = [
            [str(one.layer), _share(one.output_error), _share(one.stream_error), f"{one.seconds:.1f}"]
            for one in report.layers
        ]
        parts.append(table(["layer", "its own error", "error of the stream after it", "seconds"], rows))
    return page(f"{report.model} in {report.to}", parts, subtitle=report.method)


def _picture(report: Report) -> str:
    edges = [number - 0.5 for number in range(len(report.layers) + 1)]
    heights = [one.output_error or 0.0 for one in report.layers]
    y = Axis("Σ error² / Σ output²", low=0.0)
    return chart("Error of each layer's output", Axis("layer"), y, [Bars("error", edges, heights)])


def _share(error: float | None) -> str:
    return "" if error is None else f"{error:.3e}"
