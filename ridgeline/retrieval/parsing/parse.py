"""`parse`: a file's text by its kind, which its name tells.

Text, Markdown, code and JSONL are read here. HTML and PDF are read in a process with limits of its own
(`isolated`): a hostile file fails alone. Blocking: call it in a thread.
"""

from __future__ import annotations

import codecs
import json
import re
from pathlib import Path, PurePath
from typing import Any, Literal

from ridgeline.retrieval.parsing.errors import InvalidFile, UnsupportedFile
from ridgeline.retrieval.parsing.isolated import DEFAULT_LIMITS, Limits, parsed_apart

FileKind = Literal["text", "markdown", "code", "jsonl", "html", "pdf"]

_CODE = (
    "c cc cpp cs css cu go h hpp java jl js json jsx kt lua m php pl proto py r rb rs scala sh sql swift tex"
    " toml ts tsx xml yaml yml zig"
)
KINDS: dict[str, FileKind] = {
    "": "text",
    ".txt": "text",
    ".text": "text",
    ".log": "text",
    ".csv": "text",
    ".tsv": "text",
    ".rst": "text",
    ".md": "markdown",
    ".markdown": "markdown",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".html": "html",
    ".htm": "html",
    ".xhtml": "html",
    ".pdf": "pdf",
    **{f".{suffix}": "code" for suffix in _CODE.split()},
}
# Kinds that have a text which is not read here. Other unknown suffixes are read as text if they are text.
UNREAD = (".doc", ".docx", ".ppt", ".pptx", ".xls", ".xlsx", ".odt", ".epub", ".rtf")
_NO_TEXT = re.compile("[\x00\ud800-\udfff]")  # what JSON can escape and UTF-8 or a database cannot hold
_BOMS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))


def kind_of(filename: str) -> FileKind | None:
    """None: not known by its name."""
    return KINDS.get(PurePath(filename).suffix.lower())


def parse(path: Path, filename: str, limits: Limits = DEFAULT_LIMITS) -> str:
    """The text of the file at `path`, which was uploaded as `filename`. ParseError where it has none."""
    suffix = PurePath(filename).suffix.lower()
    if suffix in UNREAD:
        raise UnsupportedFile(f"{suffix} files are not read; convert them to PDF, HTML, Markdown or text")
    kind = kind_of(filename)
    if kind == "html" or kind == "pdf":
        return parsed_apart(path, kind, limits)
    size = path.stat().st_size
    if size > limits.text_bytes:
        raise InvalidFile(f"the file has {size} bytes of text; at most {limits.text_bytes} are read")
    text = decoded(path.read_bytes(), filename if kind is None else None)
    return jsonl_text(text) if kind == "jsonl" else text


def decoded(data: bytes, unknown_name: str | None = None) -> str:
    """UTF-8, or UTF-16 by its mark; the mark is dropped, everything else is kept as it is.

    unknown_name: of a file of unknown kind, which is unsupported rather than invalid if it is no text.
    """
    encoding = "utf-8"
    for mark, name in _BOMS:
        if data.startswith(mark):
            data, encoding = data[len(mark) :], name
            break
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        if unknown_name is not None:
            raise UnsupportedFile(_unknown(unknown_name)) from None
        raise InvalidFile(f"byte {error.start} is not {encoding.upper()}; save the file as UTF-8") from None
    if "\x00" in text:
        if unknown_name is not None:
            raise UnsupportedFile(_unknown(unknown_name))
        raise InvalidFile(f"there is a zero byte at character {text.index(chr(0))}: this is not a text")
    return text


def _unknown(filename: str) -> str:
    suffix = PurePath(filename).suffix or "without a suffix"
    return f"the kind of this file ({suffix[:32]}) is not known, and it is not UTF-8 text"


def jsonl_text(text: str) -> str:
    """Each record as lines of `key: value`, a blank line between records; a record that is or has only a
    text is that text.
    """
    records = []
    # splitlines() would also cut at U+2028, U+0085 and the like, which JSON allows within a string.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidFile(f"line {number} is not JSON: {error}") from None
        records.append(_record(record))
    return _NO_TEXT.sub("\ufffd", "\n\n".join(records))


def _record(record: Any) -> str:
    if isinstance(record, str):
        return record
    if not isinstance(record, dict):
        return json.dumps(record, ensure_ascii=False)
    if list(record) in (["text"], ["content"]) and isinstance((only := next(iter(record.values()))), str):
        return only
    shown = (
        (key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        for key, value in record.items()
    )
    return "\n".join(f"{key}: {value}" for key, value in shown)
