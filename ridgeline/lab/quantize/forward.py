"""Forward passes of single layers over samples of equal length, on hidden states kept in files.

A stream is the hidden states of all samples between two layers. The driver advances it through a layer at a
time, so that memory holds one layer and one batch. Computes in float32 with the torch reference decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ridgeline.lab.quantize.checkpoint import Checkpoint, Tensors
from ridgeline.lab.quantize.inputs import Key, ObservingOps
from ridgeline.models.decoders.reference_layers import Layer, Rotation, StepContext, build_norm
from ridgeline.models.files.reserve import reserve
from ridgeline.models.quantized.format import QuantFormat
from ridgeline.models.spec.rope import RopeSpec
from ridgeline.models.spec.rope_tables import rope_tables
from ridgeline.models.weights.torch_weights import LayerTensors
from ridgeline.ops import torch_backend
from ridgeline.ops.backend import Backend
from ridgeline.ops.inputs import InputRow, StepInputs

BATCH_TOKENS = 4096
BLOCK = 16

Ints = NDArray[np.int64]


class Stream:
    """Hidden states [samples, length, hidden] in a file."""

    def __init__(self, path: Path, shape: tuple[int, int, int] | None = None) -> None:
        """shape: of a new file; None: the file is there."""
        self.path = path
        mode = "r" if shape is None else "w+"
        self._states = np.lib.format.open_memmap(path, mode, None if shape is None else np.float32, shape)
        if shape is not None:
            with path.open("r+b") as file:
                reserve(file.fileno(), path.stat().st_size, path)

    @property
    def shape(self) -> tuple[int, int, int]:
        samples, length, hidden = self._states.shape
        return samples, length, hidden

    def batches(self) -> Iterator[slice]:
        samples, length, _ = self.shape
        step = max(1, BATCH_TOKENS // length)
        return (slice(at, min(at + step, samples)) for at in range(0, samples, step))

    def get(self, batch: slice) -> Tensor:
        """[tokens, hidden], copied: products may depend on how their inputs are aligned."""
        part = self._states[batch]
        out = torch.empty(part.shape)
        out.numpy()[:] = part
        return out.view(-1, part.shape[-1])

    def put(self, batch: slice, states: Tensor) -> None:
        self._states[batch] = states.view(self._states[batch].shape).numpy()

    def flush(self) -> None:
        self._states.flush()


class Forward:
    """The layers of one checkpoint's architecture, over samples of `length` tokens."""

    def __init__(self, checkpoint: Checkpoint, length: int) -> None:
        self._checkpoint = checkpoint
        self._spec = checkpoint.spec
        self._length = length
        self._ops = ObservingOps()
        self._backend = cast(Backend, self._ops)
        self._tables: dict[RopeSpec, Rotation] = {
            rope: (torch.from_numpy(cos), torch.from_numpy(sin))
            for rope, (cos, sin) in rope_tables(self._spec, length).items()
        }
        self._contexts: dict[int, tuple[StepContext, Tensor]] = {}

    def embed(self, tokens: Ints, path: Path, top: Tensors) -> Stream:
        """The stream before the first layer. top: the tensors outside of layers."""
        spec = self._spec
        named = {stored.piece.role: top[stored.name] for stored in self._checkpoint.find(None, *_TOP)}
        stream = Stream(path, (*tokens.shape, spec.hidden_size))
        for batch in stream.batches():
            ids = torch.from_numpy(tokens[batch]).view(-1)
            x = torch_backend.embed(ids, named["embed"], spec.embedding_scale)
            if "positions" in named:
                x = x + named["positions"][torch.arange(self._length).repeat(len(tokens[batch]))]
            stream.put(batch, x)
        stream.flush()
        return stream

    def advance(
        self,
        number: int,
        tensors: Tensors,
        stream: Stream,
        *,
        path: Path | None = None,
        observe: Callable[[Key, Tensor], None] | None = None,
        rounded: Collection[Key] = (),
        format: QuantFormat | None = None,
        output: Callable[[slice, Tensor], None] | None = None,
    ) -> Stream | None:
        """The stream after layer `number` with these tensors, in a new file at `path`.

        observe: sees the input of every matrix; rounded, format: inputs that are rounded; output: sees the
        layer's output batch by batch.
        """
        layer = self._checkpoint.layer_tensors(number, tensors)
        self._ops.watch(layer, observe, rounded, format)
        following = None if path is None else Stream(path, stream.shape)
        for batch in stream.batches():
            x = self._layer(number, layer, stream.get(batch))
            if output is not None:
                output(batch, x)
            if following is not None:
                following.put(batch, x)
        if following is not None:
            following.flush()
        return following

    def logits(self, top: Tensors, x: Tensor) -> Tensor:
        """[tokens, vocab] of the last layer's output."""
        spec = self._spec
        named = {stored.piece.role: top[stored.name] for stored in self._checkpoint.find(None, *_TOP)}
        norm = named["final_norm"] + spec.norm.offset
        normed = build_norm(self._backend, spec.norm, norm, named.get("final_norm_bias"))(x)
        head = top.get("lm_head", named.get("lm_head", named["embed"]))
        logits = torch_backend.linear(normed, head, named.get("lm_head_bias")).float()
        logits = logits * spec.logit_scale
        cap = spec.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _layer(self, number: int, tensors: LayerTensors, x: Tensor) -> Tensor:
        context, kv = self._context(len(x) // self._length)
        return Layer(self._spec, self._spec.layers[number], tensors, self._backend).forward(x, kv, context)

    def _context(self, samples: int) -> tuple[StepContext, Tensor]:
        """Positions, rotations, attention plans and KV memory of a batch; the same in every layer."""
        if samples not in self._contexts:
            spec, blocks = self._spec, -(-self._length // BLOCK)
            rows = [
                InputRow([0] * self._length, 0, range(one * blocks, (one + 1) * blocks), None)
                for one in range(samples)
            ]
            inputs = StepInputs.from_rows(rows, BLOCK)
            rotations = {
                rope: (cos[inputs.positions], sin[inputs.positions])
                for rope, (cos, sin) in self._tables.items()
            }
            windows = {(mixer.window, mixer.chunked) for mixer in spec.attentions}
            plans = {window: torch_backend.plan_attention(inputs, *window) for window in windows}
            kv = torch.empty(2, samples * blocks, BLOCK, spec.num_kv_heads, spec.head_dim)
            self._contexts[samples] = StepContext(inputs, rotations, plans), kv
        return self._contexts[samples]


_TOP = ("embed", "positions", "final_norm", "final_norm_bias", "lm_head", "lm_head_bias")
