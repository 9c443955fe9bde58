"""docs/gateway.md shows the options as they are; `python -m tests.gateway.test_gateway_page` writes it."""

from __future__ import annotations

import json
import re
from pathlib import Path

from ridgeline.gateway.settings import LISTS, SECTIONS
from ridgeline.options import options_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "gateway.md"
_BLOCK = re.compile(r"(<!-- options: (\w+) -->\n)(.*?)(?=\n#|\Z)", re.DOTALL)


def written() -> str:
    kinds = {kind.__name__: kind for kind in (*SECTIONS.values(), *LISTS.values())}

    def block(found: re.Match[str]) -> str:
        rows = ["| key | default | meaning |", "|---|---|---|"]
        for option in options_of(kinds[found[2]]):
            shown = json.dumps(option.default, default=str)
            default = "" if option.default in (None, (), "") else f"`{shown}`"
            rows.append(f"| `{option.name}` | {default} | {option.doc} |")
        return found[1] + "\n" + "\n".join(rows) + "\n"

    return _BLOCK.sub(block, PAGE.read_text("utf-8"))


def test_the_page_has_every_option_as_it_is() -> None:
    assert PAGE.read_text("utf-8") == written()


if __name__ == "__main__":
    PAGE.write_text(written(), "utf-8")
