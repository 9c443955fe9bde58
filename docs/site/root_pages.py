"""A MkDocs hook: pages that lie in the root of the repository, shown in the site.

MkDocs reads one folder. CHANGELOG.md stays where GitHub looks for it, so the hook adds it to the site's
files, with links to docs/ made relative to it. Links to other files of the repository become code.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("CHANGELOG.md",)
LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)([^)\s]+)\)")


def on_files(files: Files, *, config: Any) -> Files:
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=LINK.sub(_in_site, text)))
    return files


def _in_site(link: re.Match[str]) -> str:
    words, target = link.groups()
    if target.startswith("docs/") and target.partition("#")[0].endswith(".md"):
        return f"[{words}]({target.removeprefix('docs/')})"
    return link[0] if target in PAGES else f"{words} (`{target}`)"
