"""Models with random weights and the shape of TinyLlama or Granite-3.0-1B-A400M, as GGUF files in Q4_0.

Called by cpu_vs_llamacpp.py: speed depends on the shape and the format, not on what the weights say, and a
1.1B model is too large to ship. Every matrix is Q4_0 (routers are float32), so that all engines read the same
bytes. It is written block by block: the whole model never lies in memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

BLOCK_WEIGHTS, BLOCK_BYTES = 32, 18  # Q4_0: a half-precision scale, then 32 nibbles
WEIGHT_STD = 0.02  # as models are initialised: activations stay finite through all layers
NIBBLE_STD = 17.5**0.5  # of a uniform 4-bit value of -7 … 7, with 0 twice
# Of WEIGHT_STD, for the matrices that add to the residual stream of a model with experts: tokens stay
# unlike each other.
ADDED_SHARE = 0.02
BYTE_TOKENS = 256


@dataclass(frozen=True)
class Shape:
    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    context: int
    architecture: str = "llama"
    experts: int = 0  # 0: a dense FFN; else each expert has `ffn` rows
    experts_per_token: int = 0
    tied: bool = False

    def matrices(self) -> dict[str, tuple[int, ...]]:
        """Every matrix, by its name in the file: (rows, columns), of experts (experts, rows, columns)."""
        head_dim = self.hidden // self.heads
        of_layer: dict[str, tuple[int, ...]] = {
            "attn_q": (self.hidden, self.hidden),
            "attn_k": (self.kv_heads * head_dim, self.hidden),
            "attn_v": (self.kv_heads * head_dim, self.hidden),
            "attn_output": (self.hidden, self.hidden),
        }
        stack, suffix = ((self.experts,), "_exps") if self.experts else ((), "")
        of_layer |= {
            f"ffn_gate{suffix}": (*stack, self.ffn, self.hidden),
            f"ffn_up{suffix}": (*stack, self.ffn, self.hidden),
            f"ffn_down{suffix}": (*stack, self.hidden, self.ffn),
        }
        layers = {
            f"blk.{layer}.{name}.weight": size
            for layer in range(self.layers)
            for name, size in of_layer.items()
        }
        ends = ("token_embd.weight",) if self.tied else ("token_embd.weight", "output.weight")
        return {**dict.fromkeys(ends, (self.vocab, self.hidden)), **layers}

    def routers(self) -> list[str]:
        return [f"blk.{layer}.ffn_gate_inp.weight" for layer in range(self.layers) if self.experts]

    def norms(self) -> list[str]:
        layers = [f"blk.{i}.{name}.weight" for i in range(self.layers) for name in ("attn_norm", "ffn_norm")]
        return ["output_norm.weight", *layers]


TINYLLAMA = Shape(
    "tinyllama-1.1b-random", layers=22, hidden=2048, heads=32, kv_heads=4, ffn=5632, vocab=32000, context=2048
)

GRANITE_MOE = Shape(
    "granite-1.3b-a0.4b-random", layers=24, hidden=1024, heads=16, kv_heads=8, ffn=512, vocab=49155,
    context=4096,
    architecture="granitemoe", experts=32, experts_per_token=8, tied=True,
)  # fmt: skip


def write_random_gguf(shape: Shape, path: Path, seed: int = 0) -> Path:
    """Writes the file unless it is there; the same seed gives the same bytes."""
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, shape.architecture)
    _add_metadata(writer, shape)
    q4_0 = gguf.GGMLQuantizationType.Q4_0
    for name, (*stack, columns) in shape.matrices().items():
        row_bytes = columns // BLOCK_WEIGHTS * BLOCK_BYTES
        size = math.prod(stack) * row_bytes
        writer.add_tensor_info(name, (*stack, row_bytes), np.dtype(np.uint8), size, q4_0)
    router = (shape.experts, shape.hidden)
    for name in shape.routers():
        writer.add_tensor_info(name, router, np.dtype(np.float32), 4 * math.prod(router))
    for name in shape.norms():
        writer.add_tensor_info(name, (shape.hidden,), np.dtype(np.float32), 4 * shape.hidden)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(seed)
    for name, (*stack, columns) in shape.matrices().items():
        adds = shape.experts and ("attn_output" in name or "ffn_down" in name)
        std = WEIGHT_STD * (ADDED_SHARE if adds else 1.0)
        writer.write_tensor_data(random_q4_0(rng, math.prod(stack), columns, std))
    for _ in shape.routers():
        writer.write_tensor_data(rng.normal(0, WEIGHT_STD, router).astype(np.float32))
    for _ in shape.norms():
        writer.write_tensor_data(np.ones(shape.hidden, np.float32))
    writer.close()
    partial.rename(path)
    return path


def random_q4_0(rng: np.random.Generator, rows: int, columns: int, std: float) -> np.ndarray:
    """Random nibbles with scales around the one that gives `std`: bytes [rows, row_bytes]."""
    blocks = np.empty((rows * columns // BLOCK_WEIGHTS, BLOCK_BYTES), np.uint8)
    scales = rng.uniform(0.8, 1.2, len(blocks)) * (std / NIBBLE_STD)
    blocks[:, :2] = scales.astype(np.float16)[:, None].view(np.uint8)
    nibbles = rng.integers(0, 256, (len(blocks), BLOCK_BYTES - 2), np.uint8)
    # No -8: weights whose mean is not 0 would make all tokens alike, with the same experts.
    nibbles[nibbles < 16] |= 0x80
    nibbles[nibbles % 16 == 0] |= 0x08
    blocks[:, 2:] = nibbles
    return blocks.reshape(rows, -1)


def _add_metadata(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_name(shape.name)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_rope_dimension_count(shape.hidden // shape.heads)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.experts_per_token)
    if shape.architecture == "granitemoe":  # llama.cpp asks for it
        writer.add_logit_scale(1.0)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    _add_tokenizer(writer, shape.vocab)


def _add_tokenizer(writer: gguf.GGUFWriter, vocab: int) -> None:
    """The least that loads: three marks, all bytes, and words that no text contains."""
    words = vocab - 3 - BYTE_TOKENS
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(BYTE_TOKENS))]
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens + [f"word{index}" for index in range(words)])
    writer.add_token_scores([0.0] * (3 + BYTE_TOKENS) + [-float(index) for index in range(words)])
    writer.add_token_types(kinds + [gguf.TokenType.BYTE] * BYTE_TOKENS + [gguf.TokenType.NORMAL] * words)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
