"""A streaming multipart/form-data reader: bytes in; starts, contents and ends of parts out.

Does no I/O, and holds at most a part's headers and the length of a boundary. Used by file uploads. Malformed
input is a BadRequest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message

from ridgeline.server.errors import ApiError, BadRequest

MAX_HEADERS_BYTES = 8192
MAX_PARTS = 16
_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,./:=? -]{1,70}")


@dataclass(frozen=True, slots=True)
class PartBegins:
    name: str
    filename: str | None


@dataclass(frozen=True, slots=True)
class PartData:
    data: bytes


class PartEnds:
    pass


Event = PartBegins | PartData | PartEnds


def boundary_of(content_type: str) -> bytes:
    """The boundary from a Content-Type header; 415 for any other kind of body."""
    header = Message()
    header["content-type"] = content_type[:1024]
    if header.get_content_type() != "multipart/form-data":
        message = "send the file as multipart/form-data, with the parts file and purpose"
        raise ApiError(415, message, code="unsupported_media_type")
    boundary = header.get_param("boundary")
    if not isinstance(boundary, str) or not _BOUNDARY.fullmatch(boundary):
        raise BadRequest(None, "the content type multipart/form-data has no usable boundary")
    return boundary.encode("ascii")


class MultipartReader:
    def __init__(self, boundary: bytes) -> None:
        self._delimiter = b"\r\n--" + boundary
        self._held = bytearray(b"\r\n")  # makes the first delimiter look like all others
        self._at = self._preamble
        self._parts = 0
        self.done = False

    def feed(self, data: bytes) -> Iterator[Event]:
        """The events that are certain after this chunk of the body."""
        self._held += data
        before = None
        while not self.done and before != (len(self._held), self._at):
            before = len(self._held), self._at
            yield from self._at()
        if self.done:
            self._held.clear()  # data after the last boundary is ignored

    def _preamble(self) -> Iterator[Event]:
        place = self._held.find(self._delimiter)
        if place >= 0:
            del self._held[: place + len(self._delimiter)]
            self._at = self._after_delimiter
        elif len(self._held) > MAX_HEADERS_BYTES:
            raise BadRequest(None, "the body does not begin with the boundary its content type announces")
        yield from ()

    def _after_delimiter(self) -> Iterator[Event]:
        if len(self._held) >= 2:
            if self._held[:2] == b"--":
                self.done = True
            elif self._held[:2] == b"\r\n":
                self._at = self._headers  # keep the line end: it ends the headers of a part without any
            else:
                raise BadRequest(None, "a boundary in the body is not followed by a line end")
        yield from ()

    def _headers(self) -> Iterator[Event]:
        end = self._held.find(b"\r\n\r\n")
        if end < 0:
            if len(self._held) > MAX_HEADERS_BYTES:
                raise BadRequest(None, f"a part's headers are longer than {MAX_HEADERS_BYTES} bytes")
            return
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise BadRequest(None, f"more than {MAX_PARTS} parts")
        part = _part(bytes(self._held[:end]))
        del self._held[: end + 2]  # an empty content ends with this line end and the delimiter
        self._at = self._content
        self._content_begins = True
        yield part

    def _content(self) -> Iterator[Event]:
        place = self._held.find(self._delimiter)
        if place >= 0:
            yield from self._data(place)
            del self._held[: len(self._delimiter)]
            self._at = self._after_delimiter
            yield PartEnds()
        elif (certain := len(self._held) - len(self._delimiter) + 1) > 2:
            yield from self._data(certain)

    def _data(self, length: int) -> Iterator[Event]:
        """Take this many bytes off the front. The line end that closed the headers is not content."""
        data = bytes(self._held[:length])
        del self._held[:length]
        if self._content_begins and length:
            data, self._content_begins = data[2:], False
        if data:
            yield PartData(data)


def _part(headers: bytes) -> PartBegins:
    for line in headers.decode("utf-8", errors="replace").split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-disposition":
            kind, *parameters = _split(value)
            found = dict(parameters)
            if kind[0] == "form-data" and "name" in found:
                return PartBegins(found["name"], found.get("filename"))
    raise BadRequest(None, "a part has no Content-Disposition: form-data with a name")


def _split(value: str) -> list[tuple[str, str]]:
    """form-data; name="file"; filename="a.jsonl" → pairs. Browsers write a quote in a name as %22."""
    pairs = re.findall(r'([^\s;="]+)(?:="((?:[^"\\]|\\.)*)"|=([^;\s]*))?', value)
    return [
        (key.lower(), re.sub(r"\\(.)", r"\1", quoted).replace("%22", '"') or plain)
        for key, quoted, plain in pairs
    ] or [("", "")]
