"""The ctypes binding of the native library: it mirrors the header and lets nothing be misread."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from ridgeline.ops.cpu import interface, library, scan
from ridgeline.ops.cpu.library import Format, NativeDecoder, NativeError, NormTable, PackedMatrix
from tests.ops.tiny_decoder import floats, ints, tiny_table

HEADER = Path(__file__).parents[2] / "native/include/ridgeline_native.h"
STRUCTS = {
    "rl_matrix": interface.CMatrix,
    "rl_norm": interface.CNorm,
    "rl_experts": interface.CExperts,
    "rl_layer": interface.CLayer,
    "rl_decoder": interface.CDecoder,
    "rl_step": interface.CStep,
    "rl_encoder_layer": interface.CEncoderLayer,
    "rl_encoder": interface.CEncoder,
    "rl_texts": interface.CTexts,
}
ENUMS = {
    "RL_": Format,
    "RL_KV_": library.KvFormat,
    "RL_PEAK_": library.Peak,
    "RL_POOL_": interface.Pooling,
}
CONSTANTS = {
    "RL_ABI_VERSION": library.ABI_VERSION,
    "RL_BLOCK_TOKENS": library.BLOCK_TOKENS,
    "RL_PANEL": library.PANEL_ROWS,
    "RL_GROUP": library.GROUP_SIZE,
    "RL_SILU": library.Activation.SILU,
    "RL_GELU_TANH": library.Activation.GELU_TANH,
    "RL_GELU_ERF": library.Activation.GELU_ERF,
    "RL_RELU": library.Activation.RELU,
    **{f"{prefix}{item.name}": item.value for prefix, enum in ENUMS.items() for item in enum},
}


# ---- the mirror ----


def test_structs_and_constants_are_what_a_compiler_makes_of_the_header(tmp_path: Path) -> None:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    mirrored: dict[str, int] = dict(CONSTANTS)
    lines = [f'  std::printf("{name} %d\\n", int({name}));' for name in CONSTANTS]
    for name, struct in STRUCTS.items():
        mirrored[name] = ctypes.sizeof(struct)
        lines.append(f'  std::printf("{name} %zu\\n", sizeof({name}));')
        for field, *_ in struct._fields_:
            mirrored[f"{name}.{field}"] = getattr(struct, field).offset
            lines.append(f'  std::printf("{name}.{field} %zu\\n", offsetof({name}, {field}));')
    source = tmp_path / "layout.cpp"
    body = "\n".join(lines)
    source.write_text(
        f'#include <cstddef>\n#include <cstdio>\n#include "{HEADER}"\nint main() {{\n{body}\n}}\n'
    )
    subprocess.run([compiler, str(source), "-o", str(tmp_path / "layout")], check=True)
    printed = subprocess.run([str(tmp_path / "layout")], capture_output=True, text=True, check=True).stdout
    assert mirrored == {name: int(value) for name, value in (line.split() for line in printed.splitlines())}


def test_every_function_of_the_header_is_bound_with_as_many_arguments() -> None:
    declared = re.findall(r"\b(rl_\w+)\(([^)]*)\);", re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.S))
    counts = {name: 0 if arguments == "void" else arguments.count(",") + 1 for name, arguments in declared}
    loaded = scan._library()  # binds its functions to what library.load() gives
    assert counts == {name: len(getattr(loaded, name).argtypes) for name in counts}
    assert set(counts) == {*interface._FUNCTIONS, *scan._FUNCTIONS}


# ---- loading ----


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "is missing"), (b"not a library", "cannot be loaded"), (b"", "cannot be loaded")],
)
def test_a_library_that_cannot_be_used_is_unavailable_with_the_reason(
    content: bytes | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "libridgeline_native.so"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setattr(interface, "LIBRARY_PATH", path)
    with pytest.raises(library.NativeUnavailable, match=reason) as error:
        interface.load.__wrapped__()
    assert str(path) in str(error.value)


def test_a_library_of_another_version_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "ABI_VERSION", 999)
    with pytest.raises(library.NativeUnavailable, match="but ridgeline needs 999"):
        interface.load.__wrapped__()


def test_the_variable_chooses_the_instruction_set_and_the_argument_overrules_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    best, *_, last = library.available_isas()
    monkeypatch.delenv(library.ISA_VARIABLE, raising=False)
    assert library.choose_isa() == best
    monkeypatch.setenv(library.ISA_VARIABLE, "portable")
    assert library.choose_isa() == last == "portable"
    assert library.choose_isa(best) == best


def test_an_instruction_set_that_does_not_run_is_refused_with_those_that_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(library.ISA_VARIABLE, "sse9")
    with pytest.raises(NativeError, match=r"RIDGELINE_ISA=sse9 does not run .* available: .*portable"):
        library.choose_isa()


def test_ceilings_are_measured() -> None:
    assert library.measure_read(1 << 20, threads=1) > 0
    assert library.measure_read_of(np.ones(1 << 20, np.uint8), threads=2) > 0
    assert library.measure_peak(library.Peak.F32, threads=1) > 0


def test_a_buffer_that_cannot_be_had_is_an_error_and_not_the_end() -> None:
    with pytest.raises(library.NativeError, match="no memory"):
        library.measure_read(1 << 60, threads=1)


# ---- packing ----


@pytest.mark.parametrize("format", list(Format))
def test_a_matrix_packed_into_a_given_buffer_is_the_same_as_one_packed_into_its_own(format: Format) -> None:
    source = floats(40, 70)
    given = library.aligned_bytes(library.packed_bytes(format, 40, 70))
    own = library.pack_float(format, source)
    into = library.pack_float(format, source, out=given)
    assert into.data is given
    assert np.array_equal(own.data, given)
    assert np.array_equal(library.unpack(own, 5, 20), library.unpack(own)[5:25])


GGUF_NAMES = {2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0"}


@pytest.mark.parametrize("gguf_type", sorted(GGUF_NAMES))
def test_gguf_blocks_unpack_to_what_the_gguf_package_reads(gguf_type: int) -> None:
    kind = gguf.GGMLQuantizationType[GGUF_NAMES[gguf_type]]
    blocks = gguf.quants.quantize(floats(24, 96), kind)
    expected = gguf.quants.dequantize(blocks, kind)
    assert np.array_equal(library.unpack(library.pack_gguf(gguf_type, blocks, 96)), expected)
    rows = np.array([3, -1, 23, 0], np.int32)
    mapped = library.unpack(library.pack_gguf(gguf_type, blocks, 96, row_map=rows))
    assert np.array_equal(mapped, np.where(rows[:, None] < 0, np.float32(0), expected[rows]))


def test_the_table_of_gguf_types_agrees_with_the_gguf_package() -> None:
    for number, blocks in library.GGUF_TYPES.items():
        sizes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)]
        assert (blocks.block_weights, blocks.block_bytes) == sizes


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(NativeError, match="not finite"):
        library.pack_float(Format.Q8_H, np.full((4, 32), np.nan, np.float32))
    with pytest.raises(NativeError, match="float32 array"):
        library.pack_float(Format.F32, np.zeros((4, 32)))  # type: ignore[arg-type]
    with pytest.raises(NativeError, match="not contiguous"):
        library.pack_float(Format.F32, floats(4, 64)[:, ::2])
    with pytest.raises(NativeError, match="cannot be packed"):
        library.packed_bytes(Format.F32, 0, 32)
    with pytest.raises(NativeError, match="no lossless packed format"):
        library.pack_gguf(11, np.zeros(110, np.uint8), 256)  # Q3_K
    with pytest.raises(NativeError, match="not whole rows"):
        library.pack_gguf(2, np.zeros(35, np.uint8), 32)
    with pytest.raises(NativeError, match="row 2 of a source of 2"):
        library.pack_gguf(2, np.zeros(36, np.uint8), 32, row_map=np.array([2], np.int32))


def test_a_buffer_that_a_kernel_would_read_past_is_refused() -> None:
    size = library.packed_bytes(Format.BF16, 16, 32)
    data = library.aligned_bytes(size + 64)
    PackedMatrix(16, 32, Format.BF16, data[:size])
    with pytest.raises(NativeError, match="BF16 matrix"):
        PackedMatrix(16, 32, Format.BF16, data[: size - 1])
    with pytest.raises(NativeError, match="aligned"):
        PackedMatrix(16, 32, Format.BF16, data[1 : size + 1])
    with pytest.raises(NativeError, match="bias"):
        PackedMatrix(16, 32, Format.BF16, data[:size], np.zeros(15, np.float32))
    read_only = data[:size]
    read_only.flags.writeable = False
    with pytest.raises(NativeError, match="read-only"):
        library.pack_float(Format.BF16, floats(16, 32), out=read_only)
    with pytest.raises(NativeError, match="rows 10 to 20"):
        library.unpack(PackedMatrix(16, 32, Format.BF16, read_only), 10, 10)


# ---- decoders ----


def step(decoder: NativeDecoder, tokens: list[int], start: int, block: int) -> library.Floats:
    """Runs these tokens of one sequence, which lies in one KV block, and returns the last one's logits."""
    positions = np.arange(start, start + len(tokens), dtype=np.int32)
    count = len(tokens)
    return decoder.execute(ints(*tokens), positions, ints(0, count), ints(block)[None], ints(count - 1))


def test_a_decoder_computes_in_the_callers_buffer_and_continues_from_a_copied_block() -> None:
    decoder = NativeDecoder(tiny_table(), threads=1)
    assert decoder.isa in library.available_isas()
    assert decoder.bytes > 0
    whole = step(decoder, [3, 1, 4, 1, 5], 0, block=0)
    assert whole.shape == (1, 40)
    assert np.isfinite(whole).all()
    step(decoder, [3, 1, 4, 1], 0, block=2)
    decoder.copy_block(2, 5)
    np.testing.assert_allclose(step(decoder, [5], 4, block=5), whole, rtol=1e-4, atol=1e-5)
    out = np.full((3, 40), np.nan, np.float32)
    arguments = (ints(3, 1, 4, 1, 5), np.arange(5, dtype=np.int32), ints(0, 5), ints(1)[None], ints(4))
    logits = decoder.execute(*arguments, out=out)
    assert np.shares_memory(logits, out)
    assert np.array_equal(logits, whole)
    assert np.isnan(out[1:]).all()


def test_the_best_token_is_that_of_the_largest_logit_and_none_where_logits_are_no_numbers() -> None:
    table = tiny_table()
    each = np.arange(20, dtype=np.int32)  # in one KV block and a part of another
    arrays = (each, each, ints(0, 20), ints(3, 1)[None], each)
    decoder = NativeDecoder(table, threads=2)
    assert decoder.best_tokens(*arrays) == decoder.execute(*arrays).argmax(axis=1).tolist()
    assert decoder.best_tokens(*arrays[:4], ints()) == []
    broken = replace(table, final_norm=NormTable(np.full(32, np.nan, np.float32)))
    assert NativeDecoder(broken, threads=2).best_tokens(*arrays) == [-1] * 20
    with pytest.raises(NativeError, match="rejected a step"):
        decoder.best_tokens(*arrays[:4], ints(20))
    with pytest.raises(NativeError, match="positions"):
        decoder.best_tokens(each, each[:19], *arrays[2:])


def test_a_step_whose_arrays_are_not_as_long_as_they_say_is_refused() -> None:
    decoder = NativeDecoder(tiny_table(), threads=1)
    good = {
        "token_ids": ints(1, 2),
        "positions": ints(0, 1),
        "query_starts": ints(0, 2),
        "block_tables": ints(0)[None],
        "logit_rows": ints(1),
    }
    decoder.execute(**good)
    for name, bad in (
        ("positions", ints(0)),
        ("positions", np.array([0, 1])),
        ("block_tables", ints(0, 1)[:, None]),
        ("token_ids", ints(1, 0, 2, 0)[::2]),
    ):
        with pytest.raises(NativeError, match=name):
            decoder.execute(**{**good, name: bad})
    with pytest.raises(NativeError, match="1 rows of logits do not fit in the 0 given"):
        decoder.execute(**good, out=np.empty((0, 40), np.float32))
    for name, bad in (
        ("token_ids", ints(1, 40)),
        ("positions", ints(63, 64)),
        ("query_starts", ints(0, 3)),
        ("block_tables", ints(8)[None]),
        ("logit_rows", ints(2)),
    ):
        with pytest.raises(NativeError, match="rejected a step"):
            decoder.execute(**{**good, name: bad})


def test_a_decoder_whose_tables_do_not_fit_its_shape_is_refused() -> None:
    table = tiny_table()
    with pytest.raises(NativeError, match="final_norm"):
        NativeDecoder(replace(table, final_norm=NormTable(np.ones(31, np.float32))), threads=1)
    short = replace(table.layers[0], cosine=table.layers[0].cosine[:63])
    with pytest.raises(NativeError, match="cosine"):
        NativeDecoder(replace(table, layers=[short]), threads=1)
    with pytest.raises(NativeError, match="could not create this model"):
        NativeDecoder(replace(table, layers=[replace(table.layers[0], ffn=64)]), threads=1)


def test_a_closed_decoder_says_so() -> None:
    decoder = NativeDecoder(tiny_table(), threads=1)
    decoder.close()
    decoder.close()
    with pytest.raises(NativeError, match="closed"):
        decoder.copy_block(0, 1)
