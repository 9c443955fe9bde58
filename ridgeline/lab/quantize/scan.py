"""The sensitivity scan: what each layer costs when it alone is quantized, as KL divergence of the output.

Every layer is read once. Behind layer n run the original model and n variants, one for each earlier layer
that was quantized alone; their hidden states are in files. Writes scan.json and pictures, no weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
from torch import Tensor

from ridgeline.lab.charts import Axis, Bars, chart
from ridgeline.lab.errors import BadInput
from ridgeline.lab.evaluate.statistics.divergence import Divergence
from ridgeline.lab.page import charts, page, paragraph, table
from ridgeline.lab.quantize.checkpoint import Tensors
from ridgeline.lab.quantize.driver import LAYERS, Job, OnProgress
from ridgeline.lab.quantize.forward import Stream
from ridgeline.lab.quantize.inputs import Key, Statistics
from ridgeline.lab.quantize.losses import Losses

JSON, SVG, HTML = "scan.json", "scan.svg", "scan.html"
NAMED = 3  # layers that the text names
OUTLIER = 2.0  # times the median


class LayerLoss(msgspec.Struct, frozen=True):
    """One layer quantized alone. matrices: output errors on calibration text, by module."""

    layer: int
    losses: Divergence
    matrices: dict[str, float] = {}


class Scan(msgspec.Struct, frozen=True):
    model: str
    to: str
    method: str
    calibration: str
    positions: int
    layers: list[LayerLoss]

    def worst(self) -> list[LayerLoss]:
        """Layers that lose more than twice the median, the worst first; at most three."""
        ordered = sorted(self.layers, key=lambda one: -one.losses.mean_kl)
        median = ordered[len(ordered) // 2].losses.mean_kl
        return [one for one in ordered[:NAMED] if one.losses.mean_kl > OUTLIER * median]


def scan(job: Job, out: Path, on_progress: OnProgress) -> Scan:
    """Measures every layer and writes the files into `out`."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise BadInput(f"--out {out}: is not empty; give a new folder, or remove it first")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".scan-", dir=out) as folder:
        layers = _Scan(job, Path(folder)).run(on_progress)
    assert job.calibration is not None
    found = Scan(
        job.checkpoint.spec.name,
        job.to,
        job.options.method,
        job.calibration.source,
        layers[0].losses.positions,
        layers,
    )
    (out / JSON).write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2))
    (out / SVG).write_text(picture(found, standalone=True), encoding="utf-8")
    (out / HTML).write_text(scan_page(found), encoding="utf-8")
    return found


class _Scan:
    def __init__(self, job: Job, folder: Path) -> None:
        assert job.forward is not None
        assert job.calibration is not None
        self._job, self._forward, self._text = job, job.forward, job.calibration
        self._folder = folder
        self._files = 0

    def run(self, on_progress: OnProgress) -> list[LayerLoss]:
        job, forward, text = self._job, self._forward, self._text
        top = job.checkpoint.read(None)
        fitted = forward.embed(text.fitted, self._path(), top) if job.quantizer.needs_inputs else None
        original = forward.embed(text.held_out, self._path(), top)
        variants: list[Stream] = []
        errors: list[dict[str, float]] = []
        del top
        for number in range(job.checkpoint.layers):
            tensors = job.checkpoint.read(number)
            statistics = Statistics(job.quantizer.needs_gram)
            if fitted is not None:
                fitted = self._advanced(number, tensors, fitted, observe=statistics.observe)
            copies = {name: tensor.clone() for name, tensor in tensors.items()}
            layer = job.quantizer.quantize(number, copies, statistics)
            errors.append({job.checkpoint.module(name): error for name, error in layer.errors.items()})
            alone = forward.advance(
                number,
                layer.values,
                original,
                path=self._path(),
                rounded=job.quantizer.rounded_inputs(number),
                format=job.format,
            )
            assert alone is not None
            variants = [self._advanced(number, tensors, one) for one in variants] + [alone]
            original = self._advanced(number, tensors, original)
            on_progress(LAYERS, number + 1, job.checkpoint.layers)
        losses = self._losses(original, variants)
        return [LayerLoss(number, *found) for number, found in enumerate(zip(losses, errors, strict=True))]

    def _advanced(
        self,
        number: int,
        tensors: Tensors,
        stream: Stream,
        observe: Callable[[Key, Tensor], None] | None = None,
    ) -> Stream:
        """The stream after the layer; the file before it is removed."""
        following = self._forward.advance(number, tensors, stream, path=self._path(), observe=observe)
        assert following is not None
        stream.path.unlink()
        return following

    def _losses(self, original: Stream, variants: list[Stream]) -> list[Divergence]:
        top = self._job.checkpoint.read(None)
        found = []

        def head(x: Tensor) -> Tensor:
            return self._forward.logits(top, x)

        for variant in variants:
            losses = Losses()
            for number, tokens in enumerate(self._text.held_out):
                one = slice(number, number + 1)
                losses.add(tokens, head, original.get(one), head, variant.get(one))
            found.append(losses.summary())
        return found

    def _path(self) -> Path:
        self._files += 1
        return self._folder / f"{self._files}.npy"


def picture(found: Scan, *, standalone: bool = False) -> str:
    """A bar for each layer."""
    edges = [number - 0.5 for number in range(len(found.layers) + 1)]
    heights = [one.losses.mean_kl for one in found.layers]
    title = f"{found.model}: loss of each layer alone in {found.to} ({found.method})"
    y = Axis("mean KL divergence, nats per token", low=0.0, unit="nats")
    return chart(title, Axis("layer"), y, [Bars("KL", edges, heights)], standalone=standalone)


def advice(found: Scan) -> str:
    worst = found.worst()
    if not worst:
        return "No layer loses more than twice the median: nothing asks to be kept."
    flags = " ".join(f"--keep layers.{one.layer}" for one in worst)
    return f"Layers that lose more than twice the median: {flags}"


def scan_page(found: Scan) -> str:
    head = ["layer", "KL, nats", "± 95 %", "99 % quantile", "top-1 flips", "perplexity ×"]
    rows = [
        [
            str(one.layer),
            f"{one.losses.mean_kl:.6f}",
            f"{one.losses.kl_high - one.losses.mean_kl:.6f}",
            f"{one.losses.kl_p99:.5f}",
            f"{100 * (1 - one.losses.same_top):.2f} %",
            f"{one.losses.ppl_ratio:.4f}",
        ]
        for one in found.layers
    ]
    told = (
        f"Each layer alone is quantized, all others are original. {found.positions} positions of held-out "
        f"text from {found.calibration}."
    )
    parts = [
        paragraph(told),
        paragraph(advice(found)),
        charts([picture(found)], wide=True),
        table(head, rows),
    ]
    return page(f"Sensitivity of {found.model}", parts, subtitle=f"{found.to}, {found.method}")
