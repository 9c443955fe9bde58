"""Every `pip install` line of the documentation can be run in a checkout.

ridgeline is not on a package index, so a documented line must not ask one for it: the install would fail, or
fetch another project of that name.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[1]
WITH_VALUE = {"-c", "--constraint", "-r", "--requirement", "--find-links", "--index-url", "--extra-index-url"}


def documented() -> list[tuple[str, str]]:
    """Each documented line as (file:line, what follows `pip install`)."""
    pages = [*CHECKOUT.glob("*.md"), *CHECKOUT.glob("docs/**/*.md"), *CHECKOUT.glob("examples/**/*.md")]
    found = []
    for page in sorted(pages):
        if page.name == "CHANGELOG.md":  # what was true of an older version
            continue
        for number, line in enumerate(page.read_text().splitlines(), 1):
            where = f"{page.relative_to(CHECKOUT)}:{number}"
            found += [(where, rest) for rest in re.findall(r"pip install ([^`\n]+)", line)]
    return found


def requirements(arguments: str) -> list[str]:
    """What a line installs: its words without options, up to a comment or another command."""
    words = iter(shlex.split(re.split(r"&&|[;|]", arguments)[0], comments=True))
    kept = []
    for word in words:
        if word in WITH_VALUE:
            next(words, None)
        elif not word.startswith("-"):
            kept.append(word)
    return kept


def wrong(requirement: str) -> str | None:
    """Why a requirement cannot be installed as written in a checkout."""
    name, _, rest = requirement.partition("[")
    if re.match(r"ridgeline\b", name):
        return "ridgeline is not on a package index: write '.[extra]'"
    if name != ".":
        return None
    extras = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    unknown = [extra for extra in rest.rstrip("]").split(",") if rest and extra not in extras]
    return f"pyproject.toml has no extra {', '.join(unknown)}" if unknown else None


def test_documented_installs_name_the_checkout_and_extras_that_exist() -> None:
    lines = documented()
    assert any(requirements(line) == ["."] for _, line in lines), "README.md lost its `pip install .`"
    faults = [
        f"{where}: {requirement}: {why}"
        for where, line in lines
        for requirement in requirements(line)
        if (why := wrong(requirement))
    ]
    assert faults == []


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("'ridgeline[gateway]'", "not on a package index"),
        ("-c constraints.txt '.[torhc]'", "no extra torhc"),
        ("-e '.[gateway,lab]'  # both", None),
        ("transformers torch && python convert.py", None),
    ],
)
def test_a_line_that_cannot_work_is_noticed(line: str, fault: str | None) -> None:
    found = [why for requirement in requirements(line) if (why := wrong(requirement))]
    assert (fault is None and not found) or (fault is not None and fault in found[0])
