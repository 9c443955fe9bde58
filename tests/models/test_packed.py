"""Packed weights are the weights the torch backend computes with: exactly where nothing is rounded."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from ridgeline.models.errors import BrokenModel
from ridgeline.models.files.gguf import BLOCK_SIZES
from ridgeline.models.spec.ffn import Dense, Experts
from ridgeline.models.spec.mixers import Attention
from ridgeline.models.spec.read_spec import read_spec
from ridgeline.models.spec.rope import RopeSpec
from ridgeline.models.weights.packed import POLICIES, PackedDecoder, load_packed, native_refusal, plan_packed
from ridgeline.models.weights.packed_formats import SIX_BIT_ISAS
from ridgeline.models.weights.torch_weights import DecoderTensors, load_weights, tensors_of
from ridgeline.ops.cpu.library import Format, PackedMatrix, available_isas, unpack
from tests.models.test_dequant import random_blocks
from tests.models.test_weights import rewrite
from tests.models.tiny_checkpoints import Pack, packed_as, tiny_model, write_gguf

F32 = GGMLQuantizationType.F32
FAMILIES = ["llama", "llama-tied-biased", "mistral", "qwen2", "qwen3", "gemma3", "gemma3-untied-capped"]
KEPT = [("Q4_K", Format.Q4_K), ("Q5_K", Format.Q8_FM)]
KEPT += [(kind, Format.Q4_H) for kind in ("TQ1_0", "TQ2_0", "Q1_0")]
NORMS = ("attn_norm", "ffn_norm", "q_norm", "k_norm", "post_attn_norm", "post_ffn_norm")


def pack(path: Path, weights: str = "auto") -> PackedDecoder:
    return load_packed(path, read_spec(path), weights, keep=False)


def torch_weights(path: Path) -> DecoderTensors:
    return tensors_of(load_weights(path, read_spec(path), torch.float32))


def gate_and_up(values: np.ndarray) -> np.ndarray:
    """From alternating panels of 16 rows to all gate rows, then all up rows, padding included."""
    return values.reshape(-1, 2, 16, *values.shape[1:]).swapaxes(0, 1).reshape(values.shape)


def matrices(packed: PackedDecoder, weights: DecoderTensors) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Every matrix and bias: ours unpacked, torch's."""
    tied = packed.spec.tied_embeddings
    table = packed.table(max_context=32, num_blocks=1, max_step_tokens=1)
    pairs = {
        "embedding": (unpack(table.embedding), weights.embed.numpy()),
        "lm_head": (unpack(table.lm_head), weights.lm_head.numpy()),
    }
    assert (table.lm_head is table.embedding) == tied
    ffn = packed.spec.ffn_size
    for index, (layer, theirs) in enumerate(zip(table.layers, weights.layers, strict=True)):
        for name, field in (("qkv", "qkv"), ("output", "o"), ("gate_up", "gate_up"), ("down", "down")):
            ours: PackedMatrix = getattr(layer, name)
            values, bias = unpack(ours), ours.bias
            if name == "gate_up":
                gate, up = np.split(gate_and_up(values), 2)
                assert not gate[ffn:].any()
                assert not up[ffn:].any()
                values = np.concatenate([gate[:ffn], up[:ffn]])
                if bias is not None:
                    gate, up = np.split(gate_and_up(bias), 2)
                    assert not gate[ffn:].any()
                    bias = np.concatenate([gate[:ffn], up[:ffn]])
            pairs[f"{index}.{name}"] = (values, getattr(theirs, field).numpy())
            expected_bias = getattr(theirs, f"{field}_bias")
            assert (bias is None) == (expected_bias is None)
            if bias is not None:
                pairs[f"{index}.{name}_bias"] = (bias, expected_bias.numpy())
    return pairs


def assert_equal(packed: PackedDecoder, weights: DecoderTensors) -> None:
    """Every matrix, bias and norm, bit for bit but for the sign of zero."""
    for name, (ours, theirs) in matrices(packed, weights).items():
        assert np.array_equal(ours, theirs), name
    assert np.array_equal(packed.final_norm, weights.final_norm.numpy())
    for index, layer in enumerate(weights.layers):
        for name in NORMS:
            ours, expected = packed.norm(index, name), getattr(layer, name)
            assert (ours is None) == (expected is None)
            if ours is not None:
                assert np.array_equal(ours, expected.numpy()), name


def formats(packed: PackedDecoder) -> set[Format]:
    """Of the layers' matrices."""
    names = ("qkv", "output", "gate_up", "down")
    return {packed.matrix(index, name).format for index in range(packed.spec.num_layers) for name in names}


def mixed(kinds: dict[str, str], other: str) -> Pack:
    """Tensors whose names contain a key as its type, all other matrices as `other`."""

    def pack(name: str, values: np.ndarray) -> tuple[np.ndarray, GGMLQuantizationType]:
        kind = next((kind for part, kind in kinds.items() if part in name), other)
        if values.ndim == 1 or (not kind.endswith("_K") and not kind.startswith(("IQ", "Q1"))):
            return packed_as(GGMLQuantizationType[kind])(name, values)
        elements = BLOCK_SIZES[kind][0]
        blocks = random_blocks(kind, values.size // elements, seed=len(name)).reshape(len(values), -1)
        return blocks, GGMLQuantizationType[kind]

    return pack


# ---- the same weights as torch's ----


@pytest.mark.parametrize("name", FAMILIES)
def test_floats_of_every_family_are_kept_bit_for_bit(name: str, tmp_path: Path) -> None:
    tiny_model(name).save_pretrained(tmp_path)
    packed = pack(tmp_path, "float32")
    assert formats(packed) == {packed.embedding.format} == {Format.F32}
    assert packed.notes == ()
    assert_equal(packed, torch_weights(tmp_path))


@pytest.mark.parametrize("name", ["llama", "llama-tied-biased", "mistral", "qwen2", "qwen3", "gemma3"])
def test_rows_of_every_gguf_architecture_are_in_the_decoders_order(name: str, tmp_path: Path) -> None:
    """Among them Llama's q and k, which such files store in pairs side by side."""
    write_gguf(tiny_model(name), tmp_path / "tiny.gguf", packed_as(F32))
    assert_equal(pack(tmp_path / "tiny.gguf", "float32"), torch_weights(tmp_path / "tiny.gguf"))


@pytest.mark.parametrize(
    ("kind", "format"),
    [
        ("Q4_0", Format.Q4_H),
        ("Q4_1", Format.Q4_HM),
        ("Q5_0", Format.Q8_H),
        ("Q5_1", Format.Q8_FM),
        ("Q8_0", Format.Q8_H),
        ("BF16", Format.BF16),
        ("IQ4_NL", Format.Q8_H),
    ],
)
def test_what_a_gguf_file_stores_is_kept_without_loss(kind: str, format: Format, tmp_path: Path) -> None:
    write_gguf(tiny_model("llama"), tmp_path / "tiny.gguf", mixed({}, kind))
    packed = pack(tmp_path / "tiny.gguf")
    assert formats(packed) == {packed.embedding.format} == {format}
    assert packed.notes == ()
    assert_equal(packed, torch_weights(tmp_path / "tiny.gguf"))


@pytest.mark.parametrize(("kind", "format"), KEPT)
def test_k_quants_with_groups_of_32_are_kept_without_loss(kind: str, format: Format, tmp_path: Path) -> None:
    write_gguf(tiny_model("qwen3-wide"), tmp_path / "tiny.gguf", mixed({}, kind))
    packed = pack(tmp_path / "tiny.gguf")
    assert formats(packed) == {format}
    assert_equal(packed, torch_weights(tmp_path / "tiny.gguf"))


@pytest.mark.parametrize("isa", SIX_BIT_ISAS)
def test_q6_k_is_kept_without_loss_where_six_bits_are_fast(
    isa: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isa not in available_isas():
        pytest.skip(f"this CPU has no {isa}")
    monkeypatch.setenv("RIDGELINE_ISA", isa)
    write_gguf(tiny_model("qwen3-wide"), tmp_path / "tiny.gguf", mixed({}, "Q6_K"))
    packed = pack(tmp_path / "tiny.gguf")
    assert formats(packed) == {Format.Q6_K}
    assert packed.notes == ()
    assert_equal(packed, torch_weights(tmp_path / "tiny.gguf"))


@pytest.mark.parametrize(
    ("kind", "format"),
    [
        *(("Q6_K", Format.Q8_H), ("Q3_K", Format.Q8_H), ("Q2_K", Format.Q8_FM)),
        *((kind, Format.Q8_H) for kind in ("IQ4_XS", "IQ3_S", "IQ2_XXS", "IQ1_M")),
    ],
)
def test_k_quants_with_groups_of_16_are_rounded_to_8_bits_and_that_is_said(
    kind: str, format: Format, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RIDGELINE_ISA", "portable")
    path = tmp_path / "tiny.gguf"
    write_gguf(tiny_model("qwen3-wide"), path, mixed({}, kind))
    packed = pack(path)
    assert formats(packed) == {format}
    assert any(f"8 tensors stored as {kind} are rounded to int8" in note for note in packed.notes)
    for ours, theirs in matrices(packed, torch_weights(path)).values():
        groups, error = theirs.reshape(-1, 32), np.abs(ours - theirs).reshape(-1, 32)
        span = groups.max(axis=1) - groups.min(axis=1) if format == Format.Q8_FM else 0
        step = np.maximum(2 * np.abs(groups).max(axis=1), span) / 254
        assert (error.max(axis=1) <= 0.502 * step).all()


def test_bfloat16_checkpoints_are_kept_and_wider_ones_rounded_as_torch_rounds(tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    model.save_pretrained(tmp_path / "wide")
    wide = pack(tmp_path / "wide")
    model.to(torch.bfloat16).save_pretrained(tmp_path / "narrow")
    narrow = pack(tmp_path / "narrow")
    assert wide.notes == ("22 tensors stored as F32 are rounded to bfloat16",)
    assert narrow.notes == ()
    assert_equal(narrow, torch_weights(tmp_path / "narrow"))
    for name, (ours, theirs) in matrices(wide, torch_weights(tmp_path / "narrow")).items():
        if not name.endswith("_bias"):  # biases stay float32
            assert np.array_equal(ours, theirs), name


@pytest.mark.parametrize("weights", POLICIES)
def test_sizes_that_fill_no_panel_or_group_are_padded_with_zeros(weights: str, tmp_path: Path) -> None:
    """40 FFN rows are 2.5 panels, 72 inputs 2.25 groups; heads of 6 put q, k and v into one panel."""
    sizes = {"hidden_size": 72, "intermediate_size": 40, "head_dim": 6}
    from tests.models import tiny_checkpoints

    model = tiny_checkpoints._llama(**sizes, mlp_bias=True, attention_bias=True)
    model.save_pretrained(tmp_path)
    packed = pack(tmp_path, weights)
    assert packed.matrix(0, "gate_up").n == 96
    if weights == "float32":
        assert_equal(packed, torch_weights(tmp_path))
    for ours, theirs in matrices(packed, torch_weights(tmp_path)).values():
        assert ours.shape == theirs.shape
        assert np.abs(ours - theirs).max() <= 0.1 * np.abs(theirs).max()


# ---- matrices whose tensors are stored in different types ----


@pytest.mark.parametrize(
    ("kinds", "other", "format"),
    [
        ({"attn_q": "Q5_0", "attn_k": "Q4_0", "attn_v": "Q8_0"}, "Q8_0", Format.Q8_H),
        ({"attn_q": "Q4_1", "attn_k": "Q5_1", "attn_v": "Q4_0", "ffn_up": "Q4_1"}, "Q5_1", Format.Q8_FM),
        ({"attn_q": "Q4_K", "attn_k": "Q5_0", "attn_v": "Q5_K", "ffn_gate": "Q4_1"}, "Q5_K", Format.Q8_FM),
    ],
)
def test_quantized_types_that_one_format_holds_are_fused_without_loss(
    kinds: dict[str, str], other: str, format: Format, tmp_path: Path
) -> None:
    write_gguf(tiny_model("qwen3-wide"), tmp_path / "tiny.gguf", mixed(kinds, other))
    packed = pack(tmp_path / "tiny.gguf")
    assert packed.matrix(0, "qkv").format == packed.matrix(0, "gate_up").format == format
    assert packed.notes == ()
    assert_equal(packed, torch_weights(tmp_path / "tiny.gguf"))


def test_only_the_tensor_that_no_format_holds_is_rounded(tmp_path: Path) -> None:
    """As in published Q4_K_M files: v is Q6_K, q and k are Q4_K."""
    path = tmp_path / "tiny.gguf"
    write_gguf(tiny_model("qwen3-wide"), path, mixed({"attn_v": "Q6_K"}, "Q4_K"))
    packed = pack(path)
    assert packed.matrix(0, "qkv").format == Format.Q8_FM
    assert packed.matrix(0, "gate_up").format == Format.Q4_K
    assert packed.notes == ("1 tensor stored as Q6_K is rounded to int8 with minima",)
    ours, theirs = matrices(packed, torch_weights(path))["0.qkv"]
    v_rows = packed.spec.num_kv_heads * packed.spec.head_dim
    assert np.array_equal(ours[:-v_rows], theirs[:-v_rows])
    assert not np.array_equal(ours[-v_rows:], theirs[-v_rows:])
    np.testing.assert_allclose(ours[-v_rows:], theirs[-v_rows:], atol=np.abs(theirs[-v_rows:]).max() / 200)


def test_floats_beside_quantized_tensors_make_the_matrix_bfloat16(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(tiny_model("llama"), path, mixed({"attn_v": "F16"}, "Q8_0"))
    packed = pack(path)
    assert packed.matrix(0, "qkv").format == Format.BF16
    ours, theirs = matrices(packed, torch_weights(path))["0.qkv"]
    assert np.array_equal(ours, torch.from_numpy(theirs).to(torch.bfloat16).float().numpy())


def test_a_panel_that_two_types_share_goes_through_floats(tmp_path: Path) -> None:
    """Heads of 6: rows of q, k and v meet in panels. Blocks cannot be packed there, so values are rounded."""
    from tests.models import tiny_checkpoints

    model = tiny_checkpoints._qwen3(head_dim=6)
    path = tmp_path / "tiny.gguf"
    write_gguf(model, path, mixed({"attn_v": "Q5_1", "attn_output": "F32"}, "Q5_0"))
    ours, theirs = matrices(pack(path), torch_weights(path))["0.qkv"]
    np.testing.assert_allclose(ours, theirs, atol=np.abs(theirs).max() / 250)
    assert np.array_equal(ours[:16], theirs[:16])  # a panel of q alone


# ---- what the user asks for ----


@pytest.mark.parametrize(
    ("weights", "layers", "outermost", "error"),
    [
        ("bfloat16", Format.BF16, Format.BF16, 1 / 256),
        ("int8", Format.Q8_H, Format.Q8_H, 1 / 250),
        ("int8-channel", Format.Q8_C, Format.Q8_H, 1 / 250),
        ("int4", Format.Q4_HM, Format.Q8_H, 1 / 14),
    ],
)
def test_formats_asked_for_are_used_and_round_no_more_than_they_must(
    weights: str, layers: Format, outermost: Format, error: float, tmp_path: Path
) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    packed = pack(tmp_path, weights)
    assert formats(packed) == {layers}
    assert packed.embedding.format == packed.image.matrix("lm_head").format == outermost
    for ours, theirs in matrices(packed, torch_weights(tmp_path)).values():
        largest = np.abs(theirs).max(axis=-1, keepdims=True)
        assert (np.abs(ours - theirs) <= error * largest).all()


@pytest.mark.parametrize(("kind", "format"), [("Q4_0", Format.Q4_H), ("Q4_1", Format.Q4_HM)])
def test_four_bits_already_stored_are_not_quantized_again(kind: str, format: Format, tmp_path: Path) -> None:
    write_gguf(tiny_model("llama"), tmp_path / "tiny.gguf", packed_as(GGMLQuantizationType[kind]))
    packed = pack(tmp_path / "tiny.gguf", "int4")
    assert formats(packed) == {format}
    weights = torch_weights(tmp_path / "tiny.gguf")
    for name, (ours, theirs) in matrices(packed, weights).items():
        if name not in ("embedding", "lm_head"):
            assert np.array_equal(ours, theirs)


def test_unknown_weights_are_refused_by_name(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="unknown weights setting 'int3'; use one of auto, float32"):
        pack(tmp_path, "int3")


def test_the_size_is_known_before_anything_is_packed(tmp_path: Path) -> None:
    tiny_model("gemma3").save_pretrained(tmp_path)
    plan = plan_packed(tmp_path, read_spec(tmp_path), "int8", keep=False)
    packed = plan.load(None)
    assert plan.nbytes == packed.nbytes
    assert packed.nbytes == packed.bytes_per_step  # tied
    assert sum(packed.bytes_by_format.values()) < packed.nbytes


def test_a_decode_step_does_not_read_an_untied_embedding(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    packed = pack(tmp_path)
    assert packed.bytes_per_step == packed.nbytes - packed.embedding.data.nbytes


def test_progress_rises_to_all_parameters(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    spec, seen = read_spec(tmp_path), []
    load_packed(tmp_path, spec, progress=lambda done, total: seen.append((done, total)), keep=False)
    assert seen == sorted(seen)
    assert seen[-1] == (spec.parameters, spec.parameters)


def test_the_table_says_what_the_spec_says(tmp_path: Path) -> None:
    tiny_model("gemma3-untied-capped").save_pretrained(tmp_path)
    packed = pack(tmp_path)
    table = packed.table(max_context=50, num_blocks=7, max_step_tokens=64, deterministic=True)
    assert [layer.window for layer in table.layers] == [9, 0, 9]
    assert table.layers[0].cosine.shape == table.layers[1].sine.shape == (50, 12)
    assert not np.array_equal(table.layers[0].cosine, table.layers[1].cosine)  # local and global rope
    assert (table.logit_softcap, table.layers[0].attention_softcap) == (3.0, 0.0)
    assert table.embedding_scale == packed.spec.embedding_scale == 8.0
    assert (table.num_blocks, table.max_step_tokens, table.deterministic) == (7, 64, True)


# ---- what is wrong is named ----


@pytest.mark.parametrize("weights", ["auto", "int8"])
@pytest.mark.parametrize("scale", [np.nan, np.inf])
def test_a_scale_that_is_not_finite_is_refused_by_tensor_and_file(
    scale: float, weights: str, tmp_path: Path
) -> None:
    path = tmp_path / "tiny.gguf"

    def pack_with_it(name: str, values: np.ndarray) -> tuple[np.ndarray, GGMLQuantizationType]:
        packed, kind = packed_as(GGMLQuantizationType.Q4_0)(name, values)
        if name == "blk.1.ffn_down.weight":
            packed[3, :2] = np.array([scale], dtype="<f2").view(np.uint8)
        return packed, kind

    write_gguf(tiny_model("llama"), path, pack_with_it)
    with pytest.raises(BrokenModel, match=r"tiny\.gguf: tensor blk\.1\.ffn_down\.weight .* not finite"):
        pack(path, weights)


@pytest.mark.parametrize(
    ("change", "weights", "complaint"),
    [
        ({"model.layers.1.mlp.up_proj.weight": None}, "auto", r"missing: model\.layers\.1\.mlp\.up_proj"),
        ({"model.layers.0.extra": torch.ones(2)}, "auto", r"not belong to a llama model .*layers\.0\.extra"),
        ({"model.norm.weight": torch.ones(65)}, "auto", r"norm\.weight has shape \[65\], .* says \[64\]"),
        ({"model.norm.weight": torch.full((64,), torch.nan)}, "auto", r"norm\.weight contains .* not finite"),
        (
            {"lm_head.weight": torch.full((131, 64), torch.inf)},
            "auto",
            r"lm_head\.weight (has|contains) .* not finite",
        ),
        (
            {"lm_head.weight": torch.full((131, 64), torch.nan)},
            "int8",
            r"lm_head\.weight (has|contains) .* not finite",
        ),
        ({"lm_head.weight": torch.full((131, 64), 1e7)}, "int8", r"lm_head\.weight .* not finite in int8"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    change: dict[str, torch.Tensor | None], weights: str, complaint: str, tmp_path: Path
) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(BrokenModel, match=complaint):
        pack(tmp_path, weights)


def test_a_model_that_the_library_cannot_compute_is_refused_with_the_reason(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    spec = read_spec(tmp_path)
    assert native_refusal(spec) is None
    layer = spec.layers[0]
    assert isinstance(layer.mixer, Attention)
    for changed, words in (
        (replace(layer, mixer=replace(layer.mixer, output_gate=True)), "gated outputs"),
        (replace(layer, ffn=Experts(8, 2, 20002)), "not 20002"),
        (replace(layer, ffn=Dense(20001)), "not 20001"),
        (replace(layer, mixer=replace(layer.mixer, head_dim=512, rope=RopeSpec(1e4, 512))), "not 512"),
    ):
        assert words in (native_refusal(replace(spec, layers=(changed,))) or "")


def test_nothing_of_this_imports_torch(tmp_path: Path) -> None:
    tiny_model("qwen2").to(torch.bfloat16).save_pretrained(tmp_path)
    program = f"""
import sys
from pathlib import Path
from ridgeline.models.weights.packed import load_packed
from ridgeline.models.spec.ffn import Dense, Experts
from ridgeline.models.spec.mixers import Attention
from ridgeline.models.spec.rope import RopeSpec
from ridgeline.models.spec.read_spec import read_spec
path = Path({str(tmp_path)!r})
load_packed(path, read_spec(path), keep=False).table(max_context=64, num_blocks=1, max_step_tokens=1)
print(sorted(sys.modules.keys() & {{"torch", "safetensors", "transformers"}}))
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=dict(os.environ), timeout=300
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"
