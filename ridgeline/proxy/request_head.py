"""The head of a request to an upstream, safe from header injection.

Called for every request by `http_client`. Header names must be tokens, values must not hold control
characters that end a line, paths no spaces and no `..`; the caller's framing headers are dropped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ridgeline.proxy.errors import InvalidHead

Headers = list[tuple[bytes, bytes]]  # names in lower case

METHODS = {name: name.encode() for name in ("GET", "POST", "PUT", "PATCH", "DELETE")}
MAX_KNOWN = 1024  # checked names and paths, cached

# Headers of the connection, not of the message (RFC 9110, 7.6.1), and headers of the framing.
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-connection proxy-authenticate proxy-authorization te trailer".split()
    + b"transfer-encoding upgrade".split()
)
_OURS = HOP_BY_HOP | {b"host", b"content-length", b"expect"}

_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_PATH = re.compile(r"/[!-~]*")
_WAY_UP = re.compile(r"(?:/|%2f|\\|%5c)(?:\.|%2e){1,2}(?:/|%2f|\\|%5c|\?|$)", re.IGNORECASE)
_ALLOWED = b"\t\r\n" + bytes(byte for byte in range(0x20, 0x100) if byte != 0x7F)

_names: dict[bytes, bytes] = {}
_paths: dict[str, bytes] = {}


def request_head(
    method: str, base: str, path: str, fixed: bytes, headers: Iterable[tuple[bytes, bytes]], length: int
) -> bytes:
    """fixed: lines made by `header_lines`, before the others."""
    lines = [METHODS[method], b" ", _paths.get(path) or _checked_path(path), b" HTTP/1.1\r\n", fixed]
    if base:
        lines[1] = b" " + base.encode()
    lines.append(header_lines(headers))
    lines.append(b"content-length: %d\r\n\r\n" % length if length or method != "GET" else b"\r\n")
    return b"".join(lines)


def header_lines(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    lines: list[bytes] = []
    names = _names
    for name, value in headers:
        start = names.get(name)
        if start is None:
            start = _checked_name(name)
        if start:
            lines += (start, value, b"\r\n")
    block = b"".join(lines)
    # Each line ends in exactly one CR LF: any further CR or LF came from a value.
    count = len(lines) // 3
    if block.count(b"\n") != count or block.count(b"\r") != count or block.translate(None, _ALLOWED):
        raise InvalidHead("a header's value holds a control character", "invalid_header")
    return block


def _checked_name(name: bytes) -> bytes:
    """The start of the header's line; empty for a header that is dropped."""
    if not _TOKEN.fullmatch(name):
        raise InvalidHead("a header's name is not a token", "invalid_header")
    start = b"" if name.lower() in _OURS else name + b": "
    if len(_names) < MAX_KNOWN and len(name) <= 64:
        _names[name] = start
    return start


def _checked_path(path: str) -> bytes:
    if not _PATH.fullmatch(path) or "#" in path or _WAY_UP.search(path):
        raise InvalidHead("the path of the request is not valid", "invalid_path")
    coded = path.encode("ascii")
    if len(_paths) < MAX_KNOWN and len(path) <= 128:
        _paths[path] = coded
    return coded
