"""A multipart body as its small fields and the location of each file; audio and files are sent this way.

FormReader takes the body in pieces and writes parts larger than a field to disk. The body for an upstream is
rewritten from the parts that were read here: two parsers of one multipart body may find different fields.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import NamedTuple

from ridgeline.gateway.errors import BadRequest
from ridgeline.gateway.objects.audio_length import ReadAt
from ridgeline.gateway.objects.spool import Spool
from ridgeline.proxy.body import StoredBody, Stretch

MAX_PARTS = 32
MAX_PART_HEAD = 8192
MAX_FIELD = 4096  # most bytes of a part in memory
_BOUNDARY = re.compile(rb'(?:^|;)\s*boundary=(?:"([^"\r\n]{1,70})"|([^\s;",]{1,70}))', re.IGNORECASE)
_NAME = re.compile(rb'(?:^|;)\s*name="([A-Za-z0-9_.\[\]-]{1,64})"', re.IGNORECASE)
_FILENAME = re.compile(rb'(?:^|;)\s*filename(?:="([^"\r\n]{0,255})"|\*?=)', re.IGNORECASE)
_CONTENT_TYPE = re.compile(rb"content-type:[ \t]*([a-z0-9!#$&^_.+-]{1,64}/[a-z0-9!#$&^_.+-]{1,64})", re.I)
_NOT_IN_NAMES = bytes(range(32)) + b'"\\\x7f'


class Part(NamedTuple):
    name: str
    filename: bytes | None  # None: a field, not a file
    content_type: bytes  # empty: not said
    content: bytes | Stretch = b""


class Form:
    def __init__(self, parts: list[Part]) -> None:
        self._parts = parts
        self._by_name = {part.name: part for part in parts}
        self.names = frozenset(self._by_name)
        self.files = frozenset(part.name for part in parts if part.filename is not None)
        self.size = sum(len(part.content) for part in parts)

    def text(self, name: str) -> str:
        """A field's text; empty if absent."""
        content = self.content(name) or b""
        if isinstance(content, Stretch):
            raise BadRequest(f"{name}: longer than {MAX_FIELD} bytes", param=name)
        try:
            return content.decode()
        except UnicodeDecodeError:
            raise BadRequest(f"{name}: not valid UTF-8", param=name) from None

    def content(self, name: str) -> bytes | Stretch | None:
        """Parts larger than a field are on disk."""
        part = self._by_name.get(name)
        return None if part is None else part.content

    def reader(self, name: str) -> tuple[ReadAt, int] | None:
        """A function that reads a file at any offset, for use in a thread, and the file's size."""
        content = self.content(name)
        if content is None:
            return None
        size = len(content)
        if isinstance(content, Stretch):
            file, begin = content.file, content.begin
            return lambda at, most: file.read(begin + at, max(min(most, size - at), 0)), size
        return lambda at, most: content[at : at + most], size

    def written(
        self, changes: Mapping[str, bytes | Stretch], with_filenames: bool = True
    ) -> tuple[bytes, StoredBody]:
        """Content type and body with these fields' contents replaced.

        The boundary is random: a client cannot have put it into a part.
        """
        boundary = secrets.token_hex(16).encode()
        pieces: list[bytes | Stretch] = []
        for part in self._parts:
            head = b'--%b\r\ncontent-disposition: form-data; name="%b"' % (boundary, part.name.encode())
            if part.filename is not None:
                head += b'; filename="%b"' % (part.filename if with_filenames else b"file")
            if part.content_type:
                head += b"\r\ncontent-type: " + part.content_type
            pieces += (head + b"\r\n\r\n", changes.get(part.name, part.content), b"\r\n")
        pieces.append(b"--%b--\r\n" % boundary)
        return b"multipart/form-data; boundary=" + boundary, StoredBody(pieces)


class FormReader:
    """`feed` takes pieces of the body in order, `finish` returns the form. Each call is short."""

    def __init__(self, content_type: bytes, spool: Spool) -> None:
        found = _BOUNDARY.search(content_type)
        if not content_type.lower().startswith(b"multipart/form-data") or found is None:
            raise BadRequest(
                "this endpoint requires multipart/form-data with a boundary",
                status=415,
                code="unsupported_media_type",
            )
        self._mark = b"\r\n--" + (found[1] or found[2])
        self._spool = spool
        self._held = b"\r\n"  # a body may begin with the boundary: add the line end before it
        self._step = self._preamble
        self._parts: list[Part] = []
        self._names: set[str] = set()
        self._small = b""  # of the open part, or its offset on disk
        self._begin: int | None = None

    def feed(self, data: bytes) -> None:
        self._held += data
        while self._step():
            pass

    def finish(self) -> Form:
        if self._step == self._preamble:
            raise _broken("the body does not contain the boundary")
        if self._step != self._epilogue:
            raise _broken("a part has no end, or headers of more than 8192 bytes")
        return Form(self._parts)

    # ---- steps: each returns whether the buffered bytes allow another step ----

    def _preamble(self) -> bool:
        at = self._held.find(self._mark)
        if at < 0:
            self._held = self._held[-len(self._mark) :]
            return False
        self._held = self._held[at + len(self._mark) :]
        self._step = self._after_mark
        return True

    def _after_mark(self) -> bool:
        if len(self._held) < 2:
            return False
        if self._held.startswith(b"--"):
            self._step = self._epilogue
        elif self._held.startswith(b"\r\n"):
            self._step = self._head
        else:
            raise _broken("a boundary is not followed by a line end")
        return True

    def _head(self) -> bool:
        end = self._held.find(b"\r\n\r\n", 0, MAX_PART_HEAD)
        mark = self._held.find(self._mark, 0, MAX_PART_HEAD)
        if 0 <= mark < end or (end < 0 and (mark >= 0 or len(self._held) >= MAX_PART_HEAD)):
            raise _broken("a part has no end, or headers of more than 8192 bytes")
        if end < 0:
            return False
        part = _read_head(self._held[:end])
        if part.name in self._names and not part.name.endswith("[]"):
            raise _broken(f"the field {part.name!r} is given twice")
        if len(self._parts) == MAX_PARTS:
            raise _broken(f"more than {MAX_PARTS} parts")
        self._names.add(part.name)
        self._parts.append(part)
        self._small, self._begin = b"", None
        self._held = self._held[end + 2 :]  # the empty line's own end may begin the next boundary
        self._step = self._content_begins
        return True

    def _content_begins(self) -> bool:
        if len(self._held) < len(self._mark):
            return False
        if not self._held.startswith(self._mark):
            self._held = self._held[2:]
        self._step = self._content
        return True

    def _content(self) -> bool:
        at = self._held.find(self._mark)
        if at < 0:
            keep = len(self._mark) - 1
            if len(self._held) > keep:
                self._keep(self._held[:-keep])
                self._held = self._held[-keep:]
            return False
        self._keep(self._held[:at])
        content: bytes | Stretch = self._small
        if self._begin is not None:
            content = Stretch(self._spool, self._begin, self._spool.size)
        self._parts[-1] = self._parts[-1]._replace(content=content)
        self._held = self._held[at + len(self._mark) :]
        self._step = self._after_mark
        return True

    def _epilogue(self) -> bool:
        self._held = b""
        return False

    def _keep(self, data: bytes) -> None:
        if self._begin is None and len(self._small) + len(data) <= MAX_FIELD:
            self._small += data
            return
        if self._begin is None:
            self._begin = self._spool.size
            self._spool.add(self._small)
        self._spool.add(data)


def _read_head(head: bytes) -> Part:
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
        raise _broken("a part has no name, or a name with characters other than A-Z a-z 0-9 _ . - [ ]")
    return Part(name, filename, content_type)


def _broken(what: str) -> BadRequest:
    return BadRequest(f"malformed multipart body: {what}", code="invalid_multipart")
