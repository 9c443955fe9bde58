"""Uploads: multipart bodies are written to disk as they arrive; batch files are checked line by line."""

from __future__ import annotations

import asyncio
import io

from ridgeline.gateway.errors import NotFound, out_of_time
from ridgeline.gateway.guard.guards import Guard
from ridgeline.gateway.objects.batch_files import BatchParts, Uploader, read_batch_file
from ridgeline.gateway.objects.batch_meta import BatchMeta
from ridgeline.gateway.objects.forms import Form, FormReader
from ridgeline.gateway.objects.references import owner_of
from ridgeline.gateway.offload.offload import LARGE
from ridgeline.gateway.pipeline.parts import Parts
from ridgeline.gateway.pipeline.request_state import Receive, RequestState
from ridgeline.proxy.body import Stretch


async def read_form(parts: Parts, request: RequestState, receive: Receive) -> Form:
    """The request's form. Its files on disk are removed when the request ends."""
    config = parts.settings.gateway
    assert request.key is not None
    spool = parts.spools.spool(request.key.id)
    request.spools.append(spool)
    reader = FormReader(request.headers.get(b"content-type", b""), spool)
    pieces = request.body_pieces(receive, config.max_upload_bytes, config.upload_timeout_s, spool.held)
    async for piece in pieces:
        reader.feed(piece)
        await spool.flush(all_of_it=False)
    await spool.flush()
    request.wait_until(request.arrived + config.request_timeout_s, out_of_time)
    return reader.finish()


async def checked_batch_file(
    parts: Parts, request: RequestState, content: bytes | Stretch, upstream: str, guard: Guard | None
) -> tuple[bytes | Stretch, BatchMeta]:
    """The file for the upstream, and the gateway's meta for it."""
    assert request.key is not None
    policy = guard.config.name if guard is not None else ""
    uploader = Uploader(request.tenant, request.key, policy)
    if len(content) > LARGE:
        assert isinstance(content, Stretch)
        out = parts.spools.spool(request.key.id)
        request.spools.append(out)
        place = (str(content.file.path), content.begin, content.end, str(out.path))
        batch = await parts.offload.run(request.tenant, "batch_file", *place, uploader, upstream)
        out.written_elsewhere()
        out.held.add(out.size)
        changed: bytes | Stretch = Stretch(out, 0, out.size)
    else:
        if isinstance(content, Stretch):
            content = await asyncio.to_thread(content.file.read, content.begin, len(content))
        written = io.BytesIO()
        own = BatchParts(parts.settings, parts.catalog, parts.prices)
        batch = await read_batch_file(content.split(b"\n"), written, uploader, own, upstream, guard)
        changed = written.getvalue()
    for reference in batch.references:
        if await owner_of(parts, request.tenant, reference) != upstream:
            raise NotFound(
                f"{reference.field}: the {reference.what} is stored at another upstream", param="file"
            )
    return changed, batch.meta
