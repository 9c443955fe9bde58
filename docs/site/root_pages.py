"""A MkDocs hook: pages that lie in the root of the repository, shown in the site.

MkDocs reads one folder. CHANGELOG.md and CONTRIBUTING.md stay where GitHub looks for them, so the hook adds
them to the site's files. Links are written for GitHub; those that cross the border of docs/ are rewritten.
A link to a file that is not in the site becomes its path.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md")
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, *, config: Any) -> Files:
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=_for_site(text, ".", ".")))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    if page.file.src_uri in PAGES:
        return markdown
    folder = posixpath.dirname(page.file.src_uri)
    return _for_site(markdown, posixpath.join("docs", folder), folder or ".")


def _for_site(text: str, folder: str, site_folder: str) -> str:
    """`text` with the links of a page that lies in `folder`, for its place in the site."""

    def in_site(link: re.Match[str]) -> str:
        words, target, anchor = link.groups()
        path = posixpath.normpath(posixpath.join(folder, target))
        if not (ROOT / path).exists():
            return link[0]  # MkDocs reports it
        place = path.removeprefix("docs/") if path.startswith("docs/") else path if path in PAGES else None
        if place is None:
            return f"{words} (`{path}`)" if words.strip("`") != path else f"`{path}`"
        return f"[{words}]({posixpath.relpath(place, site_folder)}{anchor or ''})"

    return LINK.sub(in_site, text)
