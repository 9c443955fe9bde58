"""Detectors of e-mail and IP addresses in one zone of folded text."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator

Span = tuple[int, int]

# Letters of scripts that separate words with spaces. Scripts without spaces are left out: an address after
# such a text would match the sentence before it too.
_LETTERS = "A-Za-z0-9\u00aa-\u1fff"
# RFC 5321 also allows / = ? ` { | } & ^, but in texts they more often end an address than belong to it.
_EMAIL = re.compile(
    rf"[{_LETTERS}_](?:[{_LETTERS}_.+%~!#$*-]|(?<=[{_LETTERS}])'(?=[{_LETTERS}])){{0,63}}(?:@|%40)"
    rf"(?:[{_LETTERS}](?:[{_LETTERS}_-]{{0,61}}[{_LETTERS}])?\.){{1,8}}"
    rf"(?:xn--[a-z0-9-]{{2,59}}|[A-Za-z\u00aa-\u1fff]{{2,24}})(?![{_LETTERS}])"
)

# File extensions that are not top-level domains: `icon@2x.png` is a picture.
_FILES = frozenset((
    "png", "jpg", "jpeg", "gif", "svg", "webp", "js", "css", "html", "json", "yaml", "yml", "xml", "txt",
    "pdf", "csv", "exe", "dll", "whl", "gz", "tgz",
))  # fmt: skip

_IPV4 = re.compile(r"(?<![0-9A-Za-z_.])[0-9]{1,3}(?:\.[0-9]{1,3}){3}(?:/[0-9]{1,2})?(?![0-9A-Za-z_]|\.[0-9])")
_IPV6 = re.compile(r"(?<![0-9A-Fa-f:.])[0-9A-Fa-f:.]{2,64}")
_IPV6_AFTER = re.compile(r"(?:%[0-9A-Za-z]{1,16})?(?:/[0-9]{1,3})?(?![0-9A-Za-z_:])")
_HEX = re.compile(r"[0-9A-Fa-f]")


def emails(zone: str) -> Iterator[Span]:
    if "@" in zone or "%40" in zone:
        for match in _EMAIL.finditer(zone):
            if match.group().rpartition(".")[2].lower() not in _FILES:
                yield match.span()


def ips(zone: str) -> Iterator[Span]:
    """IPv4 with an optional /prefix; IPv6 in every written form, with zone and prefix."""
    if zone.count(".") >= 3:
        for match in _IPV4.finditer(zone):
            address = match.group().partition("/")[0]
            if all(int(part) <= 255 for part in address.split(".")):
                yield match.span()
    if zone.count(":") >= 2:
        yield from _version6(zone)


def _version6(zone: str) -> Iterator[Span]:
    for match in _IPV6.finditer(zone):
        text, start = match.group().rstrip("."), match.start()
        if start and (zone[start - 1].isalnum() or zone[start - 1] == "_") and ":" in text:
            # The match begins with the end of a word: `addr:2001:db8::1` and `std::a`.
            start += text.index(":")
            text = text[text.index(":") :]
        if text.startswith(":") and (not text.startswith("::") or text.startswith(":::")):
            text, start = text[1:], start + 1
        # A colon that ends a sentence does not belong to the address before it.
        for candidate in (text, text[:-1]) if text.endswith(":") and not text.endswith("::") else (text,):
            after = _IPV6_AFTER.match(zone, start + len(candidate))
            if _is_version6(candidate) and (after is not None or candidate != text):
                yield start, after.end() if after is not None else start + len(candidate)
                break


def _is_version6(text: str) -> bool:
    if ":" not in text or not _HEX.search(text):
        return False
    if text != "::1" and text.count(":") < 4 and max(map(len, text.split(":"))) < 3:
        return False  # `items[::2]`; no address in use is that short
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True
