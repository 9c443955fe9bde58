"""Multipart bodies: read as far as needed, changed where needed, refused where they are not what they say."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ridgeline.gateway.errors import BadRequest, GatewayError
from ridgeline.gateway.limits.held_bytes import HeldBytes
from ridgeline.gateway.objects.forms import Form, FormReader
from ridgeline.gateway.objects.spool import Spool
from ridgeline.proxy.body import StoredBody, Stretch

TYPE = b'multipart/form-data; boundary="AaB03x"'


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    made = Spool(tmp_path / "upload", HeldBytes(1 << 30, 1 << 30, "").hold("k"))
    yield made
    made.close()


def read(spool: Spool, kind: bytes, data: bytes, step: int = 1 << 20) -> Form:
    reader = FormReader(kind, spool)
    for at in range(0, len(data), step):
        reader.feed(data[at : at + step])
    asyncio.run(spool.flush())
    return reader.finish()


def content(form: Form, name: str) -> bytes | None:
    found = form.content(name)
    return found.file.read(found.begin, len(found)) if isinstance(found, Stretch) else found


def whole(body: StoredBody) -> bytes:
    async def joined() -> bytes:
        return b"".join([block async for block in body.blocks()])

    sent = asyncio.run(joined())
    assert len(sent) == len(body)
    return sent


def part(name: str, content: bytes, filename: str = "") -> bytes:
    named = f'; filename="{filename}"' if filename else ""
    return (
        f'--AaB03x\r\nContent-Disposition: form-data; name="{name}"{named}\r\n\r\n'.encode()
        + content
        + b"\r\n"
    )


def body(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--AaB03x--\r\n"


@pytest.mark.parametrize("step", [1, 7, 64, 1 << 20])
@pytest.mark.parametrize("size", [0, 10, 5_000])
def test_fields_and_files_are_found_and_one_is_replaced(spool: Spool, step: int, size: int) -> None:
    sound = (b"\r\n--AaB03\r\n" + bytes(range(256)) * 20)[:size]
    data = body(part("model", b"whisper"), part("file", sound, "a.wav"), part("prompt", b"\r\n"))
    form = read(spool, TYPE, data, step)
    assert (form.text("model"), form.text("prompt"), form.files) == ("whisper", "\r\n", frozenset({"file"}))
    assert content(form, "file") == sound
    assert isinstance(form.content("file"), Stretch) == (size > 4096)  # on disk, where it is large
    kind, sent = form.written({"model": b"other"})
    changed = read(spool, kind, whole(sent), step)
    assert (changed.text("model"), content(changed, "file")) == ("other", sound)


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
@pytest.mark.parametrize("step", [1, 1 << 20])
def test_what_cannot_be_read_is_refused(spool: Spool, kind: bytes, data: bytes, step: int) -> None:
    with pytest.raises(BadRequest):
        read(spool, kind, data, step)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=400))
def test_no_bytes_do_more_than_be_refused(spool: Spool, data: bytes) -> None:
    for text in (data, b"--AaB03x\r\n" + data, part("a", data) + data):
        with contextlib.suppress(GatewayError):
            read(spool, TYPE, text).text("a")
