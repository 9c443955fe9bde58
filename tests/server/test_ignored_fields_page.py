"""docs/clients.md lists every field that is accepted and ignored, from the structs that decode requests.

`python -m tests.server.test_ignored_fields_page` rewrites the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from ridgeline.server.app import ENDPOINTS
from ridgeline.server.http.body_fields import fields_of
from ridgeline.server.responses_api.protocol import ResponseTool
from ridgeline.web.response_tools import NOT_OFFERED
from tests.server.test_http_api_page import _nested

PAGE = Path(__file__).resolve().parents[2] / "docs" / "clients.md"
BEGIN, END = "<!-- ignored: generated from the structs of ridgeline/server -->\n", "<!-- end of ignored -->\n"


def generated() -> str:
    """One row for each field and reason, with every path that takes it."""
    rows: dict[tuple[str, str], list[str]] = {}
    for endpoint in ENDPOINTS:
        for field, reason in _ignored(endpoint.request) if endpoint.request else ():
            paths = rows.setdefault((field, reason), [])
            if endpoint.path not in paths:
                paths.append(endpoint.path)
    lines = [
        f"| `{field}` | {', '.join(f'`{path}`' for path in paths)} | {reason} |"
        for (field, reason), paths in rows.items()
    ]
    return "\n".join(["| field | where | why |", "|---|---|---|", *lines, ""])


def _ignored(body: type[msgspec.Struct]) -> Iterator[tuple[str, str]]:
    for prefix, struct in [("", body), *((f"{path}.", nested) for path, nested in _nested(body))]:
        for name, about in fields_of(struct).items():
            if about.status == "ignored":
                yield f"{prefix}{name}", about.doc


def write(page: Path = PAGE) -> None:
    before, _, rest = page.read_text("utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(before + BEGIN + generated() + END + after, "utf-8")


def test_the_table_of_ignored_fields_is_current() -> None:
    text = PAGE.read_text("utf-8")
    assert text[text.index(BEGIN) + len(BEGIN) : text.index(END)] == generated()


def test_the_page_names_every_tool_that_is_not_offered() -> None:
    text = PAGE.read_text("utf-8")
    assert [kind for kind in NOT_OFFERED if f"`{kind}`" not in text] == []
    kinds = {tool.__struct_config__.tag for tool in ResponseTool.__args__}
    assert kinds == {"function", "namespace", "file_search", *NOT_OFFERED}


if __name__ == "__main__":
    write()
