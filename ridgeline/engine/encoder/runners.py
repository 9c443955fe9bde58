"""Runners of an encoder's step: the native library, or torch on a CPU or GPU. They decide nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ridgeline.engine.encoder.core import Floats, Ints, Want
from ridgeline.models.encoders.packed import POOLINGS
from ridgeline.models.encoders.weights import HEAD_ACTIVATION
from ridgeline.models.spec.encoder_spec import EncoderSpec
from ridgeline.ops.cpu.encoder import NativeEncoder
from ridgeline.ops.cpu.interface import Pooling

if TYPE_CHECKING:
    from ridgeline.models.encoders.reference import TorchEncoder


class NativeEncoderRunner:
    def __init__(self, encoder: NativeEncoder, spec: EncoderSpec, head: dict[str, Floats]) -> None:
        """head: a cross-encoder's last two layers; they have one row per text, so numpy computes them."""
        self.encoder = encoder
        self._pooling = POOLINGS[spec.pooling]
        self._normalize = spec.normalize
        self._head = head
        self._activate: Any = np.tanh if HEAD_ACTIVATION[spec.family] == "tanh" else _relu

    def encode(self, token_ids: Ints, text_starts: Ints, type_ids: Ints | None, want: Want) -> Floats:
        if want == "tokens":  # compared by cosine: normalized to length 1, whatever the texts' vectors are
            return self.encoder.execute(
                token_ids, text_starts, type_ids, pooling=Pooling.NONE, normalize=True
            )
        if want == "vector":
            return self.encoder.execute(
                token_ids, text_starts, type_ids, pooling=self._pooling, normalize=self._normalize
            )
        first = self.encoder.execute(token_ids, text_starts, type_ids, pooling=Pooling.FIRST, normalize=False)
        head = self._head
        inner = self._activate(first @ head["head.dense.weight"].T + head["head.dense.bias"])
        return np.asarray(inner @ head["head.score.weight"].T + head["head.score.bias"], np.float32)


class TorchEncoderRunner:
    def __init__(self, encoder: TorchEncoder) -> None:
        self._encoder = encoder

    def encode(self, token_ids: Ints, text_starts: Ints, type_ids: Ints | None, want: Want) -> Floats:
        import torch

        texts = [part.tolist() for part in np.split(token_ids, text_starts[1:-1])]
        types = None if type_ids is None else [p.tolist() for p in np.split(type_ids, text_starts[1:-1])]
        rows = self._encoder.encode(texts, types, tokens=want == "tokens")
        joined = torch.cat(rows) if want == "tokens" else torch.stack(rows)
        return np.asarray(joined.float().cpu().numpy(), np.float32)


def _relu(x: Floats) -> Floats:
    return np.maximum(x, np.float32(0.0))
