"""The console's files in memory: hash names, gzip, one import map, and the policy that allows nothing else.

Modules import each other by the bare names of the import map, so a file's name can hold its content's hash
and no file is rewritten. Read once per process; a request never touches the disk.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path

import msgspec

STATIC = Path(__file__).parent / "static"
PATH = "/console"
ASSETS = f"{PATH}/assets/"
REPORTS = f"{PATH}/reports/"
IMMUTABLE = "public, max-age=31536000, immutable"

# The name that modules import → its file. uPlot is a plain script: the name only finds its address.
VENDORED = {
    "preact": "vendor/preact.js",
    "preact/hooks": "vendor/preact-hooks.js",
    "htm": "vendor/htm.js",
    "streaming-markdown": "vendor/streaming-markdown.js",
    "uplot": "vendor/uplot.js",
}
STYLES = ("tokens.css", "vendor/uplot.css", "console.css")
# Loaded with the page; the modules of the other pages come when they are opened.
FIRST_VIEW = (
    "preact",
    "preact/hooks",
    "htm",
    "streaming-markdown",
    "console/api.js",
    "console/app.js",
    "console/events.js",
    "console/format.js",
    "console/markdown.js",
    "console/reply.js",
    "console/snippets.js",
    "console/ui.js",
    "console/pages/chat.js",
    "console/pages/chat_files.js",
    "console/pages/chat_history.js",
    "console/pages/chat_reply.js",
    "console/pages/chat_settings.js",
)
# Before the first paint: a chosen theme, so that the page does not flash in the other one.
THEME = (
    'try{const t=localStorage.getItem("ridgeline.theme");if(t)document.documentElement.dataset.theme=t}'
    "catch{}"
)


@dataclass(frozen=True, slots=True)
class Asset:
    name: str  # with the hash of its content
    body: bytes
    packed: bytes  # gzip
    media_type: str

    @property
    def url(self) -> str:
        return ASSETS + self.name


class ConsoleInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the page must know before it has a key. It holds nothing that needs one."""

    kind: str  # server, gateway, fleet
    pages: tuple[str, ...]
    needs_key: bool
    key_name: str = "API key"
    version: str = ""  # shown only where no key is needed
    events: bool = True  # whether there is an event stream
    api_url: str = ""  # where clients send requests, if that is not the page's own origin


@dataclass(frozen=True)
class Assets:
    by_name: dict[str, Asset]
    modules: dict[str, str]  # name in an import → URL
    style: Asset
    icon: Asset

    def first_view(self) -> list[Asset]:
        """What the browser fetches before the first page can be used, beside the page itself."""
        urls = {self.modules[name] for name in FIRST_VIEW}
        return [self.style, *(asset for asset in self.by_name.values() if asset.url in urls)]

    @property
    def import_map(self) -> str:
        return json.dumps({"imports": self.modules}, separators=(",", ":"))

    @property
    def policy(self) -> str:
        """The content security policy: own files and the two inline scripts of `page`, nothing foreign."""
        scripts = " ".join(f"'sha256-{_digest64(text)}'" for text in (self.import_map, THEME))
        return (
            f"default-src 'self'; script-src 'self' {scripts}; img-src 'self' data: blob:; "
            "media-src 'self' data:; frame-src 'self'; object-src 'none'; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )

    def page(self, info: ConsoleInfo) -> bytes:
        preloads = "".join(f'<link rel="modulepreload" href="{self.modules[name]}">' for name in FIRST_VIEW)
        described = escape(msgspec.json.encode(info).decode(), quote=True)
        return (
            '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>ridgeline console</title>'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">'
            f'<link rel="icon" href="{self.icon.url}"><link rel="stylesheet" href="{self.style.url}">'
            f'<script>{THEME}</script><script type="importmap">{self.import_map}</script>{preloads}'
            f'<script type="module" src="{self.modules["console/app.js"]}"></script></head>'
            f'<body><div id="app" data-info="{described}"><div class="shell">'
            '<header class="side"><span class="brand">ridgeline</span></header></div></div>'
            "<noscript>The console needs JavaScript modules.</noscript></body></html>"
        ).encode()


@cache
def assets() -> Assets:
    by_name: dict[str, Asset] = {}

    def add(stem: str, ending: str, body: bytes, media_type: str) -> Asset:
        name = f"{stem}.{hashlib.sha256(body).hexdigest()[:12]}.{ending}"
        made = by_name[name] = Asset(name, body, gzip.compress(body, 9, mtime=0), media_type)
        return made

    modules = {}
    for specifier, file in VENDORED.items():
        modules[specifier] = add(Path(file).stem, "js", (STATIC / file).read_bytes(), "text/javascript").url
    for path in sorted([*STATIC.glob("*.js"), *STATIC.glob("pages/*.js")]):
        own = path.relative_to(STATIC).as_posix()
        modules[f"console/{own}"] = add(path.stem, "js", path.read_bytes(), "text/javascript").url
    style = add("console", "css", b"\n".join((STATIC / one).read_bytes() for one in STYLES), "text/css")
    icon = add("icon", "svg", (STATIC / "icon.svg").read_bytes(), "image/svg+xml")
    return Assets(by_name, modules, style, icon)


@cache
def design_tokens() -> str:
    """The colours, type scale and spacing of the console, for pages that must look like it."""
    return (STATIC / "tokens.css").read_text(encoding="utf-8")


def _digest64(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
