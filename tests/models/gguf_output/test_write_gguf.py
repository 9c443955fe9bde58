"""write_gguf: the tensors of llama.cpp's converter, a file that gguf and our loader read alike, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from ridgeline.models.errors import BrokenModel, UnsupportedModel
from ridgeline.models.files.gguf import GgufFile
from ridgeline.models.files.gguf_writer import GgufWriter, TensorEntry
from ridgeline.models.gguf_output.write import write_gguf
from ridgeline.models.spec.read_spec import read_spec
from ridgeline.models.text.tokenizer import Tokenizer
from ridgeline.models.weights.dequant import dequantize
from tests.models.gguf_output.tiny_tokenizers import save_letters
from tests.models.test_weights import assert_same, load
from tests.models.tiny_checkpoints import GGUF_MODELS, gguf_tensors, tiny_model

UNROTATED_LAYERS = {
    "smollm3",
    "cohere2",
    "llama4-published",
}  # whose q and k the converter reorders all the same


def save(name: str, directory: Path) -> Any:
    model = tiny_model(name)
    model.save_pretrained(directory)
    save_letters(directory, model.config.vocab_size)
    return model


@pytest.mark.parametrize("name", GGUF_MODELS)
def test_every_family_becomes_the_tensors_of_the_converter(name: str, tmp_path: Path) -> None:
    model = save(name, tmp_path / "hf")
    out = tmp_path / "tiny.gguf"
    write_gguf(tmp_path / "hf", "f32", out, requantize=name.endswith("mxfp4"))
    written, expected = gguf.GGUFReader(out), gguf_tensors(model)
    assert {tensor.name for tensor in written.tensors} == set(expected)
    rotated = {index for index, mixer in enumerate(read_spec(out).attentions) if mixer.rope is not None}
    for tensor in written.tensors:
        wanted = expected[tensor.name]
        assert list(tensor.shape[::-1]) == list(wanted.shape), tensor.name
        layer, _, stem = tensor.name.removeprefix("blk.").partition(".")
        if name in UNROTATED_LAYERS and stem.startswith(("attn_q", "attn_k")) and int(layer) not in rotated:
            continue
        np.testing.assert_array_equal(tensor.data.reshape(wanted.shape), wanted, err_msg=tensor.name)


def test_the_new_file_loads_to_the_weights_of_the_checkpoint(tmp_path: Path) -> None:
    save("llama", tmp_path / "hf")
    write_gguf(tmp_path / "hf", "f32", tmp_path / "tiny.gguf")
    assert_same(load(tmp_path / "tiny.gguf"), load(tmp_path / "hf"))
    tokenizer, original = Tokenizer.load(tmp_path / "tiny.gguf"), Tokenizer.load(tmp_path / "hf")
    messages = [{"role": "user", "content": "abc"}]
    assert tokenizer.encode_chat(messages) == original.encode_chat(messages)
    assert tokenizer.eos_id == original.eos_id


@pytest.mark.parametrize("recipe", ["q8_0", "q4_k_m", "bf16"])
def test_gguf_reads_every_tensor_as_we_do(recipe: str, tmp_path: Path) -> None:
    save("qwen3-wide", tmp_path / "hf")
    out = tmp_path / "tiny.gguf"
    report = write_gguf(tmp_path / "hf", recipe, out)
    ours = GgufFile(out)
    for tensor in gguf.GGUFReader(out).tensors:
        theirs = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(-1)
        assert tensor.tensor_type.name == ours.tensors[tensor.name].type
        values = dequantize(ours.raw(tensor.name), ours.tensors[tensor.name].type)
        np.testing.assert_array_equal(theirs.view(np.uint32), values.view(np.uint32), err_msg=tensor.name)
    assert report.nbytes == out.stat().st_size
    if recipe == "q4_k_m":
        assert ours.tensors["token_embd.weight"].type == "Q6_K"  # it is the head too
        assert ours.tensors["blk.0.attn_q.weight"].type == "Q4_K"
        assert ours.tensors["blk.0.attn_norm.weight"].type == "F32"
        assert 0.05 < report.errors["blk.0.attn_q.weight"] < 0.09


def test_a_16_bit_gguf_file_is_quantized_with_its_metadata_kept(tmp_path: Path) -> None:
    save("gemma3", tmp_path / "hf")
    wide, narrow = tmp_path / "wide.gguf", tmp_path / "narrow.gguf"
    write_gguf(tmp_path / "hf", "f16", wide, facts={"ridgeline.note": "kept"})
    done: list[tuple[int, int]] = []
    write_gguf(wide, "q8_0", narrow, lambda *counts: done.append(counts))
    before, after = GgufFile(wide), GgufFile(narrow)
    assert list(before.tensors) == list(after.tensors)
    changed = {"general.file_type"}
    for key in before.metadata.keys() - changed:
        assert after.raw_value(key) == before.raw_value(key), key
    assert after.metadata["general.file_type"] == 7
    assert after.metadata["ridgeline.note"] == "kept"
    total = sum(tensor.num_elements for tensor in after.tensors.values())
    assert done[0] == (0, total)
    assert done[-1] == (total, total)
    assert not list(tmp_path.glob("*.partial"))


def test_experts_are_stacked_and_have_their_own_importances(tmp_path: Path) -> None:
    model = save("qwen3-moe", tmp_path / "hf")
    name = "blk.1.ffn_down_exps.weight"
    expected = gguf_tensors(model)[name]
    importance = np.ones((expected.shape[0], expected.shape[2]), np.float32)
    importance[2, :16] = 100.0
    write_gguf(tmp_path / "hf", "q4_0", tmp_path / "plain.gguf")
    write_gguf(tmp_path / "hf", "q4_0", tmp_path / "weighted.gguf", importance={name: importance})
    errors = []
    for path in ("plain.gguf", "weighted.gguf"):
        file = GgufFile(tmp_path / path)
        values = dequantize(file.raw(name), file.tensors[name].type).reshape(expected.shape)
        errors.append(np.square(values - expected)[:, :, :16].sum(axis=(1, 2)))
    assert errors[1][2] < 0.95 * errors[0][2]
    np.testing.assert_array_equal(np.delete(errors[0], 2), np.delete(errors[1], 2))


def test_a_quantized_source_is_refused_unless_it_is_allowed(tmp_path: Path) -> None:
    save("llama", tmp_path / "hf")
    small, again = tmp_path / "small.gguf", tmp_path / "again.gguf"
    write_gguf(tmp_path / "hf", "q4_0", small)
    with pytest.raises(UnsupportedModel, match=r"token_embd.weight is quantized already \(Q4_0\)"):
        write_gguf(small, "q8_0", again)
    assert not again.exists()
    write_gguf(small, "q8_0", again, requantize=True)
    same = tmp_path / "same.gguf"
    write_gguf(small, "q4_0", same, requantize=True)  # tensors of the same type are copied
    first, second = GgufFile(small), GgufFile(same)
    assert all(bytes(first.raw(name)) == bytes(second.raw(name)) for name in first.tensors)
    assert not any(second.metadata["quantize.errors"])
    with pytest.raises(UnsupportedModel, match="is the model itself"):
        write_gguf(small, "q4_0", small, requantize=True)


def test_what_gguf_cannot_state_is_refused_before_anything_is_encoded(tmp_path: Path) -> None:
    save("llama-yarn", tmp_path / "yarn")
    write_gguf(tmp_path / "yarn", "f32", tmp_path / "yarn.gguf")  # yarn it can state
    save("qwen2-untied-windowed", tmp_path / "windowed")
    with pytest.raises(UnsupportedModel, match="cannot state"):
        write_gguf(tmp_path / "windowed", "f32", tmp_path / "windowed.gguf")
    assert not list(tmp_path.glob("windowed.gguf*"))


def test_weights_that_are_not_finite_leave_no_file(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = float("nan")
    model.save_pretrained(tmp_path / "hf")
    save_letters(tmp_path / "hf", model.config.vocab_size)
    with pytest.raises(BrokenModel, match=r"blk\.1\.ffn_up\.weight has values that are not finite"):
        write_gguf(tmp_path / "hf", "q8_0", tmp_path / "tiny.gguf")
    assert not list(tmp_path.glob("tiny.gguf*"))


def test_an_unknown_recipe_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"did you mean q4_k_m\?"):
        write_gguf(tmp_path, "Q4_KM", tmp_path / "tiny.gguf")


def test_metadata_of_every_type_is_read_by_gguf(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "general.architecture": "llama",
        "a.flag": True,
        "a.number": 7,
        "a.large": 1 << 40,
        "a.negative": -3,
        "a.float": 0.5,
        "a.text": "Grüße",
        "a.texts": ["a", "", "ü"],
        "a.numbers": [1, 2, 3],
        "a.floats": [0.25, -1.0],
    }
    path = tmp_path / "meta.gguf"
    writer = GgufWriter(path, values, [TensorEntry("t.weight", "F32", (3, 5)), TensorEntry("u", "F16", (7,))])
    for key, value in (("a.float", -2.0), ("a.floats", [0.5, 8.0])):
        writer.replace(key, value)
        values[key] = value
    for key, wrong in (("a.float", 1), ("a.floats", [1.0]), ("a.text", "longer than before")):
        with pytest.raises(ValueError, match="another type or length"):
            writer.replace(key, wrong)
    data = np.arange(15, dtype=np.float32).reshape(3, 5)
    writer.rows("t.weight")[:] = data.view(np.uint8)
    writer.finish()
    reader = gguf.GGUFReader(path)
    for key, value in values.items():
        assert reader.fields[key].contents() == value, key
    np.testing.assert_array_equal(reader.tensors[0].data, data)
    assert GgufFile(path).tensors["u"].shape == (7,)
