"""SmallStore: an HTTP server with ranges, over a dict of files; tests switch its faults on."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec

from ridgeline.models.sources.manifest import HeldFile, Manifest


class SmallStore:
    def __init__(self, files: dict[str, bytes], model: str = "org/tiny", key: str = "") -> None:
        self.files, self.model, self.key = files, model, key
        self.url = ""
        self.asked: list[tuple[str, str]] = []  # path and range of every request
        self.headers: list[dict[str, str]] = []
        self.sent = 0  # bytes of files
        # Faults.
        self.cut_after: int | None = None  # bytes of an answer, then the connection closes
        self.cuts = 0  # answers that are cut; then it works again
        self.busy = 0  # answers with 503 and Retry-After
        self.retry_after = "1"
        self.has_ranges = True
        self.redirect = ""
        self.refusal: bytes | None = None  # body of a 403

    def held(self, name: str) -> HeldFile:
        data = self.files[name]
        return HeldFile(name, len(data), hashlib.sha256(data).hexdigest())

    def manifest(self, **changed: object) -> bytes:
        held = tuple(self.held(name) for name in self.files)
        return msgspec.json.encode(msgspec.structs.replace(Manifest(self.model, held), **changed))

    def content(self, path: str) -> bytes | None:
        """As a store (by name) and as a peer (by sha256)."""
        path = path.partition("?")[0]
        if path in ("/manifest.json", "/replica/files"):
            return self.manifest()
        by_hash = {hashlib.sha256(data).hexdigest(): data for data in self.files.values()}
        return by_hash.get(path.removeprefix("/replica/files/"), self.files.get(path.removeprefix("/")))


@contextmanager
def serving(store: SmallStore) -> Iterator[SmallStore]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            store.asked.append((self.path, self.headers.get("range", "")))
            store.headers.append({name.lower(): value for name, value in self.headers.items()})
            if store.redirect:
                return self._end(302, b"", {"location": store.redirect})
            if store.refusal is not None:
                return self._end(403, store.refusal)
            if store.key and self.headers.get("authorization") != f"Bearer {store.key}":
                return self._end(401, b"this API key is not valid")
            data = store.content(self.path)
            if data is None:
                return self._end(404, b"not there")
            is_file = "manifest" not in self.path and self.path.partition("?")[0] != "/replica/files"
            if is_file and store.busy:
                store.busy -= 1
                return self._end(503, b"busy", {"retry-after": store.retry_after})
            match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
            if match is None or not store.has_ranges:
                return self._end(200, data)
            start, end = int(match[1]), int(match[2]) + 1
            shown = {"content-range": f"bytes {start}-{end - 1}/{len(data)}"}
            return self._end(206, data[start:end], shown, is_file=is_file)

        def _end(
            self, status: int, body: bytes, headers: dict[str, str] | None = None, *, is_file: bool = False
        ) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            if is_file and store.cut_after is not None and store.cuts:
                store.cuts -= 1
                body = body[: store.cut_after]
                self.close_connection = True
            if is_file:
                store.sent += len(body)
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    store.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield store
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
