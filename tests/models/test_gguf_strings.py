"""Lists of strings stay in a GGUF file until they are asked for: read one by one, in turn, or refused."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from ridgeline.models.errors import BrokenModel
from ridgeline.models.files.gguf import GgufFile
from ridgeline.models.files.gguf_strings import GgufStrings
from ridgeline.models.text.tokenizer import Tokenizer

STRINGS = ["", "a", "é", "ab c", "", "東京"]


def strings_of(path: Path, *contents: bytes) -> GgufStrings:
    items = b"".join(struct.pack("<Q", len(content)) + content for content in contents)
    key = struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 8, len(contents))
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + items)
    strings = GgufFile(path).metadata["k"]
    assert isinstance(strings, GgufStrings)
    return strings


def test_strings_are_read_as_a_list_would_give_them(tmp_path: Path) -> None:
    strings = strings_of(tmp_path / "some.gguf", *(text.encode() for text in STRINGS))
    assert len(strings) == len(STRINGS)
    assert list(strings) == STRINGS
    assert [strings[index] for index in range(-6, 6)] == STRINGS * 2
    assert strings[1:-1:2] == STRINGS[1:-1:2]
    assert "é" in strings
    assert repr(strings) == repr(STRINGS)
    for outside in (6, -7):
        with pytest.raises(IndexError):
            strings[outside]


def test_a_string_that_is_no_text_is_refused_by_the_file_when_it_is_read(tmp_path: Path) -> None:
    strings = strings_of(tmp_path / "broken.gguf", b"good", b"\xff\xfe")
    assert strings[0] == "good"
    with pytest.raises(BrokenModel, match=r"broken\.gguf: is corrupt near byte"):
        strings[1]
    with pytest.raises(BrokenModel, match=r"broken\.gguf: is corrupt near byte"):
        list(strings)


def test_an_empty_list_is_empty(tmp_path: Path) -> None:
    assert list(strings_of(tmp_path / "empty.gguf")) == []


def python_peak_bytes(read: Callable[[Path], object], path: Path) -> int:
    tracemalloc.start()
    try:
        read(path)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_opening_a_file_takes_a_few_bytes_for_each_string(smollm2_path: Path) -> None:
    """49,152 tokens and as many merges: 9 MB as Python strings."""
    assert python_peak_bytes(GgufFile, smollm2_path) < 1_500_000


def test_a_tokenizer_is_built_without_a_second_copy_of_its_vocabulary(smollm2_path: Path) -> None:
    """The tokens by id, and a pair of them for each merge: 12 MB. Strings of the merges' own: 9 MB more."""
    assert python_peak_bytes(Tokenizer.load, smollm2_path) < 16_000_000
