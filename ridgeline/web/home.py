"""The page at `/` of a server or gateway: its name, models and links. No scripts, no external content."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ridgeline.version import __version__

# Blocks scripts even if text of a client got onto the page.
HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 40rem; margin: 3rem auto; padding: 0 1rem; }
code { font: 13px ui-monospace, monospace; }
@media (prefers-color-scheme: dark) { body { background: #16181c; color: #ddd; } a { color: #8ab4f8; } }
"""


def home_page(kind: str, models: Sequence[str] | None, links: Sequence[tuple[str, str]]) -> bytes:
    """kind: server or gateway. models: None if keys are required; the version is not shown then either.
    links: paths with their descriptions.
    """
    if models is None:
        about = "<p>Requests need an API key: <code>Authorization: Bearer KEY</code>.</p>"
    else:
        rows = "".join(f"<li><code>{escape(name)}</code></li>" for name in models)
        about = f"<p>Version {escape(__version__)}. Models:</p><ul>{rows}</ul>"
    paths = "".join(
        f'<li><a href="{escape(path)}"><code>{escape(path)}</code></a> {escape(what)}</li>'
        for path, what in links
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>ridgeline {kind}</title>'
        f"<style>{_STYLE}</style></head><body><h1>ridgeline {kind}</h1>{about}"
        f"<p>APIs of OpenAI and Anthropic: base URL <code>/v1</code> and <code>/</code>.</p>"
        f"<ul>{paths}</ul></body></html>"
    ).encode()
