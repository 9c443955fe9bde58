"""Reads data files: JSONL (plain or .gz) and text. Errors name the file, the line and the field."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ridgeline.lab.errors import BadInput

DATA_VARIABLE = "RIDGELINE_DATA"


class Line:
    """One object of a JSONL file, read field by field."""

    def __init__(self, path: Path, number: int, fields: dict[str, Any]) -> None:
        self.path, self.number, self.fields = path, number, fields

    def __contains__(self, name: str) -> bool:
        return name in self.fields

    def wrong(self, name: str, message: str) -> BadInput:
        return BadInput(f"{self.path}, line {self.number}, field {name!r}: {message}")

    def text(self, name: str, default: str | None = None) -> str:
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self.wrong(name, f"must be a string, got {_kind(value)}")
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._value(name, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.wrong(name, f"must be an integer, got {_kind(value)}")
        return value

    def texts(self, name: str, fewest: int = 1, default: tuple[str, ...] | None = None) -> tuple[str, ...]:
        value = self._value(name, default)
        if isinstance(value, tuple):
            return value
        if not isinstance(value, list) or not all(isinstance(part, str) for part in value):
            raise self.wrong(name, f"must be a list of strings, got {_kind(value)}")
        if len(value) < fewest:
            raise self.wrong(name, f"needs at least {fewest} entries, got {len(value)}")
        return tuple(value)

    def place(self, name: str, count: int) -> int:
        """An index below `count`, also as digits in a string: some published files have it so."""
        given = self._value(name, None)
        value = int(given) if isinstance(given, str) and given.isdecimal() else self.integer(name)
        if not 0 <= value < count:
            raise self.wrong(name, f"must be between 0 and {count - 1}, got {value}")
        return value

    def one_of(self, name: str, allowed: tuple[str, ...], default: str) -> str:
        value = self.text(name, default)
        if value not in allowed:
            raise self.wrong(name, f"must be one of {', '.join(allowed)}, got {value!r}")
        return value

    def _value(self, name: str, default: Any) -> Any:
        if name not in self.fields:
            if default is None:
                raise self.wrong(name, f"is missing; the line has {', '.join(self.fields) or 'no fields'}")
            return default
        return self.fields[name]


def jsonl(path: Path) -> Iterator[Line]:
    """The objects of a file, in its order; empty lines are skipped."""
    for number, text in enumerate(_read(path).split("\n"), start=1):
        if not text.strip():
            continue
        try:
            fields = json.loads(text)
        except ValueError as error:
            raise BadInput(f"{path}, line {number}: not JSON: {error}") from None
        if not isinstance(fields, dict):
            raise BadInput(f"{path}, line {number}: must be an object, got {_kind(fields)}")
        yield Line(path, number, fields)


def _read(path: Path) -> str:
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rt", encoding="utf-8") as file:
                return file.read()
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise BadInput(f"{path}: there is no such file") from None
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: not UTF-8 at byte {error.start}") from None
    except (OSError, EOFError) as error:
        raise BadInput(f"{path}: cannot be read: {error}") from None


def plain_text(path: Path) -> str:
    return _read(path)


def data_folder(given: str | Path | None) -> Path | None:
    """The folder of --data, else of RIDGELINE_DATA; None if neither is set."""
    named = str(given) if given else os.environ.get(DATA_VARIABLE, "")
    if not named:
        return None
    folder = Path(named).expanduser()
    if not folder.is_dir():
        raise BadInput(f"{folder}: no such folder; give the data's folder with --data or {DATA_VARIABLE}")
    return folder


def find_file(folder: Path | None, task: str, names: tuple[str, ...]) -> Path:
    """The first of these files in the data folder."""
    if folder is None:
        raise BadInput(f"task {task} needs data: give the folder with --data or {DATA_VARIABLE}")
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise BadInput(f"task {task}: {folder} has none of {', '.join(names)}")


def _kind(value: Any) -> str:
    kinds = {type(None): "null", bool: "a boolean", str: "a string", list: "a list", dict: "an object"}
    return kinds.get(type(value), "a number")
