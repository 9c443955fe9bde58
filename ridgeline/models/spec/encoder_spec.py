"""EncoderSpec: the only description of a model that turns texts into vectors, or pairs of texts into scores.

Read by `read_encoder_spec` (encoder_config.py) strictly from config.json and sentence-transformers' files
next to it; the loader, the engine, `models inspect` and the docs use these numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ridgeline.models.errors import BrokenModel
from ridgeline.models.spec.precision import BYTES_PER_PARAMETER

EncoderActivation = Literal["gelu", "gelu_tanh", "relu"]
PoolingMode = Literal["cls", "mean", "max", "mean_sqrt_len", "last"]
# The model's output: a vector per text, or one number per pair of texts (a cross-encoder).
EncoderOutput = Literal["vector", "score"]


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    family: str
    name: str
    hidden_size: int
    num_heads: int
    num_layers: int
    ffn_size: int
    vocab_size: int
    max_positions: int  # rows of the position embedding
    first_position: int  # position of a text's first token; lower ones are never used (RoBERTa)
    num_types: int  # 0: no type embedding
    norm_eps: float
    max_tokens: int  # longest text, special tokens included
    activation: EncoderActivation = "gelu"
    pooling: PoolingMode = "mean"
    normalize: bool = True  # vectors have length 1
    output: EncoderOutput = "vector"
    pad_id: int | None = None
    weight_format: str = "float32"
    stored_bytes: int | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads:
            raise BrokenModel(
                f"{self.name}: {self.num_heads} heads do not divide the hidden size {self.hidden_size}"
            )
        room = self.max_positions - self.first_position
        if not 0 < self.max_tokens <= room:
            raise BrokenModel(
                f"{self.name}: texts have {self.max_tokens} tokens, but there are {max(room, 0)} positions"
            )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    # ---- parameters and bytes ----

    @property
    def matmul_parameters(self) -> int:
        """Weights one token is multiplied with: layers · (4 · hidden² + 2 · hidden · ffn)."""
        return self.num_layers * self.hidden_size * (4 * self.hidden_size + 2 * self.ffn_size)

    @property
    def parameters(self) -> int:
        """Embeddings, layers with their biases and norms, and a cross-encoder's head; no unused pooler."""
        hidden = self.hidden_size
        embeddings = hidden * (self.vocab_size + self.max_positions + self.num_types + 2)
        layer_vectors = self.num_layers * (9 * hidden + self.ffn_size)
        head = hidden * (hidden + 1) + hidden + 1 if self.output == "score" else 0
        return embeddings + self.matmul_parameters + layer_vectors + head

    def weight_bytes(self, precision: str) -> int:
        return round(self.parameters * BYTES_PER_PARAMETER[precision])

    # ---- FLOPs: a multiplication and an addition count as two ----

    def flops(self, tokens: int) -> int:
        """One text: 2 · matmul_parameters per token, and 4 · hidden per pair of tokens in every layer."""
        return 2 * self.matmul_parameters * tokens + 4 * self.hidden_size * self.num_layers * tokens * tokens

    def flops_per_token(self, tokens: int) -> float:
        """Mean over a text of `tokens` tokens."""
        return self.flops(tokens) / tokens
