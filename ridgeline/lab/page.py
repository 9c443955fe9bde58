"""One self-contained HTML page: a title, banners, tables and charts; light and dark; nothing is fetched.

Used by bench, plan and tune. All input text is escaped here; `Html` marks text that is already markup. The
page has no scripts, so no text of a result can run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from ridgeline import __version__
from ridgeline.lab.charts import STYLE as CHART_STYLE

# No script, image or font from anywhere, even if something were not escaped.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"

STYLE = (
    """\
:root { color-scheme: light dark; --ink: #1c2430; --faint: #5d6878; --line: #dde2e8; --paper: #ffffff;
  --panel: #f6f8fa; --good: #12805c; --alarm: #c0221f; --alarm-paper: #fdecea; --note-paper: #fff7e0; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --faint: #9aa5b4; --line: #2c343f;
  --paper: #14181e; --panel: #1b2129; --good: #4cc79a; --alarm: #ff7b72; --alarm-paper: #3a1715;
  --note-paper: #33290f; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 24px 20px 60px; max-width: 1080px; background: var(--paper);
  color: var(--ink); font: 14px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 22px; margin: 0 0 2px; } h2 { font-size: 16px; margin: 32px 0 8px; }
pre { margin: 0; font-size: 12.5px; white-space: pre-wrap; overflow-wrap: anywhere; }
p { margin: 6px 0; } .faint, .faint a { color: var(--faint); } code { font-size: 12.5px; }
.banner { border-left: 5px solid var(--alarm); background: var(--alarm-paper); padding: 10px 14px;
  margin: 14px 0; border-radius: 4px; } .banner strong { color: var(--alarm); font-size: 16px; }
.banner ul { margin: 4px 0 0; padding-left: 20px; }
.note { border-left: 5px solid #c79a1b; background: var(--note-paper); padding: 8px 14px; margin: 12px 0;
  border-radius: 4px; } .note ul { margin: 0; padding-left: 18px; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
table { margin: 6px 0 10px; } th, td { padding: 4px 12px 4px 0; border-bottom: 1px solid var(--line);
  text-align: right; vertical-align: top; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { color: var(--faint); font-weight: 600; }
td.words, th.words { text-align: left; white-space: normal; overflow-wrap: anywhere; min-width: 13em; }
td:first-child small { white-space: normal; display: inline-block; max-width: min(36em, 45vw); }
td small, th small { font-weight: 400; color: var(--faint); } [title] { cursor: help; }
td[title], th[title] { text-decoration: underline dotted var(--line); text-underline-offset: 3px; }
.good { color: var(--good); } .bad { color: var(--alarm); }
.tiles { display: flex; flex-wrap: wrap; gap: 10px; margin: 14px 0; }
.tile { background: var(--panel); border-radius: 6px; padding: 8px 14px; min-width: 120px; }
.tile b { display: block; font-size: 20px; font-weight: 600; }
.tile span { color: var(--faint); font-size: 12px; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(460px, 100%), 1fr));
  gap: 18px 22px; }
.wide { grid-column: 1 / -1; } footer { margin-top: 40px; color: var(--faint); font-size: 12px; }
@media print { body { max-width: none; } .charts > * { break-inside: avoid; } }
"""
    + CHART_STYLE
)


class Html(str):
    """Markup that is already safe."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Cell:
    """A table's cell with a hover text (`title`), a look (`good`, `bad`, `words`), and small print."""

    text: str | Html
    title: str = ""
    look: str = ""
    small: str = ""


def page(title: str, parts: Iterable[Html], *, subtitle: str = "", made_at: str = "") -> str:
    """The whole document, as text for a file."""
    made = f"ridgeline {__version__}" + (f", {made_at}" if made_at else "")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f'<h1>{escape(title)}</h1>\n<p class="faint">{safe(subtitle)}</p>\n'
        + "\n".join(parts)
        + f"\n<footer>{escape(made)}. This page fetches nothing.</footer>\n</body>\n</html>\n"
    )


def safe(text: str) -> Html:
    """Escaped, unless it is already markup."""
    return text if isinstance(text, Html) else Html(escape(text))


def heading(text: str, explanation: str = "") -> Html:
    below = f'<p class="faint">{safe(explanation)}</p>' if explanation else ""
    return Html(f"<h2>{escape(text)}</h2>{below}")


def paragraph(text: str, *, faint: bool = False) -> Html:
    return Html(f"<p{' class=faint' if faint else ''}>{safe(text)}</p>")


def preformatted(text: str) -> Html:
    """Text with its own line breaks."""
    return Html(f"<pre>{safe(text)}</pre>")


def banner(headline: str, reasons: Sequence[str]) -> Html:
    """A warning that must not be missed."""
    return Html(f'<div class="banner" role="alert"><strong>{escape(headline)}</strong>{_list(reasons)}</div>')


def notes(texts: Sequence[str]) -> Html:
    return Html(f'<div class="note">{_list(texts)}</div>' if texts else "")


def tiles(figures: Sequence[tuple[str, str, str]]) -> Html:
    """Headline figures: (figure, what it is, formula as hover text)."""
    inner = "".join(
        f'<div class="tile" title="{escape(title)}"><b>{escape(figure)}</b><span>{escape(name)}</span></div>'
        for figure, name, title in figures
    )
    return Html(f'<div class="tiles">{inner}</div>')


def table(head: Sequence[str | Cell], rows: Iterable[Sequence[str | Cell]]) -> Html:
    top = "".join(_cell(cell, "th") for cell in head)
    body = "".join(f"<tr>{''.join(_cell(cell, 'td') for cell in row)}</tr>" for row in rows)
    return Html(
        f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def facts(values: Mapping[str, Any]) -> Html:
    """Two columns: a name and its value. Nested tables are flattened with dots."""
    rows: list[list[str | Cell]] = [[name, Cell(text, look="words")] for name, text in flattened(values)]
    return table(["", ""], rows) if rows else Html('<p class="faint">nothing recorded</p>')


def flattened(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            found += flattened(value, f"{prefix}{name}.")
        elif isinstance(value, list | tuple):
            found.append((f"{prefix}{name}", ", ".join(map(str, value)) or "none"))
        elif value is not None and value != "":
            found.append((f"{prefix}{name}", f"{value:g}" if isinstance(value, float) else str(value)))
    return found


def charts(drawn: Iterable[str], *, wide: bool = False) -> Html:
    """SVGs of `lab.charts` (safe by construction) in a grid."""
    opening = '<div class="wide">' if wide else "<div>"
    return Html('<div class="charts">' + "".join(f"{opening}{svg}</div>" for svg in drawn) + "</div>")


def _cell(cell: str | Cell, tag: str) -> str:
    found = cell if isinstance(cell, Cell) else Cell(cell)
    title = f' title="{escape(found.title)}"' if found.title else ""
    look = f' class="{escape(found.look)}"' if found.look else ""
    small = f"<br><small>{escape(found.small)}</small>" if found.small else ""
    return f"<{tag}{look}{title}>{safe(found.text)}{small}</{tag}>"


def _list(texts: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{safe(text)}</li>" for text in texts) + "</ul>" if texts else ""
