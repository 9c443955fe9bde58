"""A decoder small enough to make in a test, for the native library."""

from __future__ import annotations

import numpy as np

from ridgeline.ops.cpu import library
from ridgeline.ops.cpu.library import DecoderTable, Format, LayerTable, NormTable


def floats(*shape: int, seed: int = 0) -> library.Floats:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def tiny_table() -> DecoderTable:
    """One layer: hidden 32, two heads of 16 over one KV head, ffn 48, vocabulary 40."""
    ones = np.ones(32, np.float32)
    angles = np.outer(np.arange(64), 0.1 ** np.arange(8)).astype(np.float32)
    embedding = library.pack_float(Format.F32, floats(40, 32))
    layer = LayerTable(
        qkv=library.pack_float(Format.F32, floats(64, 32, seed=1)),
        output=library.pack_float(Format.F32, floats(32, 32, seed=2)),
        gate_up=library.pack_float(Format.F32, floats(96, 32, seed=3)),
        down=library.pack_float(Format.F32, floats(32, 48, seed=4)),
        ffn=48,
        attention_scale=0.25,
        attn_norm=NormTable(ones),
        ffn_norm=NormTable(ones),
        cosine=np.cos(angles),
        sine=np.sin(angles),
        rotary_dim=16,
    )
    return DecoderTable(
        hidden=32,
        heads=2,
        kv_heads=1,
        head_dim=16,
        vocab=40,
        max_context=64,
        norm_eps=1e-5,
        embedding=embedding,
        lm_head=embedding,
        final_norm=NormTable(ones),
        layers=[layer],
        num_blocks=8,
        max_step_tokens=32,
        kv_format=library.KvFormat.F32,
    )


def ints(*values: int) -> library.Ints:
    return np.array(values, np.int32)
