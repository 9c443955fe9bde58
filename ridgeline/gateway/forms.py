"""A multipart body, as far as the gateway must understand it: its small fields, and where each part lies.

Audio and files come so. What goes on to an upstream is written anew from what was understood here: two
readers of one multipart body need not find the same fields in it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import NamedTuple

from ridgeline.gateway.errors import BadRequest

MAX_PARTS = 32
MAX_PART_HEAD = 8192
MAX_FIELD = 4096
_BOUNDARY = re.compile(rb'(?:^|;)\s*boundary=(?:"([^"\r\n]{1,70})"|([^\s;",]{1,70}))', re.IGNORECASE)
_NAME = re.compile(rb'(?:^|;)\s*name="([A-Za-z0-9_.\[\]-]{1,64})"', re.IGNORECASE)
_FILENAME = re.compile(rb'(?:^|;)\s*filename(?:="([^"\r\n]{0,255})"|\*?=)', re.IGNORECASE)
_CONTENT_TYPE = re.compile(rb"content-type:[ \t]*([a-z0-9!#$&^_.+-]{1,64}/[a-z0-9!#$&^_.+-]{1,64})", re.I)
_NOT_IN_NAMES = bytes(range(32)) + b'"\\\x7f'


class Part(NamedTuple):
    name: str
    filename: bytes | None  # None: a field, not a file
    content_type: bytes  # empty: not said
    begin: int
    end: int


class Form:
    def __init__(self, body: bytes, parts: list[Part]) -> None:
        self.body = body
        self._parts = parts
        self._by_name = {part.name: part for part in parts}
        self.names = frozenset(self._by_name)
        self.files = frozenset(part.name for part in parts if part.filename is not None)

    @classmethod
    def read(cls, content_type: bytes, body: bytes) -> Form:
        found = _BOUNDARY.search(content_type)
        if not content_type.lower().startswith(b"multipart/form-data") or found is None:
            raise BadRequest(
                "this endpoint takes multipart/form-data with a boundary",
                status=415,
                code="unsupported_media_type",
            )
        mark = b"--" + (found[1] or found[2])
        parts: list[Part] = []
        names: set[str] = set()
        at = 0 if body.startswith(mark) else body.find(b"\r\n" + mark) + 2
        if at == 1:
            raise _broken("the boundary does not stand in the body")
        while True:
            at += len(mark)
            if body.startswith(b"--", at):
                return cls(body, parts)
            if not body.startswith(b"\r\n", at):
                raise _broken("a boundary is not followed by a line end")
            head_end = body.find(b"\r\n\r\n", at, at + MAX_PART_HEAD)
            end = body.find(b"\r\n" + mark, at)
            if head_end < 0 or end < head_end:
                raise _broken("a part has no end, or headers of more than 8192 bytes")
            part = _read_head(body[at:head_end], head_end + 4, end)
            if part.name in names and not part.name.endswith("[]"):
                raise _broken(f"the field {part.name!r} stands there twice")
            if len(parts) == MAX_PARTS:
                raise _broken(f"there are more than {MAX_PARTS} parts")
            names.add(part.name)
            parts.append(part)
            at = end + 2

    def text(self, name: str) -> str:
        """A field's text; empty where it is not there."""
        content = self.content(name) or b""
        if len(content) > MAX_FIELD:
            raise BadRequest(f"{name}: longer than {MAX_FIELD} bytes", param=name)
        try:
            return content.decode()
        except UnicodeDecodeError:
            raise BadRequest(f"{name}: not valid UTF-8", param=name) from None

    def content(self, name: str) -> bytes | None:
        part = self._by_name.get(name)
        return None if part is None else self.body[part.begin : part.end]

    def written(self, changes: Mapping[str, bytes], with_filenames: bool = True) -> tuple[bytes, bytes]:
        """Content type and body with these fields' contents in place of what they were.

        The boundary is drawn anew: nobody can have put it into a part.
        """
        boundary = secrets.token_hex(16).encode()
        whole = memoryview(self.body)
        pieces: list[bytes | memoryview] = []
        for part in self._parts:
            pieces.append(
                b'--%b\r\ncontent-disposition: form-data; name="%b"' % (boundary, part.name.encode())
            )
            if part.filename is not None:
                pieces.append(b'; filename="%b"' % (part.filename if with_filenames else b"file"))
            if part.content_type:
                pieces.append(b"\r\ncontent-type: " + part.content_type)
            content = changes.get(part.name)
            pieces += (b"\r\n\r\n", whole[part.begin : part.end] if content is None else content, b"\r\n")
        pieces.append(b"--%b--\r\n" % boundary)
        return b"multipart/form-data; boundary=" + boundary, b"".join(pieces)


def _read_head(head: bytes, begin: int, end: int) -> Part:
    name, filename, content_type = "", None, b""
    for line in head.split(b"\r\n"):
        if line.lower().startswith(b"content-disposition:"):
            found = _NAME.search(line)
            file = _FILENAME.search(line)
            name = found[1].decode() if found is not None else ""
            filename = (file[1] or b"file").translate(None, _NOT_IN_NAMES) if file is not None else None
        elif kind := _CONTENT_TYPE.match(line):
            content_type = kind[1]
    if not name:
        raise _broken("a part has no name, or one of other characters than A-Z a-z 0-9 _ . - [ ]")
    return Part(name, filename, content_type, begin, end)


def _broken(what: str) -> BadRequest:
    return BadRequest(f"the multipart body cannot be read: {what}", code="invalid_multipart")
