"""Lab reports in a folder that the operator named: their list, and one report for a frame of the page.

A frame cannot send a key. The list, which needs one, gives each report an address with a signature; its
secret changes with every start. Reports have no scripts, and the answer's policy allows none.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from html import unescape
from pathlib import Path
from urllib.parse import quote

import msgspec
from starlette.responses import Response

from ridgeline.console.assets import REPORTS
from ridgeline.console.responses import HARDENED

MOST_REPORTS = 500
MOST_DEPTH = 4
MOST_BYTES = 16 << 20
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'self'; sandbox"
_TITLE = re.compile(rb"<title>(.*?)</title>", re.DOTALL)
# A report's kind: by its own name, else by a file beside it.
_BY_NAME = {
    "plan.html": "plan",
    "ledger.html": "tuning ledger",
    "gate.html": "evaluation",
    "compare.html": "evaluation",
    "scan.html": "quantization",
}
_BY_NEIGHBOUR = {
    "coldstart.json": "cold starts",
    "sweep.json": "sweep",
    "evaluation.json": "evaluation",
    "report.json": "quantization",
}


class Report(msgspec.Struct, frozen=True):
    kind: str
    title: str
    path: str  # relative to the folder
    written: float  # Unix seconds
    url: str


class Reports:
    def __init__(self, folder: Path | None) -> None:
        self._folder = None if folder is None else folder.expanduser().resolve()
        self._secret = secrets.token_bytes(32)

    @property
    def is_set(self) -> bool:
        return self._folder is not None

    def list(self) -> list[Report]:
        """The newest first. Reads the disk: call it off the event loop."""
        if self._folder is None or not self._folder.is_dir():
            return []
        found = []
        for path in self._folder.rglob("*.html"):
            relative = path.relative_to(self._folder)
            inside = path.resolve().is_relative_to(self._folder)
            if (
                inside
                and path.is_file()
                and len(relative.parts) <= MOST_DEPTH
                and path.stat().st_size <= MOST_BYTES
            ):
                found.append((path.stat().st_mtime, path, relative.as_posix()))
        found.sort(reverse=True)
        return [self._report(*one) for one in found[:MOST_REPORTS]]

    def show(self, path: str, signature: str) -> Response | None:
        """One report; None if there is none or the signature is not valid."""
        if self._folder is None or not hmac.compare_digest(self._sign(path).encode(), signature.encode()):
            return None
        file = (self._folder / path).resolve()
        if not file.is_relative_to(self._folder) or file.suffix != ".html" or not file.is_file():
            return None
        headers = {"content-security-policy": POLICY, "cache-control": "no-store", **HARDENED}
        return Response(file.read_bytes()[:MOST_BYTES], headers=headers, media_type="text/html")

    def _report(self, written: float, path: Path, relative: str) -> Report:
        with path.open("rb") as file:
            title = _TITLE.search(file.read(64 << 10))
        words = unescape(title[1].decode("utf-8", "replace")).strip() if title else relative
        url = f"{REPORTS}{quote(relative)}?signature={self._sign(relative)}"
        return Report(_kind(path), words, relative, round(written, 1), url)

    def _sign(self, path: str) -> str:
        return hmac.new(self._secret, path.encode("utf-8", "surrogateescape"), hashlib.sha256).hexdigest()


def _kind(path: Path) -> str:
    if path.name in _BY_NAME:
        return _BY_NAME[path.name]
    return next(
        (kind for beside, kind in _BY_NEIGHBOUR.items() if (path.parent / beside).exists()), "benchmark"
    )
