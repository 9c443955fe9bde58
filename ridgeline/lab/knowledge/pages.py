"""The entries as terminal text and as documentation pages.

`python -m ridgeline.lab.knowledge.pages` writes docs/glossary.md and docs/techniques/; a test checks that
they match the tables.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

from ridgeline.lab.knowledge.entries import Entry, Technique, Term, entries, find, techniques, terms

WIDTH = 96
GENERATED = (
    "<!-- Written by `python -m ridgeline.lab.knowledge.pages` from the tables beside that module. -->"
)


def as_text(entry: Entry) -> str:
    """For the terminal."""
    if isinstance(entry, Term):
        parts = [_titled(entry), _wrapped(entry.meaning)]
        parts += [_labelled("formula", entry.formula)] if entry.formula else []
        parts += [_labelled("figure", entry.figure)] if entry.figure else []
        parts += [_labelled("measure", entry.measure)]
        parts += [_labelled("see", ", ".join(entry.see))] if entry.see else []
        return "\n".join(parts)
    lists = {"it pays": entry.pays, "it hurts": entry.hurts, "figures": entry.figures}
    return "\n".join(
        [
            _titled(entry),
            _wrapped(entry.what),
            _labelled("gate", entry.gate),
            *(_listed(label, items) for label, items in lists.items()),
            _labelled("goes with", ", ".join(entry.interacts)),
            _labelled("here", entry.here.replace("`", "")),
            _labelled("measure", entry.measure),
        ]
    )


def index_text() -> str:
    """All names, for `ridgeline explain` without one."""
    lines = ["techniques, each with its gate:"]
    lines += [_wrapped(", ".join(technique.name for technique in techniques()))]
    lines += ["", "terms, each with its formula or figure:"]
    lines += [_wrapped(", ".join(term.name for term in terms()))]
    return "\n".join(lines)


def pages() -> dict[str, str]:
    """Every page by its path below docs/."""
    written = {f"techniques/{technique.slug}.md": _technique_page(technique) for technique in techniques()}
    return {**written, "techniques/README.md": _techniques_index(), "glossary.md": _glossary_page()}


def _technique_page(technique: Technique) -> str:
    def bullets(items: tuple[str, ...]) -> str:
        return "\n".join(f"- {item}" for item in items)

    return f"""{GENERATED}
# {_capital(technique.name)}

{technique.what}

**Gate.** {technique.gate}

## When it pays

{bullets(technique.pays)}

## When it hurts

{bullets(technique.hurts)}

## What it interacts with

{", ".join(_link(name, "") for name in technique.interacts)}

## Figures

{bullets(technique.figures)}

## In ridgeline

{technique.here}

```
{technique.measure}
```
"""


def _techniques_index() -> str:
    rows = [f"| [{t.name}]({t.slug}.md) | {_cell(t.gate)} |" for t in techniques()]
    head = ["| technique | gate |", "|---|---|"]
    return "\n".join([GENERATED, "# Techniques, and when to use them", "", *head, *rows, ""])


def _glossary_page() -> str:
    lines = [GENERATED, "# Glossary", "", "`ridgeline explain TERM` prints an entry.", ""]
    for term in sorted(terms(), key=lambda term: term.name.lower()):
        names = f" ({', '.join(term.aliases)})" if term.aliases else ""
        lines += [f"## {term.name}", "", f"{term.meaning}{names and f' Also:{names}'}", ""]
        lines += [f"- formula: {term.formula}"] if term.formula else []
        lines += [f"- figure: {term.figure}"] if term.figure else []
        lines += [f"- measured by: `{term.measure}`"]
        lines += [f"- see: {', '.join(_link(name, 'techniques/') for name in term.see)}"] if term.see else []
        lines += [""]
    return "\n".join(lines)


def _link(name: str, folder: str) -> str:
    """From a page in docs/techniques (folder "") or from docs/glossary.md (folder "techniques/")."""
    entry = find(name)
    if isinstance(entry, Technique):
        return f"[{name}]({folder}{entry.slug}.md)"
    anchor = "".join(c for c in entry.name.lower() if c.isalnum() or c in " -_").replace(" ", "-")
    return f"[{name}]({'' if folder else '../glossary.md'}#{anchor})"


def _titled(entry: Entry) -> str:
    names = f"  ({', '.join(entry.aliases)})" if entry.aliases else ""
    return f"{_capital(entry.name)}{names}"


def _capital(name: str) -> str:
    return name[:1].upper() + name[1:]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent="  ")


def _labelled(label: str, text: str) -> str:
    indent = " " * 13
    return textwrap.fill(
        text, WIDTH, initial_indent=f"  {label + ':':<11}", subsequent_indent=indent, break_long_words=False
    )


def _listed(label: str, items: tuple[str, ...]) -> str:
    lines = []
    for index, item in enumerate(items):
        head = f"  {label + ':' if index == 0 else '':<11}- "
        lines.append(textwrap.fill(item, WIDTH, initial_indent=head, subsequent_indent=" " * 15))
    return "\n".join(lines)


def main() -> None:
    docs = Path(__file__).resolve().parents[3] / "docs"
    for name, text in pages().items():
        path = docs / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    print(f"{len(pages())} pages of {len(entries())} entries written to {docs}")


if __name__ == "__main__":
    main()
