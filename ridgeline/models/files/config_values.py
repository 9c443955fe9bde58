"""Typed, strict access to untrusted dictionaries: config.json, or the metadata of a GGUF file.

Used by the readers of ModelSpec. A missing or wrongly typed value is a BrokenModel that names the file, the
key and the value found; nothing is converted or guessed. Records which keys were read.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from ridgeline.models.errors import BrokenModel
from ridgeline.models.files.gguf_strings import GgufStrings

_MISSING = object()
SHOWN_CHARACTERS = 60
LARGEST = 1 << 53  # far above any size, count or id; larger integers are not exact as floats


class ConfigValues:
    """`where` names the file in errors, `prefix` precedes keys there, `defaults` fill in absent keys.

    `names`: the file's own names of keys, where they differ from those that the reader uses.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        where: str,
        *,
        prefix: str = "",
        defaults: Mapping[str, Any] | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.where = where
        self._values = values
        self.prefix = prefix
        self._defaults = defaults or {}
        self._names = names or {}
        self._read: set[str] = set()

    @classmethod
    def below(cls, prefix: str, values: Mapping[str, Any], where: str) -> ConfigValues:
        """The keys that start with `prefix`: read without it, named in errors with it."""
        inside = {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
        return cls(inside, where, prefix=prefix)

    def integer(self, key: str, *, minimum: int = 1) -> int:
        value = self.optional_integer(key, minimum=minimum)
        if value is None:
            raise self._wrong(key, "an integer")
        return value

    def optional_integer(self, key: str, *, minimum: int = 1) -> int | None:
        value = self._get(key)
        if value is None or value is _MISSING:
            return None
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._wrong(key, "an integer")
        if not minimum <= value <= LARGEST:
            bound = f"at least {minimum}" if value < minimum else f"at most {LARGEST}"
            raise BrokenModel(f"{self.where}: {self.shown(key)} is {shown(value)}; it must be {bound}")
        return value

    def number(self, key: str) -> float:
        value = self.optional_number(key)
        if value is None:
            raise self._wrong(key, "a number")
        return value

    def optional_number(self, key: str) -> float | None:
        """A number above zero and below LARGEST, as are all numbers in a model configuration."""
        value = self._get(key)
        if value is None or value is _MISSING:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._wrong(key, "a number")
        if not 0 < value <= LARGEST:
            raise BrokenModel(
                f"{self.where}: {self.shown(key)} is {shown(value)}; it must be a number above 0"
            )
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key)
        if value is None or value is _MISSING:
            return default
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def text(self, key: str) -> str:
        value = self.optional_text(key)
        if value is None:
            raise self._wrong(key, "a string")
        return value

    def optional_text(self, key: str) -> str | None:
        value = self._get(key)
        if value is None or value is _MISSING:
            return None
        if not isinstance(value, str):
            raise self._wrong(key, "a string")
        return value

    def optional_texts(self, key: str) -> Sequence[str] | None:
        value = self._get(key)
        if value is None or value is _MISSING:
            return None
        if isinstance(value, GgufStrings):
            return value
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, "a list of strings")
        return value

    def integers(self, key: str) -> list[int]:
        """A list of integers, or one integer as a list; empty when absent or null."""
        value = self._get(key)
        if value is None or value is _MISSING:
            return []
        items = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in items):
            raise self._wrong(key, "an integer or a list of integers")
        return items

    def numbers(self, key: str, *, whole: bool = False) -> Sequence[float] | None:
        """A list of numbers, or of integers with `whole`: GGUF's form of scores and token types."""
        value = self._get(key)
        if value is None or value is _MISSING:
            return None
        if isinstance(value, array):
            fits = not whole or value.typecode not in "fd"
        else:
            kinds = int if whole else int | float
            fits = isinstance(value, list) and all(
                isinstance(item, kinds) and not isinstance(item, bool) for item in value
            )
        if not fits:
            raise self._wrong(key, "a list of integers" if whole else "a list of numbers")
        return cast(Sequence[float], value)

    def mapping(self, key: str) -> dict[str, Any] | None:
        value = self._get(key)
        if value is None or value is _MISSING:
            return None
        if not isinstance(value, dict):
            raise self._wrong(key, "an object")
        return value

    def objects(self, key: str) -> list[dict[str, Any]]:
        """A list of objects; empty when absent or null."""
        value = self._get(key)
        if value is None or value is _MISSING:
            return []
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self._wrong(key, "a list of objects")
        return value

    def has(self, key: str) -> bool:
        """Whether the key is present and enables something."""
        value = self._get(key)
        return value is not _MISSING and is_set(value)

    def states(self, key: str) -> bool:
        """Whether the file itself has a value for the key, other than null."""
        return self._values.get(self._names.get(key, key)) is not None

    def is_null(self, key: str) -> bool:
        """Null, or absent where that means null."""
        return self._get(key) is None

    def unread(self) -> list[str]:
        """Keys with a value that were never read, in alphabetical order."""
        return sorted(key for key, value in self._values.items() if key not in self._read and is_set(value))

    def shown(self, key: str) -> str:
        """The key as the file has it, for messages."""
        return self.prefix + self._names.get(key, key)

    def _get(self, key: str) -> Any:
        stored = self._names.get(key, key)
        self._read.add(stored)
        if stored in self._values:
            return self._values[stored]
        return self._defaults.get(key, _MISSING)

    def _wrong(self, key: str, expected: str) -> BrokenModel:
        value = self._get(key)
        found = "is missing" if value is _MISSING else f"is {shown(value)}"
        return BrokenModel(f"{self.where}: {self.shown(key)} {found}; {expected} was expected")


def read_json_object(path: Path) -> dict[str, Any]:
    """The file's content, which must be a JSON object; errors name the file."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise BrokenModel(f"{path}: is not readable JSON: {error}") from error
    if not isinstance(content, dict):
        raise BrokenModel(f"{path}: holds {type(content).__name__}, not a JSON object")
    return content


def is_set(value: Any) -> bool:
    """Whether a value enables something: null, false, 0 and empty containers do not."""
    return bool(value) if not hasattr(value, "__len__") else len(value) > 0


def shown(value: Any) -> str:
    """The value as written in the file, shortened for a message."""
    text = json.dumps(value, default=repr, ensure_ascii=False)
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…"
