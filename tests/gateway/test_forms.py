"""Multipart bodies: read as far as needed, changed where needed, refused where they are not what they say."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.gateway.errors import BadRequest, GatewayError
from ridgeline.gateway.forms import Form

TYPE = b'multipart/form-data; boundary="AaB03x"'


def part(name: str, content: bytes, filename: str = "") -> bytes:
    named = f'; filename="{filename}"' if filename else ""
    return (
        f'--AaB03x\r\nContent-Disposition: form-data; name="{name}"{named}\r\n\r\n'.encode()
        + content
        + b"\r\n"
    )


def body(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--AaB03x--\r\n"


def test_fields_and_files_are_found_and_one_is_replaced() -> None:
    sound = bytes(range(256)) * 10
    form = Form.read(TYPE, body(part("model", b"whisper"), part("file", sound, "a.wav")))
    assert (form.text("model"), form.content("file"), form.files) == ("whisper", sound, frozenset({"file"}))
    changed = Form.read(*form.written({"model": b"other"}))
    assert (changed.text("model"), changed.content("file")) == ("other", sound)


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (b"application/json", b"{}"),
        (b"multipart/form-data", body(part("a", b"b"))),
        (TYPE, b""),
        (TYPE, b"--AaB03x"),
        (TYPE, part("a", b"b")),
        (TYPE, body(part("a", b"b"), part("a", b"c"))),
        (TYPE, body(*(part(f"f{n}", b"x") for n in range(40)))),
        (TYPE, b"--AaB03x\r\nX: y\r\n\r\nb\r\n--AaB03x--"),
        (TYPE, b"--AaB03x\r\nX: " + b"y" * 10_000 + b"\r\n\r\nb\r\n--AaB03x--"),
    ],
)
def test_what_cannot_be_read_is_refused(kind: bytes, data: bytes) -> None:
    with pytest.raises(BadRequest):
        Form.read(kind, data)


@given(st.binary(max_size=400))
def test_no_bytes_do_more_than_be_refused(data: bytes) -> None:
    for text in (data, b"--AaB03x\r\n" + data, part("a", data) + data):
        with contextlib.suppress(GatewayError):
            Form.read(TYPE, text).text("a")
