"""Holders: peers and stores that hold a model's files, read by HTTP or from a mounted folder.

A holder returns a manifest and ranges of files; it verifies nothing (`download` does). The fleet's key goes
to peers alone. A store is plain HTTP(S) without a login of ours, or a folder.
"""

from __future__ import annotations

import http.client
import re
import secrets
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Protocol

from ridgeline.models.sources.http_opener import opener
from ridgeline.models.sources.link_speed import link_bytes_per_s
from ridgeline.models.sources.manifest import (
    FETCH_HEADER,
    MANIFEST_BYTES,
    MANIFEST_FILE,
    MANIFEST_PATH,
    BadManifest,
    HeldCache,
    HeldFile,
    Manifest,
    read_manifest,
)

CHUNK_BYTES = 1 << 20
ANSWER_S = 30.0  # without a byte
MANIFEST_S = 600.0  # a peer may have to hash its files first
ERROR_BYTES = 4096  # of an error's body, in which its code is looked for
# The field of S3 and Azure (XML), and that of Google's store and of our peers (JSON).
_CODE = re.compile(rb'<Code>\s*([\w.-]{1,64})\s*</Code>|"code"\s*:\s*"?([\w.-]{1,64})"?\s*[,}]')
Held = HeldFile | HeldCache


class HolderFailed(Exception):
    """A holder cannot be used. again: the same request may work a moment later. status: of HTTP, or 0."""

    def __init__(self, message: str, *, again: bool = False, wait_s: float = 0.0, status: int = 0) -> None:
        super().__init__(message)
        self.again, self.wait_s, self.status = again, wait_s, status


class Holder(Protocol):
    label: str  # such as `peer chat-1`; without secrets
    limit_bytes_per_s: float | None  # of the link, where it is known

    def manifest(self, wait_s: float = MANIFEST_S) -> Manifest:
        """wait_s: longest time without a byte of the answer."""
        ...

    def read(self, held: Held, start: int, end: int) -> Iterator[bytes]:
        """The bytes from start to end, in chunks. HolderFailed where they do not come, or too few."""
        ...


class Peer:
    """A replica that serves the same model. model: the one to ask for; without it, the peer's first."""

    def __init__(self, name: str, url: str, key: str, model: str = "") -> None:
        self.label = f"peer {name}"
        self._url, self._model = url.rstrip("/"), model
        self._headers = {FETCH_HEADER: secrets.token_hex(8)}
        if key:
            self._headers["authorization"] = f"Bearer {key}"
        # No proxy, and no redirect: either would carry the key elsewhere.
        self._opener = opener(urllib.request.ProxyHandler({}), _NoRedirect())
        self.limit_bytes_per_s = link_bytes_per_s(urllib.parse.urlsplit(url).hostname or "")

    def manifest(self, wait_s: float = MANIFEST_S) -> Manifest:
        url = self._url + MANIFEST_PATH
        if self._model:
            try:
                asked = urllib.parse.urlencode({"model": self._model})
                return _manifest(self._opener, f"{url}?{asked}", self._headers, wait_s)
            except HolderFailed as error:
                if error.status not in (400, 404):  # it knows the model by another name, or not at all
                    raise
        return _manifest(self._opener, url, self._headers, wait_s)

    def read(self, held: Held, start: int, end: int) -> Iterator[bytes]:
        url = f"{self._url}{MANIFEST_PATH}/{held.sha256}"
        return _range(self._opener, url, self._headers, held, start, end)


class HttpStore:
    """A folder of an object store by HTTP(S), or the URL of a manifest in one (`….json`).

    A query in the URL, such as a token, is sent with every request and never shown.
    """

    def __init__(self, url: str) -> None:
        self.label = f"store {shown_url(url)}"
        parts = urllib.parse.urlsplit(url)
        folder = parts.path if parts.path.endswith((".json", "/")) else parts.path + "/"
        self._manifest = parts._replace(
            path=folder if folder.endswith(".json") else folder + MANIFEST_FILE
        ).geturl()
        self._query = parts.query
        self._opener = opener()
        self.limit_bytes_per_s = link_bytes_per_s(parts.hostname or "")

    def manifest(self, wait_s: float = MANIFEST_S) -> Manifest:
        return _manifest(self._opener, self._manifest, {}, wait_s)

    def read(self, held: Held, start: int, end: int) -> Iterator[bytes]:
        url = urllib.parse.urljoin(self._manifest, held.url or urllib.parse.quote(held.name))
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https"):
            raise HolderFailed(f"{held.name}: its url has the scheme {parts.scheme!r}, not http or https")
        if not held.url and self._query:
            url = parts._replace(query=self._query).geturl()
        return _range(self._opener, url, {}, held, start, end)


class FolderStore:
    """A mounted bucket, or any folder with a manifest."""

    def __init__(self, folder: Path) -> None:
        self.label = f"store {folder}"
        self._folder = folder
        self.limit_bytes_per_s: float | None = None

    def manifest(self, wait_s: float = MANIFEST_S) -> Manifest:
        path = self._folder / MANIFEST_FILE
        try:
            with path.open("rb") as file:
                return _checked(file.read(MANIFEST_BYTES + 1))
        except OSError as error:
            raise HolderFailed(f"{path} cannot be read: {error.strerror}") from None

    def read(self, held: Held, start: int, end: int) -> Iterator[bytes]:
        try:
            with (self._folder / held.name).open("rb") as file:
                file.seek(start)
                yield from _chunks(file, end - start, held)
        except OSError as error:
            raise HolderFailed(f"{held.name} cannot be read: {error.strerror}") from None


def store_of(source: str) -> HttpStore | FolderStore:
    """Of a source that is a URL or a path. See `is_store`."""
    if source.startswith(("http://", "https://")):
        return HttpStore(source)
    if source.startswith("file://"):
        return FolderStore(Path(urllib.parse.unquote(urllib.parse.urlsplit(source).path)))
    return FolderStore(Path(source).expanduser())


def shown_url(url: str) -> str:
    """Without a login or a token."""
    parts = urllib.parse.urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


def _manifest(
    opener: urllib.request.OpenerDirector, url: str, headers: dict[str, str], wait_s: float
) -> Manifest:
    with _opened(opener, url, headers, wait_s) as answer:
        try:
            return _checked(answer.read(MANIFEST_BYTES + 1))
        except (OSError, http.client.HTTPException) as error:
            raise HolderFailed(f"its manifest broke off: {error}", again=True) from None


def _checked(data: bytes) -> Manifest:
    if len(data) > MANIFEST_BYTES:
        raise HolderFailed(f"its manifest has more than {MANIFEST_BYTES >> 20} MiB")
    try:
        return read_manifest(data)
    except BadManifest as error:
        raise HolderFailed(f"its manifest cannot be used: {error}") from None


def _range(
    opener: urllib.request.OpenerDirector,
    url: str,
    headers: dict[str, str],
    held: Held,
    start: int,
    end: int,
) -> Iterator[bytes]:
    asked = {**headers, "range": f"bytes={start}-{end - 1}", "accept-encoding": "identity"}
    with _opened(opener, url, asked, ANSWER_S) as answer:
        is_whole = start == 0 and end == held.bytes
        if answer.status != 206 and not (answer.status == 200 and is_whole):
            raise HolderFailed(f"{held.name}: it does not serve ranges of files (status {answer.status})")
        given = answer.headers.get("content-range", "")
        if answer.status == 206 and not given.startswith(f"bytes {start}-{end - 1}/"):
            sent = repr(given[:64]) if given else "no content-range"
            raise HolderFailed(f"{held.name}: it sent {sent} for {start}-{end - 1}")
        try:
            yield from _chunks(answer, end - start, held)
        except (OSError, http.client.HTTPException) as error:
            raise HolderFailed(f"{held.name} broke off: {error}", again=True) from None


def _chunks(file: IO[bytes] | http.client.HTTPResponse, size: int, held: Held) -> Iterator[bytes]:
    left = size
    while left:
        chunk = file.read(min(left, CHUNK_BYTES))
        if not chunk:
            raise HolderFailed(
                f"{held.name} is truncated: {size - left:,} of {size:,} bytes came", again=True
            )
        left -= len(chunk)
        yield chunk


def _code_in(body: bytes) -> str:
    """The code that an error's body names; empty if it has none. The rest may hold keys and signatures."""
    found = _CODE.search(body)
    return "" if found is None else (found[1] or found[2]).decode()


def _opened(
    opener: urllib.request.OpenerDirector, url: str, headers: dict[str, str], timeout_s: float
) -> http.client.HTTPResponse:
    try:
        answer: http.client.HTTPResponse = opener.open(
            urllib.request.Request(url, headers=headers), timeout=timeout_s
        )
        return answer
    except urllib.error.HTTPError as error:
        with error:
            code = _code_in(error.read(ERROR_BYTES))
        wait = error.headers.get("retry-after", "")
        raise HolderFailed(
            f"status {error.code}" + (f", code {code}" if code else ""),
            again=error.code in (429, 500, 502, 503, 504),
            wait_s=float(wait) if wait.isdecimal() else 0.0,
            status=error.code,
        ) from None
    except (http.client.InvalidURL, ValueError):  # their messages have parts of the URL
        raise HolderFailed("cannot be reached: its URL is not valid") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise HolderFailed(f"cannot be reached: {reason}", again=True) from None
