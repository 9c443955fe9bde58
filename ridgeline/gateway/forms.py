"""A multipart body, as far as the gateway must understand it: its small fields, and where each part lies.

Audio and files come so. Parts are found by their boundary and never copied; only a part that must change is
written anew.
"""

from __future__ import annotations

import re

from ridgeline.gateway.errors import BadRequest

MAX_PARTS = 32
MAX_PART_HEAD = 8192
MAX_FIELD = 4096
_BOUNDARY = re.compile(rb'(?:^|;)\s*boundary=(?:"([^"\r\n]{1,70})"|([^\s;",]{1,70}))', re.IGNORECASE)
_NAME = re.compile(rb'(?:^|;)\s*name="([^"\r\n]*)"', re.IGNORECASE)
_FILENAME = re.compile(rb"(?:^|;)\s*filename\*?=", re.IGNORECASE)


class Form:
    """parts: name → where its content begins and ends in `body`."""

    def __init__(self, body: bytes, parts: dict[str, tuple[int, int]], files: frozenset[str]) -> None:
        self.body = body
        self._parts = parts
        self.files = files

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
        parts: dict[str, tuple[int, int]] = {}
        files: set[str] = set()
        at = 0 if body.startswith(mark) else body.find(b"\r\n" + mark) + 2
        if at == 1:
            raise _broken("the boundary does not stand in the body")
        while True:
            at += len(mark)
            if body.startswith(b"--", at):
                return cls(body, parts, frozenset(files))
            if not body.startswith(b"\r\n", at):
                raise _broken("a boundary is not followed by a line end")
            head_end = body.find(b"\r\n\r\n", at, at + MAX_PART_HEAD)
            end = body.find(b"\r\n" + mark, at)
            if head_end < 0 or end < head_end:
                raise _broken("a part has no end, or headers of more than 8192 bytes")
            name, is_file = _disposition(body[at:head_end])
            if name in parts:
                raise _broken(f"the field {name!r} stands there twice")
            if len(parts) == MAX_PARTS:
                raise _broken(f"there are more than {MAX_PARTS} parts")
            parts[name] = (head_end + 4, end)
            if is_file:
                files.add(name)
            at = end + 2

    def text(self, name: str) -> str:
        """A field's text; empty where it is not there."""
        begin, end = self._parts.get(name, (0, 0))
        if end - begin > MAX_FIELD:
            raise BadRequest(f"{name}: longer than {MAX_FIELD} bytes", param=name)
        try:
            return self.body[begin:end].decode()
        except UnicodeDecodeError:
            raise BadRequest(f"{name}: not valid UTF-8", param=name) from None

    def content(self, name: str) -> bytes | None:
        if name not in self._parts:
            return None
        begin, end = self._parts[name]
        return self.body[begin:end]

    def replaced(self, name: str, content: bytes) -> bytes:
        """The body with another content of one field. It must not hold the boundary, which names cannot."""
        begin, end = self._parts[name]
        return b"".join((self.body[:begin], content, self.body[end:]))


def _disposition(head: bytes) -> tuple[str, bool]:
    for line in head.split(b"\r\n"):
        if line.lower().startswith(b"content-disposition:"):
            found = _NAME.search(line)
            if found is not None:
                return found[1].decode("utf-8", "replace"), _FILENAME.search(line) is not None
    raise _broken("a part has no name")


def _broken(what: str) -> BadRequest:
    return BadRequest(f"the multipart body cannot be read: {what}", code="invalid_multipart")
