"""README, CONTRIBUTING and the architecture name files that exist, and all of the packages' rooms."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "ridgeline"
SPAN = re.compile(r"`([\w./-]+)`")
FILE = re.compile(r"\.(py|cpp|h)$")
PAGES = ("CONTRIBUTING.md", "docs/architecture.md", "docs/fleet-faults.md")


def test_the_map_has_every_room() -> None:
    """Rows of the map: `package` | `room/`, `room/` | …; an empty first cell continues the package above."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    mapped: set[Path] = set()
    packages: list[str] = []
    for line in text[text.index("| package | room |") :].splitlines()[2:]:
        if not line.startswith("|"):
            break
        package, rooms = line.split("|")[1:3]
        packages = SPAN.findall(package) or packages
        mapped |= {ROOT / name for name in packages}
        mapped |= {ROOT / packages[0] / name for name in SPAN.findall(rooms)}
    assert sorted(path for path in mapped if not path.exists()) == []
    inside = [path for path in PACKAGE.rglob("*") if path.is_dir() and path.name != "__pycache__"]
    rooms_there = {path for path in inside if len(path.relative_to(PACKAGE).parts) <= 2}
    small = {path for path in rooms_there if path.parent.name == "cli"}  # one file for each verb
    assert sorted(rooms_there - mapped - small) == []


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_files_that_exist(page: str) -> None:
    """A name with a folder is a path from the root or the package; one without is a file of some folder."""
    files = {path.name for folder in ("ridgeline", "native") for path in (ROOT / folder).rglob("*.*")}
    names = [name for name in SPAN.findall((ROOT / page).read_text(encoding="utf-8")) if FILE.search(name)]
    assert names
    missing = [
        name
        for name in names
        if not ((ROOT / name).exists() or (PACKAGE / name).exists() if "/" in name else name in files)
    ]
    assert missing == []


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "examples/README.md"])
def test_links_outside_the_site_lead_to_files(page: str) -> None:
    """`make docs` checks the pages in docs/."""
    text = (ROOT / page).read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text)
    assert links
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
