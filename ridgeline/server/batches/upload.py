"""Receives an uploaded file to disk: never held in memory, bounded in size and time, stored whole or not at
all.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, BinaryIO

from starlette.requests import ClientDisconnect, Request

from ridgeline.server.batches.bodies import DAY_S, File, UploadForm
from ridgeline.server.batches.conversion import converted
from ridgeline.server.batches.multipart import MultipartReader, PartBegins, PartData, PartEnds, boundary_of
from ridgeline.server.batches.store import BatchStore, new_id, sync_folder
from ridgeline.server.config import ServerConfig
from ridgeline.server.errors import SERVER, ApiError, BadRequest, ClientGone

WRITE_BYTES = 256 << 10  # written at once, off the loop
MAX_FIELD_BYTES = 1024
MAX_AROUND_BYTES = 1 << 20  # of a body besides its file: other parts, boundaries, trailing data
LEAST_BYTES_PER_S = 64 << 10  # minimum rate of a large file, beyond the time every upload has
KEEP_FILES_S = 30 * DAY_S
_NESTED = re.compile(r"expires_after\[(\w{1,32})\]")


async def receive_file(request: Request, store: BatchStore, config: ServerConfig) -> File:
    """The file of a multipart/form-data body, on disk and in the store."""
    await store.stored_bytes()  # creates the folder if needed
    upload = Upload(store, config, boundary_of(request.headers.get("content-type", "")))
    try:
        async for part in _in_time(request, config):
            await upload.feed(part)
        file = await upload.finish()
        await store.add_file(file)
    except OSError as error:
        upload.discard()
        raise ApiError(500, f"the file cannot be stored: {error.strerror or error}", type=SERVER) from error
    except BaseException:
        upload.discard()
        raise
    return file


async def _in_time(request: Request, config: ServerConfig) -> AsyncIterator[bytes]:
    """The parts of the body, while they arrive fast enough."""
    received, begun, parts = 0, time.monotonic(), request.stream().__aiter__()
    while True:
        left_s = begun + config.upload_timeout_s + received / LEAST_BYTES_PER_S - time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, left_s)):
                part = await anext(parts, None)
        except ClientDisconnect:
            raise ClientGone from None
        except TimeoutError:
            message = f"the upload is too slow: it stalled after {received} bytes"
            raise ApiError(408, message, code="timeout", headers={"connection": "close"}) from None
        if part is None:
            return
        received += len(part)
        if received > config.max_file_bytes + MAX_AROUND_BYTES:
            raise too_large(config)
        yield part


def too_large(config: ServerConfig) -> ApiError:
    message = f"file: larger than {config.max_file_bytes} bytes, this server's limit"
    return ApiError(413, message, param="file", code="body_too_large")


class Upload:
    def __init__(self, store: BatchStore, config: ServerConfig, boundary: bytes) -> None:
        self._store = store
        self._config = config
        self._reader = MultipartReader(boundary)
        self._id = new_id("file-")
        self._fields: dict[str, bytearray] = {}
        self._filename: str | None = None
        self._part: PartBegins | None = None
        self._file: BinaryIO | None = None
        self._unwritten = bytearray()
        self._size = 0

    async def feed(self, data: bytes) -> None:
        for event in self._reader.feed(data):
            match event:
                case PartBegins():
                    self._begin(event)
                case PartData(content):
                    self._take(content)
                case PartEnds():
                    self._part = None
        if len(self._unwritten) >= WRITE_BYTES:
            await self._write()

    def _begin(self, part: PartBegins) -> None:
        self._part = part
        if part.name == "file":
            if self._filename is not None:
                raise BadRequest("file", "sent twice; an upload has one file")
            self._filename = _plain_name(part.filename or "")
            self._file = self._store.path(self._id).open("xb")
        elif part.name in self._fields:
            raise BadRequest(part.name[:64], "sent twice")
        else:
            self._fields[part.name] = bytearray()

    def _take(self, content: bytes) -> None:
        assert self._part is not None
        if self._part.name == "file":
            self._size += len(content)
            if self._size > self._config.max_file_bytes:
                raise too_large(self._config)
            self._unwritten += content
            return
        field = self._fields[self._part.name]
        field += content
        if len(field) > MAX_FIELD_BYTES:
            raise BadRequest(self._part.name[:64], f"longer than {MAX_FIELD_BYTES} bytes")

    async def _write(self) -> None:
        data, self._unwritten = self._unwritten, bytearray()
        if self._file is not None and data:
            await asyncio.to_thread(self._file.write, data)

    async def finish(self) -> File:
        if not self._reader.done:
            raise BadRequest(None, "the body ends before its last boundary")
        form = self._form()
        assert self._file is not None
        assert self._filename is not None
        if await self._store.stored_bytes() + self._size > self._config.max_stored_bytes:
            limit = self._config.max_stored_bytes
            raise ApiError(
                413, f"file: this server stores at most {limit} bytes of files; delete some", param="file"
            )
        await self._write()
        await asyncio.to_thread(self._close, self._file)
        created = int(time.time())
        return File(
            id=self._id,
            bytes=self._size,
            created_at=created,
            expires_at=created + (form.expires_after.seconds if form.expires_after else KEEP_FILES_S),
            filename=self._filename,
            purpose=form.purpose,
        )

    def _form(self) -> UploadForm:
        values: dict[str, Any] = {}
        for name, raw in self._fields.items():
            value = raw.decode("utf-8", errors="replace")
            nested = _NESTED.fullmatch(name)
            if nested is None:
                values[name] = value
            else:
                values.setdefault("expires_after", {})[nested[1]] = value
        if self._filename is not None:
            values["file"] = self._filename
        for name in ("file", "purpose"):
            if name not in values:
                raise BadRequest(name, "this part is required", "missing_field")
        return converted(values, UploadForm)

    def _close(self, file: BinaryIO) -> None:
        file.flush()
        os.fsync(file.fileno())
        file.close()
        sync_folder(self._store.folder)

    def discard(self) -> None:
        if self._file is not None:
            self._file.close()
            self._store.path(self._id).unlink(missing_ok=True)


def _plain_name(filename: str) -> str:
    """The last part of a path, which some clients send; it is shown, never opened."""
    name = PurePosixPath(PureWindowsPath(filename).name).name
    return name[:255] or "file"
