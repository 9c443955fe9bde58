"""GGUF tensor tables that claim what cannot be: each is refused by file, tensor and reason."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from ridgeline.models.errors import BrokenModel, ModelError
from ridgeline.models.files import gguf
from ridgeline.models.files.gguf import GgufFile

F32, Q4_0, Q4_K = 0, 2, 12
ALIGNMENT = 32


@dataclass(frozen=True)
class Entry:
    """A line of the tensor table; dims are in the file's order, innermost first."""

    name: bytes = b"first"
    dims: tuple[int, ...] = (32, 4)
    type: int = F32
    offset: int = 0


def file_of(
    path: Path,
    *entries: Entry,
    data_bytes: int = 1024,
    alignment: int | None = None,
    count: int | None = None,
) -> Path:
    keys = b"" if alignment is None else text(b"general.alignment") + struct.pack("<II", 4, alignment)
    header = (
        b"GGUF" + struct.pack("<IQQ", 3, len(entries) if count is None else count, int(bool(keys))) + keys
    )
    for entry in entries:
        header += text(entry.name) + struct.pack("<I", len(entry.dims))
        header += struct.pack(f"<{len(entry.dims)}Q", *entry.dims) + struct.pack(
            "<IQ", entry.type, entry.offset
        )
    padding = -len(header) % (alignment or ALIGNMENT)
    path.write_bytes(header + bytes(padding + data_bytes))
    return path


def text(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


def test_tensors_side_by_side_are_read(tmp_path: Path) -> None:
    """Else the refusals below would mean nothing."""
    entries = [Entry(), Entry(b"second", (32, 16), Q4_0, 512), Entry(b"third", (1,), F32, 800)]
    file = GgufFile(file_of(tmp_path / "whole.gguf", *entries))
    assert [tensor.shape for tensor in file.tensors.values()] == [(4, 32), (16, 32), (1,)]
    assert [tensor.nbytes for tensor in file.tensors.values()] == [512, 288, 4]
    assert len(file.raw("second")) == 288


@pytest.mark.parametrize(
    "dims",
    [
        (0,),
        (32, 0),
        (2**63, 2),  # the product is 2^64: 0 in 64-bit arithmetic
        (2**32, 2**32),
        (2**64 - 1,),  # -1 as a signed number
        (2**31, 1),
        (32, 2**64 - 32),
        (1, 1, 1, 2**40),
    ],
)
def test_impossible_dimensions_are_refused(dims: tuple[int, ...], tmp_path: Path) -> None:
    path = file_of(tmp_path / "dims.gguf", Entry(dims=dims))
    with pytest.raises(BrokenModel, match=r"dims\.gguf: tensor first .*(invalid shape|should be at)"):
        GgufFile(path)


@pytest.mark.parametrize("count", [0, 5, 2**32 - 1])
def test_an_impossible_number_of_dimensions_is_refused(count: int, tmp_path: Path) -> None:
    path = file_of(tmp_path / "many.gguf", Entry(dims=(1, 1)))
    content = path.read_bytes().replace(struct.pack("<IQQ", 2, 1, 1), struct.pack("<IQQ", count, 1, 1))
    path.write_bytes(content)
    with pytest.raises(BrokenModel, match=rf"many\.gguf: tensor first claims {count} dimensions"):
        GgufFile(path)


@pytest.mark.parametrize(("kind", "width"), [(Q4_0, 31), (Q4_0, 48), (Q4_K, 32), (Q4_K, 255)])
def test_rows_that_are_no_whole_blocks_are_refused(kind: int, width: int, tmp_path: Path) -> None:
    path = file_of(tmp_path / "rows.gguf", Entry(dims=(width, 8), type=kind))
    with pytest.raises(BrokenModel, match=rf"rows\.gguf: .* invalid shape \(8, {width}\)"):
        GgufFile(path)


@pytest.mark.parametrize("offset", [1024 - 480, 1024, 2**40, 2**64 - 32])
def test_a_tensor_outside_the_file_is_refused(offset: int, tmp_path: Path) -> None:
    path = file_of(tmp_path / "outside.gguf", Entry(offset=offset))
    with pytest.raises(
        BrokenModel, match=r"outside\.gguf: tensor first should be at .* truncated or altered"
    ):
        GgufFile(path)


@pytest.mark.parametrize("offset", [1, 16, 33, 2**64 - 1])
def test_a_misaligned_offset_is_refused(offset: int, tmp_path: Path) -> None:
    path = file_of(tmp_path / "odd.gguf", Entry(offset=offset))
    with pytest.raises(
        BrokenModel, match=rf"odd\.gguf: tensor first is at offset {offset}, not a multiple of 32"
    ):
        GgufFile(path)


@pytest.mark.parametrize("offset", [0, 32, 480])
def test_overlapping_tensors_are_refused_whichever_comes_first(offset: int, tmp_path: Path) -> None:
    entries = [Entry(), Entry(b"second", (4,), F32, offset)]
    for number, order in enumerate((entries, entries[::-1])):
        path = file_of(tmp_path / f"overlap{number}.gguf", *order)
        with pytest.raises(
            BrokenModel, match=rf"overlap{number}\.gguf: tensors (first|second) and .* overlap"
        ):
            GgufFile(path)


def test_a_tensor_named_twice_is_refused(tmp_path: Path) -> None:
    path = file_of(tmp_path / "twice.gguf", Entry(), Entry(offset=512))
    with pytest.raises(BrokenModel, match=r"twice\.gguf: lists the tensor first twice"):
        GgufFile(path)


@pytest.mark.parametrize("kind", [4, 5, 9, 31, 2**32 - 1])
def test_an_unknown_type_is_refused_with_the_known_ones(kind: int, tmp_path: Path) -> None:
    path = file_of(tmp_path / "type.gguf", Entry(type=kind))
    with pytest.raises(ModelError, match=rf"type\.gguf: tensor first has GGUF type {kind}; supported: F32"):
        GgufFile(path)


@pytest.mark.parametrize("alignment", [0, 1, 4, 33, 48, 2**32 - 1])
def test_an_impossible_alignment_is_refused(alignment: int, tmp_path: Path) -> None:
    path = file_of(tmp_path / "aligned.gguf", Entry(), alignment=32)
    stated = struct.pack("<II", 4, 32)
    path.write_bytes(path.read_bytes().replace(stated, struct.pack("<II", 4, alignment)))
    with pytest.raises(BrokenModel, match=rf"aligned\.gguf: general\.alignment is {alignment}"):
        GgufFile(path)


def test_an_alignment_beyond_the_file_is_a_file_too_short(tmp_path: Path) -> None:
    path = file_of(tmp_path / "aligned.gguf", Entry(), alignment=32)
    stated = struct.pack("<II", 4, 32)
    path.write_bytes(path.read_bytes().replace(stated, struct.pack("<II", 4, 2**31)))
    with pytest.raises(BrokenModel, match=r"aligned\.gguf: tensor first should be at bytes 2147483648"):
        GgufFile(path)


@pytest.mark.parametrize("count", [2, 2**20, 2**20 + 1, 2**64 - 1])
def test_more_tensors_claimed_than_there_are_is_refused(count: int, tmp_path: Path) -> None:
    path = file_of(tmp_path / "count.gguf", Entry(), count=count)
    with pytest.raises(BrokenModel, match=r"count\.gguf: "):
        GgufFile(path)


@pytest.mark.parametrize("name", [b"a\x1b[2J", b"a\n", b"x" * 300, b"\xff\xfe"])
def test_a_name_that_cannot_be_shown_is_refused_without_showing_it(name: bytes, tmp_path: Path) -> None:
    """It would end in a terminal or a log."""
    path = file_of(tmp_path / "name.gguf", replace(Entry(), name=name))
    with pytest.raises(BrokenModel, match=r"name\.gguf: ") as refused:
        GgufFile(path)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < len(str(path)) + 400


def test_a_header_without_end_is_refused_before_all_of_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An array of strings costs several times its size in memory, so the header's size is bounded."""
    monkeypatch.setattr(gguf, "MAX_HEADER_BYTES", 10_000)
    strings = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text(b"k") + struct.pack("<IIQ", 9, 8, 2_000)
    path = tmp_path / "long.gguf"
    path.write_bytes(strings + 2_000 * text(b"ab"))
    with pytest.raises(BrokenModel, match=r"long\.gguf: claims a header of over"):
        GgufFile(path)
    monkeypatch.undo()
    assert len(GgufFile(path).metadata["k"]) == 2_000


def test_an_empty_array_of_an_unknown_type_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text(b"k") + struct.pack("<IIQ", 9, 77, 0))
    with pytest.raises(BrokenModel, match=r"empty\.gguf: has a metadata array of unknown type 77"):
        GgufFile(path)


def test_flags_are_true_for_every_byte_but_zero(tmp_path: Path) -> None:
    path = tmp_path / "flags.gguf"
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text(b"k") + struct.pack("<IIQ", 9, 7, 3)
    path.write_bytes(header + bytes([0, 1, 7]))
    assert list(GgufFile(path).metadata["k"]) == [False, True, True]
