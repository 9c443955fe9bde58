"""The encoder in plain torch: the reference of the native library, and the implementation on a GPU.

Texts are padded to one length and masked, as is usual; the native library does not pad. Used by the tests as
the readable reference, and by the engine if torch computes encoders.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.models.encoders.weights import HEAD_ACTIVATION
from ridgeline.models.spec.encoder_spec import EncoderSpec
from ridgeline.models.weights.dequant import Floats


class TorchEncoder:
    def __init__(
        self,
        spec: EncoderSpec,
        weights: dict[str, Floats],
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.spec = spec
        self._device = torch.device(device)
        self._weights = {
            name: torch.from_numpy(value).to(self._device, dtype) for name, value in weights.items()
        }

    @torch.inference_mode()
    def encode(
        self, texts: list[list[int]], types: list[list[int]] | None = None, *, tokens: bool = False
    ) -> list[Tensor]:
        """For each text its vector [hidden], with `tokens` the vectors of its tokens [tokens, hidden], or
        from a cross-encoder its score [1], a logit.
        """
        ids, mask = self._padded(texts), self._mask(texts)
        kinds = None if types is None else self._padded(types)
        hidden = self._embed(ids, kinds)
        for index in range(self.spec.num_layers):
            hidden = self._layer(index, hidden, mask)
        if tokens:
            vectors = [row[: len(text)] for row, text in zip(hidden, texts, strict=True)]
            return [F.normalize(each, dim=-1) if self.spec.normalize else each for each in vectors]
        if self.spec.output == "score":
            return list(self._score(hidden[:, 0]))
        return list(self._pool(hidden, mask))

    def _embed(self, ids: Tensor, kinds: Tensor | None) -> Tensor:
        positions = torch.arange(ids.shape[1], device=self._device) + self.spec.first_position
        hidden = self._weights["words"][ids] + self._weights["positions"][positions]
        if self.spec.num_types:
            hidden = hidden + self._weights["types"][torch.zeros_like(ids) if kinds is None else kinds]
        return self._norm("norm", hidden)

    def _layer(self, index: int, hidden: Tensor, mask: Tensor) -> Tensor:
        """Attention, add, norm; FFN, add, norm."""
        batch, length, size = hidden.shape
        heads = (batch, length, self.spec.num_heads, self.spec.head_dim)
        q, k, v = (self._linear(f"{index}.{part}", hidden).view(heads).transpose(1, 2) for part in "qkv")
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.spec.head_dim)
        scores = scores.masked_fill(~mask[:, None, None, :], -math.inf)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, size)
        hidden = self._norm(f"{index}.attn_norm", hidden + self._linear(f"{index}.output", mixed))
        inner = self._activate(self._linear(f"{index}.up", hidden))
        return self._norm(f"{index}.ffn_norm", hidden + self._linear(f"{index}.down", inner))

    def _pool(self, hidden: Tensor, mask: Tensor) -> Tensor:
        lengths = mask.sum(1, keepdim=True)
        seen = hidden * mask[:, :, None]
        match self.spec.pooling:
            case "cls":
                vectors = hidden[:, 0]
            case "last":
                vectors = hidden[torch.arange(len(hidden)), lengths[:, 0] - 1]
            case "mean":
                vectors = seen.sum(1) / lengths
            case "mean_sqrt_len":
                vectors = seen.sum(1) / lengths.to(hidden.dtype).sqrt()
            case "max":
                vectors = hidden.masked_fill(~mask[:, :, None], -math.inf).amax(1)
        return F.normalize(vectors, dim=-1) if self.spec.normalize else vectors

    def _score(self, first: Tensor) -> Tensor:
        inner = self._linear("head.dense", first)
        inner = inner.tanh() if HEAD_ACTIVATION[self.spec.family] == "tanh" else inner.relu()
        return self._linear("head.score", inner)

    def _activate(self, x: Tensor) -> Tensor:
        if self.spec.activation == "relu":
            return x.relu()
        return F.gelu(x, approximate="tanh" if self.spec.activation == "gelu_tanh" else "none")

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self._weights[f"{name}.weight"], self._weights[f"{name}.bias"])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
        return F.layer_norm(x, (self.spec.hidden_size,), weight, bias, self.spec.norm_eps)

    def _padded(self, rows: list[list[int]]) -> Tensor:
        longest = max(map(len, rows))
        padded = [row + [0] * (longest - len(row)) for row in rows]
        return torch.tensor(padded, device=self._device)

    def _mask(self, texts: list[list[int]]) -> Tensor:
        lengths = torch.tensor([len(text) for text in texts], device=self._device)
        return torch.arange(int(lengths.max()), device=self._device) < lengths[:, None]
