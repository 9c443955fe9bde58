"""`quantize`: a checkpoint becomes a quantized one, a layer at a time.

Two streams of hidden states run through the layers: that of the quantized model, whose inputs the methods
learn from, and on held-out text also that of the original, which the loss is measured against. After each
layer its part of the checkpoint and the streams are on disk, and the journal says so: a killed run continues
at its first unfinished layer, with the same bytes as a run that was not killed.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ridgeline.lab.errors import LabError
from ridgeline.lab.evaluate.statistics.divergence import Divergence
from ridgeline.lab.quantize.calibration import Calibration, read_calibration
from ridgeline.lab.quantize.checkpoint import Checkpoint, Tensors
from ridgeline.lab.quantize.forward import Forward, Stream
from ridgeline.lab.quantize.inputs import Statistics
from ridgeline.lab.quantize.journal import Journal, LayerRecord, run_settings
from ridgeline.lab.quantize.keep import KeepPolicy
from ridgeline.lab.quantize.layer_quantizer import LayerQuantizer, QuantizedLayer
from ridgeline.lab.quantize.losses import Losses
from ridgeline.lab.quantize.methods.hadamard import Rotation
from ridgeline.lab.quantize.options import QuantizeOptions
from ridgeline.lab.quantize.targets import target_format
from ridgeline.lab.quantize.tensor_types import as_stored, to_stored
from ridgeline.lab.quantize.writer import CompressedWriter, Writer
from ridgeline.models.quantized.format import QuantFormat
from ridgeline.models.text.tokenizer import Tokenizer

OnProgress = Callable[[str, int, int], None]  # (what, done, total)
LAYERS = "layers"
FITTED, HELD, ORIGINAL = "fitted", "held", "original"  # streams


@dataclass(frozen=True, slots=True)
class Job:
    """The parts that every run is made of; made by `prepare`."""

    checkpoint: Checkpoint
    to: str
    format: QuantFormat
    options: QuantizeOptions
    keep: KeepPolicy
    quantizer: LayerQuantizer
    calibration: Calibration | None
    forward: Forward | None


@dataclass(frozen=True, slots=True)
class Quantized:
    """A finished run."""

    job: Job
    out: Path
    journal: Journal
    losses: Divergence | None
    stored_bytes: int  # of the weights before
    written_bytes: int
    resumed_at: int  # the layer that this process began with

    @property
    def records(self) -> list[LayerRecord]:
        return self.journal.records


def prepare(model: Path, to: str, options: QuantizeOptions) -> Job:
    """Reads and checks everything that can be wrong before any work starts."""
    checkpoint = Checkpoint(model)
    format = target_format(to, options)
    keep = KeepPolicy(checkpoint, options.keep, format)
    calibration = forward = None
    if options.calibration:
        length = min(options.length, checkpoint.spec.max_context)
        path = Path(options.calibration).expanduser()
        held_out = Path(options.held_out).expanduser() if options.held_out else None
        calibration = read_calibration(path, Tokenizer.load(model), options.samples, length, held_out)
        forward = Forward(checkpoint, calibration.length)
    quantizer = LayerQuantizer(checkpoint, format, options, keep)
    return Job(checkpoint, to, format, options, keep, quantizer, calibration, forward)


def quantize(job: Job, out: Path, on_progress: OnProgress) -> Quantized:
    checkpoint = job.checkpoint
    rotation = Rotation(checkpoint, job.options.seed) if job.options.rotates else None
    journal = Journal(out, run_settings(checkpoint, job.to, job.options, job.calibration))
    writer: Writer = CompressedWriter(out, checkpoint, job.format)
    try:
        return _run(job, out, journal, writer, rotation, on_progress)
    except BaseException:
        journal.close()
        raise


def close(found: Quantized) -> None:
    """Removes the state of the run, after its report has been written."""
    found.journal.remove()


def _run(
    job: Job, out: Path, journal: Journal, writer: Writer, rotation: Rotation | None, on_progress: OnProgress
) -> Quantized:
    checkpoint, first = job.checkpoint, journal.layers
    _require_space(job, out, journal)
    run = _Run(job, journal, writer, rotation)
    if not first:
        run.begin()
    on_progress(LAYERS, first, checkpoint.layers)
    for number in range(first, checkpoint.layers):
        run.layer(number)
        on_progress(LAYERS, number + 1, checkpoint.layers)
    losses = run.finish()
    written = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    return Quantized(job, out, journal, losses, checkpoint.stored_bytes(), written, first)


class _Run:
    def __init__(self, job: Job, journal: Journal, writer: Writer, rotation: Rotation | None) -> None:
        self._job, self._journal, self._writer, self._rotation = job, journal, writer, rotation
        self._checkpoint = job.checkpoint

    def begin(self) -> None:
        """The streams before the first layer."""
        text, forward, stream = self._job.calibration, self._job.forward, self._journal.stream
        if text is None or forward is None:
            return
        original = self._checkpoint.read(None)
        forward.embed(text.held_out, stream(ORIGINAL, 0), original)
        changed = self._top(original)
        if self._job.quantizer.needs_inputs:
            forward.embed(text.fitted, stream(FITTED, 0), changed)
        forward.embed(text.held_out, stream(HELD, 0), changed)

    def layer(self, number: int) -> None:
        began = time.monotonic()
        tensors = self._checkpoint.read(number)
        self._advance_original(number, tensors)
        if self._rotation is not None:
            self._rotation.fold_layer(number, tensors)
        statistics = self._observed(number, tensors)
        exact = self._held(number, tensors, "exact")
        layer = self._job.quantizer.quantize(number, tensors, statistics)
        self._write(number, layer)
        output_error, stream_error = self._advance(number, layer, exact)
        module = self._checkpoint.module
        self._journal.finish_layer(
            LayerRecord(
                number,
                time.monotonic() - began,
                output_error,
                stream_error,
                {module(name): error for name, error in layer.errors.items()},
                [module(name) for name in layer.unseen],
            )
        )

    def finish(self) -> Divergence | None:
        """The tensors outside of layers, the loss, and the files beside the weights."""
        checkpoint = self._checkpoint
        original = checkpoint.read(None)
        changed = self._top(dict(original))
        losses = self._losses(original, changed)
        kept = {
            name: to_stored(changed[name], checkpoint.stored(name), where=name)
            for name in checkpoint.names(None)
        }
        if "lm_head" in changed:
            (embed,) = checkpoint.find(None, "embed")
            name = checkpoint.head
            kept[name] = to_stored(changed["lm_head"], checkpoint.stored(embed.name), where=name)
        others = checkpoint.others()
        self._writer.write(checkpoint.layers, {}, {**others, **kept})
        unread = [checkpoint.module(name) for name, tensor in others.items() if len(tensor.shape) > 1]
        self._writer.finish([*self._job.keep.kept_modules, *sorted(unread)], untied="lm_head" in changed)
        return losses

    # ---- streams ----

    def _top(self, tensors: Tensors) -> Tensors:
        """The tensors outside of layers as the new checkpoint has them."""
        if self._rotation is None:
            return tensors
        changed = {name: tensor.clone() for name, tensor in tensors.items()}
        self._rotation.fold_top(changed)
        (embed,) = self._checkpoint.find(None, "embed")
        of_head = self._checkpoint.stored(embed.name).dtype
        return {
            name: as_stored(tensor, of_head if name == "lm_head" else self._checkpoint.stored(name).dtype)
            for name, tensor in changed.items()
        }

    def _advance_original(self, number: int, tensors: Tensors) -> None:
        if self._job.forward is not None:
            stream = self._journal.stream
            before = Stream(stream(ORIGINAL, number))
            self._job.forward.advance(number, tensors, before, path=stream(ORIGINAL, number + 1))

    def _observed(self, number: int, tensors: Tensors) -> Statistics:
        statistics = Statistics(self._job.quantizer.needs_gram)
        names, is_quantized = self._checkpoint.names(number), self._job.keep.is_quantized
        # SmoothQuant also scales layers that stay in 16 bits.
        learns = self._job.options.scaling == "smoothquant" or any(map(is_quantized, names))
        if self._job.forward is not None and self._job.quantizer.needs_inputs and learns:
            before = Stream(self._journal.stream(FITTED, number))
            self._job.forward.advance(number, tensors, before, observe=statistics.observe)
        return statistics

    def _held(self, number: int, tensors: Tensors, name: str) -> Stream | None:
        """Held-out text through this layer, unquantized, after layers that are."""
        if self._job.forward is None:
            return None
        before = Stream(self._journal.stream(HELD, number))
        return self._job.forward.advance(number, tensors, before, path=self._journal.stream(name, number))

    def _advance(
        self, number: int, layer: QuantizedLayer, exact: Stream | None
    ) -> tuple[float | None, float | None]:
        """Moves the quantized model's streams. Returns the layer's error and that of the held-out stream."""
        forward, stream, quantizer = self._job.forward, self._journal.stream, self._job.quantizer
        if forward is None or exact is None:
            return None, None
        rounded = quantizer.rounded_inputs(number)
        before, original = Stream(stream(HELD, number)), Stream(stream(ORIGINAL, number + 1))
        own, whole = _Share(), _Share()

        def compare(batch: slice, found: Tensor) -> None:
            wanted = exact.get(batch)
            own.add(found - wanted, wanted - before.get(batch))
            aimed = original.get(batch)
            if self._rotation is not None:
                aimed = aimed @ self._rotation.stream
            whole.add(found - aimed, aimed)

        for name, output in ((HELD, compare), (FITTED, None)):
            if name == FITTED and not quantizer.needs_inputs:
                continue
            forward.advance(
                number,
                layer.values,
                Stream(stream(name, number)),
                path=stream(name, number + 1),
                rounded=rounded,
                format=self._job.format,
                output=output,
            )
        return own.value, whole.value

    def _losses(self, original: Tensors, changed: Tensors) -> Divergence | None:
        text, forward, layers = self._job.calibration, self._job.forward, self._checkpoint.layers
        if text is None or forward is None:
            return None
        states, others = (Stream(self._journal.stream(name, layers)) for name in (ORIGINAL, HELD))
        losses = Losses()
        for number, tokens in enumerate(text.held_out):
            one = slice(number, number + 1)
            losses.add(
                tokens,
                lambda x: forward.logits(original, x),
                states.get(one),
                lambda x: forward.logits(changed, x),
                others.get(one),
            )
        return losses.summary()

    def _write(self, number: int, layer: QuantizedLayer) -> None:
        checkpoint = self._checkpoint
        kept = {
            name: to_stored(
                layer.values[name],
                checkpoint.stored(name),
                transposed=checkpoint.is_transposed(name),
                where=name,
            )
            for name in checkpoint.names(number)
            if name not in layer.matrices
        }
        self._writer.write(number, layer.matrices, kept)


class _Share:
    """Σ off² / Σ whole², over batches."""

    def __init__(self) -> None:
        self._off = self._whole = 0.0

    def add(self, off: Tensor, whole: Tensor) -> None:
        self._off += float(off.square().sum(dtype=torch.float64))
        self._whole += float(whole.square().sum(dtype=torch.float64))

    @property
    def value(self) -> float:
        return self._off / self._whole if self._whole else 0.0


def _require_space(job: Job, out: Path, journal: Journal) -> None:
    """LabError if the disk has no room for the parts that are missing and two copies of the streams."""
    checkpoint, format = job.checkpoint, job.format
    needed = 0
    for layer in (None, *range(journal.layers, checkpoint.layers)):
        for name in checkpoint.names(layer):
            stored = checkpoint.stored(name)
            weights = stored.data.nbytes
            if job.keep.is_quantized(name):
                weights = round(math.prod(stored.shape) * format.bytes_per_weight())
            needed += weights
    if job.options.rotates and checkpoint.spec.tied_embeddings:
        needed += checkpoint.spec.vocab_size * checkpoint.spec.hidden_size * 4
    if job.calibration is not None:
        fitted = len(job.calibration.fitted) if job.quantizer.needs_inputs else 0
        samples = fitted + 3 * len(job.calibration.held_out)
        streams = 2 * samples * job.calibration.length * checkpoint.spec.hidden_size * 4
        needed += max(0, streams - journal.stream_bytes())
    free = shutil.disk_usage(out).free
    if needed > free:
        raise LabError(
            f"--out {out}: needs {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free; free some space or "
            "give a folder on another disk"
        )
