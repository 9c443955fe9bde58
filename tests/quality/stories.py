"""stories260K in Hugging Face's layout, made from the llama2.c file; and text in its own words.

The file: seven integers, then float32 tensors. Its rotation pairs neighbouring dimensions; Hugging Face's
layout pairs the halves of a head, so the rows of q and k are reordered.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file

from ridgeline.models.decoders.reference import Decoder, allocate_kv
from ridgeline.models.spec.read_spec import read_spec
from ridgeline.models.weights.torch_weights import load_weights
from ridgeline.ops.backend import select_backend
from ridgeline.ops.cpu.library import BLOCK_TOKENS
from ridgeline.ops.inputs import InputRow, StepInputs

BOS = 1


def convert(source: Path, folder: Path) -> Path:
    raw = source.read_bytes()
    dim, ffn, layers, heads, kv_heads, vocab, context = np.frombuffer(raw, np.int32, 7).tolist()
    assert vocab > 0, "a file with its own classifier is not expected"
    values = np.frombuffer(raw, np.float32, offset=28)
    at = 0

    def take(*shape: int) -> NDArray[np.float32]:
        nonlocal at
        size = int(np.prod(shape))
        at += size
        return values[at - size : at].reshape(shape).copy()

    head_dim = dim // heads
    tensors = {"model.embed_tokens.weight": take(vocab, dim)}
    names = {
        "input_layernorm": take(layers, dim),
        "self_attn.q_proj": _halves(take(layers, dim, dim), heads),
        "self_attn.k_proj": _halves(take(layers, kv_heads * head_dim, dim), kv_heads),
        "self_attn.v_proj": take(layers, kv_heads * head_dim, dim),
        "self_attn.o_proj": take(layers, dim, dim),
        "post_attention_layernorm": take(layers, dim),
        "mlp.gate_proj": take(layers, ffn, dim),
        "mlp.down_proj": take(layers, dim, ffn),
        "mlp.up_proj": take(layers, ffn, dim),
    }
    for name, stack in names.items():
        tensors |= {f"model.layers.{number}.{name}.weight": stack[number] for number in range(layers)}
    tensors["model.norm.weight"] = take(dim)
    tensors = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": dim,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": BOS,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _halves(stack: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    layers, rows, dim = stack.shape
    pairs = stack.reshape(layers, heads, rows // heads // 2, 2, dim)
    return pairs.transpose(0, 1, 3, 2, 4).reshape(layers, rows, dim)


def told(path: Path, sequences: int, length: int, seed: int = 0) -> NDArray[np.int32]:
    """Stories sampled from the float32 model, [sequences, length]: text that it finds likely."""
    spec = read_spec(path)
    decoder = Decoder(spec, load_weights(path, spec, torch.float32), select_backend("torch"))
    blocks = -(-length // BLOCK_TOKENS)
    kv = allocate_kv(spec, sequences * blocks, BLOCK_TOKENS, torch.float32)
    random = torch.Generator().manual_seed(seed)
    found = torch.full((sequences, 1), BOS)
    with torch.inference_mode():
        while found.shape[1] < length:
            at = found.shape[1] - 1
            rows = [
                InputRow(found[row, at:].tolist(), at, list(range(row * blocks, (row + 1) * blocks)), 0)
                for row in range(sequences)
            ]
            logits = decoder.forward(StepInputs.from_rows(rows, BLOCK_TOKENS), kv)
            chosen = torch.multinomial(torch.softmax(logits.float(), -1), 1, generator=random)
            found = torch.cat([found, chosen], 1)
    return found.numpy().astype(np.int32)
