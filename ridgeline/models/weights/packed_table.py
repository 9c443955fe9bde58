"""Packed weights as the native library's tables: each layer's description becomes tags and matrices.

Called by `packed` when an engine creates its decoder. Reads the spec and the image only; packs nothing.
"""

from __future__ import annotations

from dataclasses import replace

from ridgeline.models.errors import UnsupportedModel
from ridgeline.models.spec.ffn import Dense, Experts
from ridgeline.models.spec.layer_spec import LayerSpec
from ridgeline.models.spec.mixers import Attention
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.rope import RopeSpec
from ridgeline.models.spec.rope_tables import rope_tables
from ridgeline.models.weights.packed_file import PackedImage
from ridgeline.models.weights.packed_plan import ROPE_DIVISORS
from ridgeline.ops.cpu.library import (
    Activation,
    DecoderTable,
    ExpertsTable,
    FfnKind,
    Floats,
    KvFormat,
    LayerTable,
    NormKind,
    NormTable,
    PackedMatrix,
    QkNorm,
    Scores,
)
from ridgeline.ops.rope import query_scales

ACTIVATIONS = {
    "silu": Activation.SILU,
    "gelu_tanh": Activation.GELU_TANH,
    "gelu": Activation.GELU_ERF,
    "relu": Activation.RELU,
}
_NORM_KINDS = {"rms": NormKind.RMS, "layer": NormKind.LAYER}
_QK_NORMS = {
    "": QkNorm.PLAIN,
    "head": QkNorm.HEAD,
    "heads": QkNorm.HEADS,
    "projection": QkNorm.PROJECTION,
    "unit": QkNorm.UNIT,
}
_SCORES = {"softmax": Scores.SOFTMAX, "sigmoid": Scores.SIGMOID, "sparsemixer": Scores.SPARSEMIXER}

Rotation = tuple[Floats, Floats]


def decoder_table(
    spec: ModelSpec,
    image: PackedImage,
    *,
    max_context: int,
    num_blocks: int,
    max_step_tokens: int,
    kv_format: KvFormat,
    deterministic: bool,
) -> DecoderTable:
    embedding = image.matrix("embedding")
    rotations = rope_tables(spec, max_context, image.optional_vector(ROPE_DIVISORS))
    return DecoderTable(
        hidden=spec.hidden_size,
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        vocab=spec.vocab_size,
        max_context=max_context,
        norm_eps=spec.norm.eps,
        norm_kind=_NORM_KINDS[spec.norm.kind],
        embedding=embedding,
        lm_head=_lm_head(spec, image, embedding),
        final_norm=_norm(image, "final_norm"),
        layers=[
            _LayerTables(spec, layer, index, image).table(rotations, max_context)
            for index, layer in enumerate(spec.layers)
        ],
        num_blocks=num_blocks,
        max_step_tokens=max_step_tokens,
        kv_format=kv_format,
        deterministic=deterministic,
        embedding_scale=spec.embedding_scale,
        residual_scale=spec.residual_scale,
        logit_scale=spec.logit_scale,
        logit_softcap=spec.logit_softcap or 0.0,
        positions=image.matrix("positions") if spec.learned_positions else None,
    )


def _lm_head(spec: ModelSpec, image: PackedImage, embedding: PackedMatrix) -> PackedMatrix:
    if not spec.tied_embeddings:
        return image.matrix("lm_head")
    return replace(embedding, bias=image.vector("lm_head_bias")) if spec.head_bias else embedding


def _norm(image: PackedImage, name: str) -> NormTable:
    return NormTable(image.vector(name), image.optional_vector(f"{name}_bias"))


class _LayerTables:
    """The tables of one layer."""

    def __init__(self, spec: ModelSpec, layer: LayerSpec, index: int, image: PackedImage) -> None:
        self._spec, self._layer, self._index, self._image = spec, layer, index, image

    def table(self, rotations: dict[RopeSpec, Rotation], max_context: int) -> LayerTable:
        mixer, ffn, norms = self._layer.mixer, self._layer.ffn, self._layer.norms
        if not isinstance(mixer, Attention) or ffn is None:
            raise UnsupportedModel(f"{self._spec.name}: layer {self._index} is not attention and an FFN")
        cosine, sine = rotations[mixer.rope] if mixer.rope is not None else (None, None)
        plain = isinstance(ffn, Dense) and not ffn.gated
        scale = mixer.query_scale
        return LayerTable(
            qkv=self._matrix("qkv"),
            output=self._matrix("output"),
            attn_norm=self._norm("attn_norm") if norms.before else None,
            ffn_norm=self._norm("attn_norm" if norms.shared else "ffn_norm") if norms.before else None,
            post_attn_norm=self._norm("post_attn_norm") if norms.after else None,
            post_ffn_norm=self._norm("post_ffn_norm") if norms.after else None,
            parallel=norms.parallel,
            attention_scale=mixer.scale,
            attention_softcap=mixer.softcap or 0.0,
            rotary_dim=mixer.rope.dim if mixer.rope is not None else 0,
            cosine=cosine,
            sine=sine,
            window=mixer.window or 0,
            chunked=mixer.chunked,
            qk_norm=_QK_NORMS[mixer.qk_norm] if scale is None else QkNorm.SCALED,
            q_norm=self._vector("q_norm")
            if scale is None
            else query_scales(scale.weight, scale.every, max_context),
            k_norm=self._vector("k_norm"),
            sinks=self._vector("sinks"),
            ffn=ffn.dense_size,
            ffn_kind=FfnKind.PLAIN if plain else FfnKind.GATED if isinstance(ffn, Dense) else FfnKind.EXPERTS,
            activation=ACTIVATIONS[ffn.activation],
            gate_up=self._matrix("up" if plain else "gate_up") if ffn.dense_size else None,
            down=self._matrix("down") if ffn.dense_size else None,
            experts=self._experts(ffn) if isinstance(ffn, Experts) else None,
        )

    def _experts(self, ffn: Experts) -> ExpertsTable:
        router = ffn.router
        return ExpertsTable(
            num=ffn.num,
            per_token=ffn.per_token,
            size=ffn.size,
            router=self._matrix("router"),
            gate_up=self._matrix("experts_gate_up"),
            down=self._matrix("experts_down"),
            scores=_SCORES[router.scores],
            normalized=router.normalized,
            scales_input=router.scales_input,
            groups=router.groups,
            top_groups=router.top_groups,
            shared_gate=ffn.shared_gate,
            scale=router.scale,
            clamp=ffn.clamp or 0.0,
            margin=router.margin,
            choice_bias=self._vector("choice_bias"),
        )

    def _matrix(self, name: str) -> PackedMatrix:
        return self._image.matrix(f"layers.{self._index}.{name}")

    def _vector(self, name: str) -> Floats | None:
        return self._image.optional_vector(f"layers.{self._index}.{name}")

    def _norm(self, name: str) -> NormTable:
        return _norm(self._image, f"layers.{self._index}.{name}")
