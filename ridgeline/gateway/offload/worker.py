"""The process behind Offload: reads jobs from stdin, writes results to stdout, pickled and length-prefixed.

    python -m ridgeline.gateway.offload.worker

It exits at the end of stdin. A result holds few objects: a worker's event loop unpickles it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import struct
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from ridgeline.gateway.accounting.prices import Prices
from ridgeline.gateway.accounting.tokenizer_counts import TokenizerCounts
from ridgeline.gateway.accounting.usage import Usage
from ridgeline.gateway.body import read_fields
from ridgeline.gateway.catalog import Catalog
from ridgeline.gateway.dialects.counts import usage_of
from ridgeline.gateway.dialects.families import Family
from ridgeline.gateway.dialects.translate import translate_answer, translate_request
from ridgeline.gateway.errors import GatewayError
from ridgeline.gateway.guard.guards import Guard, Guarded
from ridgeline.gateway.objects.batch_files import BatchFile, BatchParts, Uploader, lines_of, read_batch_file
from ridgeline.gateway.objects.references import Reference, references
from ridgeline.gateway.offload.offload import PlainFields, plain, raw_fields
from ridgeline.gateway.pipeline.most_used import PromptCounts, prompt_counts
from ridgeline.gateway.routing.reading import Reading, read
from ridgeline.gateway.settings import GatewaySettings, from_json

NICE = 5  # the worker's event loop has priority


class Jobs:
    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._loop = asyncio.new_event_loop()
        self._token_counts = TokenizerCounts()
        self._batch_parts: BatchParts | None = None
        # A batch file's lines are checked in order: a second NER process would be idle.
        self._guards = {one.name: Guard(replace(one, ner_processes=1)) for one in settings.guards}

    def fields(self, body: bytes) -> PlainFields:
        return plain(read_fields(body))

    def prompt_counts(self, kind: str, fields: PlainFields) -> PromptCounts:
        return prompt_counts(kind, raw_fields(fields))

    def references(self, kind: str, fields: PlainFields) -> list[Reference]:
        return references(kind, raw_fields(fields))

    def texts(self, policy: str, fields: PlainFields) -> list[str]:
        return self._guards[policy].texts(raw_fields(fields))

    def guard(self, policy: str, kind: str, fields: PlainFields, names: Any) -> Guarded:
        return self._guards[policy].check(kind, raw_fields(fields), names)

    def restore(
        self, policy: str, kind: str, body: bytes, vault: list[bytes]
    ) -> tuple[bytes, dict[str, int]]:
        return self._guards[policy].restored(kind, body, vault)

    def batch_file(
        self, path: str, begin: int, end: int, out_path: str, uploader: Uploader, upstream: str
    ) -> BatchFile:
        settings = self._settings
        if self._batch_parts is None:
            prices = Prices(settings.models, settings.upstreams, settings.prices)
            self._batch_parts = BatchParts(settings, Catalog(settings), prices)
        lines = lines_of(path, begin, end, settings.gateway.max_body_bytes)
        with open(out_path, "wb") as out:
            work = self._read_batch_file(lines, out, uploader, self._batch_parts, upstream)
            return self._loop.run_until_complete(work)

    async def _read_batch_file(
        self, lines: Iterable[bytes], out: BinaryIO, uploader: Uploader, parts: BatchParts, upstream: str
    ) -> BatchFile:
        """NER runs only for the duration of this file: its model takes hundreds of megabytes."""
        if not uploader.guard:
            return await read_batch_file(lines, out, uploader, parts, upstream, None)
        guard = self._guards[uploader.guard]
        try:
            await guard.start()
            return await read_batch_file(lines, out, uploader, parts, upstream, guard)
        finally:
            await guard.close()

    def reading(self, kind: str, fields: PlainFields) -> Reading:
        return read(kind, raw_fields(fields))

    def translate(self, kind: str, fields: PlainFields, family: Family) -> tuple[str, PlainFields]:
        path, changed = translate_request(kind, raw_fields(fields), family, self._settings.dialects)
        return path, plain(changed)

    def usage(self, kind: str, family: Family, body: bytes) -> Usage | None:
        return usage_of(kind, family, body)

    def count_tokens(
        self, file: Path, fields: PlainFields, answer: bytes | None, texts: list[bytes]
    ) -> tuple[int, int]:
        return self._token_counts.count(file, fields, answer, texts)

    def translate_answer(self, kind: str, body: bytes, family: Family, fields: PlainFields) -> bytes:
        return translate_answer(kind, body, family, raw_fields(fields))


def main() -> None:
    questions, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # output of a library must not come between the answers
    with contextlib.suppress(OSError):
        os.nice(NICE)
    first = _read(questions)
    if first is None:
        return
    jobs = Jobs(from_json(first))
    _write(answers, b"")
    while (question := _read(questions)) is not None:
        job, arguments = pickle.loads(question)
        del question
        _write(answers, pickle.dumps(_done(getattr(jobs, job), arguments)))


def _done(job: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[str, Any]:
    try:
        return "ok", job(*arguments)
    except GatewayError as error:
        told = (type(error), error.message, error.status, error.code, error.param, error.headers)
        return "error", told
    except Exception as error:
        return "failed", type(error).__name__  # the message may hold text of the request


def _read(stream: BinaryIO) -> bytes | None:
    head = stream.read(8)
    if len(head) < 8:
        return None
    return stream.read(*struct.unpack("<Q", head))


def _write(stream: BinaryIO, answer: bytes) -> None:
    stream.write(struct.pack("<Q", len(answer)))
    stream.write(answer)
    stream.flush()


if __name__ == "__main__":
    main()
