"""Reads prompts from files: JSONL of requests, or text templates with variables.

Used by `ridgeline lint-prompts` and the console. A request becomes the pieces that a model reads, in the
order of chat templates: tools, system, messages.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ridgeline.options import OptionError

TEMPLATE_ENDINGS = frozenset({".txt", ".md", ".jinja", ".jinja2", ".j2", ".tmpl", ".prompt"})
REQUEST_ENDINGS = frozenset({".jsonl", ".ndjson"})
MAX_FILE_BYTES = 1 << 30

# {{ name }}, {% … %}, ${name}, %(name)s, {name}, <NAME>
_PLACE = re.compile(
    r"\{\{.*?\}\}|\{%.*?%\}|\$\{[^}\n]+\}|%\(\w+\)s|\{[A-Za-z_][\w.]*\}|<[A-Z][A-Z_]{2,}>", flags=re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Piece:
    where: str  # tools, system, messages[1] user, prompt
    text: str
    canonical: str  # the same in a canonical order


@dataclass(frozen=True, slots=True)
class Prompt:
    source: str  # file:line
    pieces: tuple[Piece, ...]
    body: dict[str, Any]

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def ideal(self) -> str:
        """With tools and keys in a fixed order."""
        tools = iter(sorted(piece.canonical for piece in self.pieces if piece.where == "tools"))
        return "".join(next(tools) if piece.where == "tools" else piece.canonical for piece in self.pieces)

    def with_system_first(self) -> Prompt:
        """For templates that put the system prompt before the tools."""
        order = sorted(
            self.pieces, key=lambda piece: {"system": 0, "developer": 0, "tools": 1}.get(piece.where, 2)
        )
        return replace(self, pieces=tuple(order))

    def where(self, position: int) -> str:
        for piece in self.pieces:
            if position < len(piece.text):
                return piece.where
            position -= len(piece.text)
        return self.pieces[-1].where if self.pieces else ""


@dataclass(frozen=True, slots=True)
class Template:
    source: str
    text: str
    places: tuple[tuple[int, str], ...]  # offsets and names of variables


def files_in(paths: Iterable[Path]) -> list[Path]:
    """The given files, and the prompt files of given folders. OptionError if there are none."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(each for each in path.rglob("*") if each.is_file())
            found += [each for each in inside if each.suffix.lower() in TEMPLATE_ENDINGS | REQUEST_ENDINGS]
        else:
            found.append(path)
    if not found:
        raise OptionError(
            f"no prompts in {', '.join(map(str, paths))}: give .jsonl, .txt, .md, .jinja or .prompt files"
        )
    for path in found:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise OptionError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB; split it")
    return found


def is_requests(path: Path) -> bool:
    return path.suffix.lower() in REQUEST_ENDINGS


def read_template(path: Path) -> Template:
    text = _text(path)
    places = tuple((found.start(), found.group()) for found in _PLACE.finditer(text))
    return Template(str(path), text, places)


def read_requests(path: Path) -> Iterator[Prompt]:
    for number, line in enumerate(_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        source = f"{path}:{number}"
        try:
            body = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise OptionError(f"{source}: not JSON: {error}") from None
        if isinstance(body, dict) and isinstance(body.get("body"), dict):  # a line of a batch file
            body = body["body"]
        yield prompt_of(body, source)


def prompt_of(body: Any, source: str) -> Prompt:
    """The pieces of one request. OptionError if it has none; source: where it came from, for the error."""
    if not isinstance(body, dict):
        raise OptionError(f"{source}: a request must be a JSON object")
    pieces = tuple(_pieces(body))
    if not any(piece.where != "tools" for piece in pieces):
        raise OptionError(f"{source}: has no messages, prompt or input")
    return Prompt(source, pieces, body)


def _pieces(body: dict[str, Any]) -> Iterator[Piece]:
    tools = body.get("tools")
    for tool in tools if isinstance(tools, list) else ():
        yield Piece("tools", _json(tool) + "\n", _json(tool, sort=True) + "\n")
    for name in ("system", "instructions"):
        if body.get(name):
            yield _piece("system", body[name])
    messages = body.get("messages", body.get("input"))
    if isinstance(messages, str):
        yield _piece("input", messages)
    elif isinstance(messages, list):
        for number, message in enumerate(messages):
            if isinstance(message, dict):
                role = str(message.get("role", message.get("type", "")))
                where = role if role in ("system", "developer") else f"messages[{number}] {role}"
                rest = {name: message[name] for name in message if name not in ("role", "content")}
                content = message.get("content")
                yield _piece(where, content if not rest else {"content": content, **rest}, f"{role}: ")
    prompt = body.get("prompt")
    for text in [prompt] if isinstance(prompt, str) else prompt if isinstance(prompt, list) else ():
        yield _piece("prompt", text)


def _piece(where: str, content: Any, head: str = "") -> Piece:
    if isinstance(content, list) and all(isinstance(part, dict) and "text" in part for part in content):
        content = "".join(str(part["text"]) for part in content)
    if not isinstance(content, str):
        return Piece(where, f"{head}{_json(content)}\n", f"{head}{_json(content, sort=True)}\n")
    canonical = content
    if content[:1] in ("{", "["):
        with contextlib.suppress(ValueError, RecursionError):
            canonical = _json(json.loads(content), sort=True)
    return Piece(where, f"{head}{content}\n", f"{head}{canonical}\n")


def _json(value: Any, sort: bool = False) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=sort)


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise OptionError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
