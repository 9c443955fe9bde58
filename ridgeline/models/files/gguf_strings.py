"""A list of strings in the metadata of a GGUF file, read on demand.

Made by `GgufFile`. A vocabulary with its merges is nearly all of a header, and takes many times its size as
Python strings, while the engine needs a few tokens of it and the tokenizer needs each list once.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from mmap import mmap
from typing import overload

from ridgeline.models.errors import BrokenModel

LENGTH_BYTES = 8  # before every string
_SHOWN = 16  # strings shown in a message


class GgufStrings(Sequence[str]):
    """`bounds`: where the strings end in the file, preceded by where the first one's length begins."""

    def __init__(self, source: mmap, bounds: array[int], where: str) -> None:
        self._source = source
        self._bounds = bounds
        self._where = where  # the file's name, for messages

    def __len__(self) -> int:
        return len(self._bounds) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        places = range(len(self))[index]
        if isinstance(places, range):
            return [self[place] for place in places]
        begin, end = self._bounds[places : places + 2]
        try:
            return self._source[begin + LENGTH_BYTES : end].decode()
        except UnicodeDecodeError as error:
            raise self._corrupt(begin, error) from error

    def __iter__(self) -> Iterator[str]:
        first = begin = self._bounds[0]
        data = self._source[first : self._bounds[-1]]  # slicing bytes is faster than slicing a map
        try:
            for end in self._bounds[1:]:
                yield data[begin - first + LENGTH_BYTES : end - first].decode()
                begin = end
        except UnicodeDecodeError as error:
            raise self._corrupt(begin, error) from error

    def __repr__(self) -> str:
        return repr(self[:_SHOWN])

    def _corrupt(self, at: int, error: UnicodeDecodeError) -> BrokenModel:
        return BrokenModel(f"{self._where}: is corrupt near byte {at}: {error}")
