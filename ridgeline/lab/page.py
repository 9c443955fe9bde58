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
from ridgeline.console.assets import design_tokens
from ridgeline.lab.charts import STYLE as CHART_STYLE

# No script, image or font from anywhere, even if something were not escaped.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"

# Colours, type scale and spacing are the console's.
STYLE = (
    design_tokens()
    + """\
* { box-sizing: border-box; }
body { margin: 0 auto; padding: var(--s6) var(--s5) var(--s7); max-width: 1120px; background: var(--paper);
  color: var(--ink); font: var(--t-body)/1.5 var(--sans); font-variant-numeric: tabular-nums; }
h1, h2 { font-weight: 600; letter-spacing: -.01em; line-height: 1.25; }
h1 { font-size: var(--t-title); margin: 0 0 var(--s1); }
h2 { font-size: var(--t-lead); margin: var(--s7) 0 var(--s3); }
p { margin: var(--s2) 0; } a { color: var(--accent); } .faint, .faint a { color: var(--faint); }
code { font: 12.5px var(--mono); }
.banner, .note { padding: var(--s3) var(--s4); margin: var(--s4) 0; border-radius: var(--round); }
.banner { background: var(--alarm-wash); } .banner strong { color: var(--alarm); font-size: var(--t-lead); }
.banner ul { margin: var(--s1) 0 0; padding-left: 20px; }
.note { background: var(--warn-wash); } .note ul { margin: 0; padding-left: 18px; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; margin: var(--s2) 0 var(--s3); }
th, td { padding: var(--s2) var(--s4) var(--s2) 0; border-bottom: 1px solid var(--line);
  text-align: right; vertical-align: top; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
th { color: var(--faint); font-size: var(--t-small); font-weight: 500; }
td.words, th.words { text-align: left; white-space: normal; overflow-wrap: anywhere; min-width: 13em; }
td:first-child small { white-space: normal; display: inline-block; max-width: min(36em, 45vw); }
td small, th small { font-weight: 400; color: var(--faint); } [title] { cursor: help; }
td[title], th[title] { text-decoration: underline dotted var(--line); text-underline-offset: 3px; }
.good { color: var(--good); } .bad { color: var(--alarm); }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: var(--s3);
  margin: var(--s5) 0; }
.tile { background: var(--panel); border: 1px solid var(--line); border-radius: var(--round);
  padding: var(--s4); }
.tile b { display: block; font-size: var(--t-title); font-weight: 600; letter-spacing: -.01em; }
.tile span { color: var(--faint); font-size: var(--t-small); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(460px, 100%), 1fr));
  gap: var(--s5); }
.wide { grid-column: 1 / -1; }
footer { margin-top: var(--s7); color: var(--faint); font-size: var(--t-small); }
@media (max-width: 640px) {
  body { padding: var(--s5) var(--s4) var(--s6); }
  .tiles { grid-template-columns: repeat(2, minmax(0, 1fr)); }
  tr:has(td.words) { display: block; padding: var(--s2) 0; border-bottom: 1px solid var(--line); }
  tr:has(td.words) td { display: block; padding: 1px 0; border: 0; min-width: 0; text-align: left;
    white-space: normal; }
  tr:has(td.words) td:first-child { font-weight: 600; }
}
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
