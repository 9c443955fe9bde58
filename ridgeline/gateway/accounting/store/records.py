"""The lines of a write-ahead file: a kind, a checksum, and an Opening or a LedgerRow as JSON.

One line per record, so that a torn or damaged one affects no other and the file is readable. Written by
`journal.Journal`, read by `journal.JournalReader`; nothing here touches a file.
"""

from __future__ import annotations

from zlib import crc32

import msgspec

from ridgeline.gateway.accounting.row import LedgerRow, Opening

CLOSED = b"R"  # the kind of a row; an opening is O
MAX_RECORD = 64 << 10  # bytes; texts of a longer record are truncated
MAX_TEXT = 4 << 10
_BODY_AT = 11

_encode = msgspec.json.Encoder().encode
_openings = msgspec.json.Decoder(Opening)
_rows = msgspec.json.Decoder(LedgerRow)


class Damaged(Exception):
    """A line is not as it was written."""


def line_of(value: Opening | LedgerRow) -> bytes:
    try:
        body = _encode(value)
    except UnicodeEncodeError:  # half a surrogate pair, from a client's JSON
        body = _encode(_writable(value))
    if len(body) > MAX_RECORD:
        body = _encode(_writable(value))
    head = b"R %08x " if type(value) is LedgerRow else b"O %08x "
    return head % crc32(body) + body + b"\n"


def value_of(line: bytes) -> Opening | LedgerRow:
    """The record of a line without its newline; Damaged if the checksum or the form is wrong."""
    kind, body = line[:1], line[_BODY_AT:]
    try:
        if int(line[2:10], 16) != crc32(body):
            raise Damaged("checksum")
        return _rows.decode(body) if kind == CLOSED else _openings.decode(body)
    except (ValueError, msgspec.DecodeError) as error:
        raise Damaged(str(error)) from error


def _writable(value: Opening | LedgerRow) -> Opening | LedgerRow:
    texts = {
        name: text.encode("utf-8", "replace")[:MAX_TEXT].decode("utf-8", "ignore")
        for name in value.__struct_fields__
        if isinstance(text := getattr(value, name), str)
    }
    return msgspec.structs.replace(value, **texts)
