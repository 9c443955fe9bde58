"""Shapes of published models, written down: the planner's tests need no files."""

from __future__ import annotations

from ridgeline.models.spec.ffn import Dense, Experts
from ridgeline.models.spec.layer_spec import LayerSpec
from ridgeline.models.spec.mixers import Attention, LatentAttention
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.precision import Precision


def llama_8b() -> ModelSpec:
    return _llama("llama-3.1-8b", layers=32, hidden=4096, heads=32, ffn=14336)


def llama_70b() -> ModelSpec:
    return _llama("llama-3.1-70b", layers=80, hidden=8192, heads=64, ffn=28672)


def deepseek_v3() -> ModelSpec:
    attention = LatentAttention(128, 1536, 512, 128, 64, 128)
    experts = Experts(num=256, per_token=8, size=2048, shared_size=2048)
    layers = [LayerSpec(attention, Dense(18432))] * 3 + [LayerSpec(attention, experts)] * 58
    return _shape("deepseek-v3", 7168, 129280, 163840, tuple(layers), "fp8")


def qwen3_30b_a3b() -> ModelSpec:
    attention = Attention(heads=32, kv_heads=4, head_dim=128, qk_norm="head")
    layer = LayerSpec(attention, Experts(num=128, per_token=8, size=768))
    return _shape("qwen3-30b-a3b", 2048, 151936, 40960, (layer,) * 48, "bfloat16")


def _llama(name: str, *, layers: int, hidden: int, heads: int, ffn: int) -> ModelSpec:
    layer = LayerSpec(Attention(heads=heads, kv_heads=8, head_dim=128), Dense(ffn))
    return _shape(name, hidden, 128256, 131072, (layer,) * layers, "bfloat16")


def _shape(
    name: str, hidden: int, vocab: int, context: int, layers: tuple[LayerSpec, ...], stored: str
) -> ModelSpec:
    return ModelSpec(
        name=name,
        family=name.split("-")[0],
        hidden_size=hidden,
        vocab_size=vocab,
        max_context=context,
        tied_embeddings=False,
        layers=layers,
        weight_format=stored,
        stored=Precision.named(stored),
    )
