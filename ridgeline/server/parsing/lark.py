"""Grammar source in llguidance's Lark dialect, built from texts, tokens, schemas and free text.

A marker that is one token of the vocabulary is written as that token, since the library never matches a
special token by its text; everything else is written as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

ANY_TEXT = "/(?s:.*)/"

# At most one space, after a separator: with unlimited white space a model may never stop.
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


class Lark:
    """The rules of one grammar, by name. `tokens` are the ids of markers by text."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self.tokens = tokens
        self._rules: dict[str, str] = {}
        self._marker = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)")

    def rule(self, name: str, body: str, attributes: str = "") -> str:
        """Add a rule and return its name. An uppercase name makes a terminal."""
        self._rules[name] = f"{name}{attributes}: {body}"
        return name

    def source(self) -> str:
        """All rules, with `start` first."""
        rules = {"start": "", **self._rules}
        return "\n".join(rules.values()) + "\n"

    def text(self, text: str) -> str:
        """Exactly this text, with its markers as tokens. Empty text is an empty string."""
        items: list[str] = []
        at = 0
        for marker in self._marker.finditer(text):
            if marker.start() > at:
                items.append(quoted(text[at : marker.start()]))
            items.append(f"<[{self.tokens[marker.group()]}]>")
            at = marker.end()
        if at < len(text):
            items.append(quoted(text[at:]))
        return " ".join(items)

    def text_until(self, marker: str, name: str, is_special: bool) -> str:
        """Any text up to and including a marker."""
        if marker in self.tokens:
            terminal = self.any_text(name.upper(), () if is_special else (marker,))
            return f"{terminal} {self.text(marker)}"
        token = self._marker.search(marker)
        if token is None:
            return self.rule(name, f"/(?s:.*){pattern(marker)}/", "[lazy]")
        before = self.rule(name.upper(), f"/(?s:.*){pattern(marker[: token.start()])}/")
        return f"{before} {self.text(marker[token.start() :])}"

    def any_text(self, name: str, without: tuple[str, ...] = (), body: str = "") -> str:
        """A terminal for any text that excludes some texts and does not match the expression `body`."""
        excluded = [f" & ~/(?s:.*){pattern(text)}(?s:.*)/" for text in without]
        if body:
            excluded.append(f" & ~/{body}/")
        return self.rule(name, ANY_TEXT + "".join(excluded))

    def json(self, schema: Mapping[str, Any], lenient: bool) -> str:
        """JSON of a schema. Lenient: keywords unknown to the library are ignored."""
        options = {**_LAYOUT, "lenient": True} if lenient else _LAYOUT
        return "%json " + _unlike_gbnf(json.dumps({**schema, "x-guidance": options}))


def quoted(text: str) -> str:
    return _unlike_gbnf(json.dumps(text, ensure_ascii=False))


def _unlike_gbnf(text: str) -> str:
    """JSON text without the prefix by which the engine detects another notation."""
    return text.replace("::=", ":\\u003a=")


def pattern(text: str) -> str:
    """Text escaped for an expression between slashes."""
    return re.sub(r"[^A-Za-z0-9_\u0080-\U0010ffff]", lambda found: f"\\x{ord(found[0]):02x}", text)


def either(options: list[str]) -> str:
    return options[0] if len(options) == 1 else "( " + " | ".join(options) + " )"
