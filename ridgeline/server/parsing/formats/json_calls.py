"""Calls written as JSON objects: `{"name": …, "arguments": {…}}`, alone or in a list.

Shared by every format with such calls. Arguments are passed on as the model wrote them. If they are not an
object: a string is taken as quoted arguments and unquoted, null and nothing become `{}`, and anything else is
passed on unchanged for the client to reject.
"""

from __future__ import annotations

import re

from ridgeline.server.parsing import json_text
from ridgeline.server.parsing.cursor import Cursor, Reading
from ridgeline.server.parsing.json_text import NO_STOPS, Ending, Stops
from ridgeline.server.parsing.parser import Parser

ARGUMENT_KEYS = frozenset(("arguments", "parameters"))
PASSED_OVER = frozenset(("type", "id"))

_BETWEEN = re.compile(r"[\s,;]+")
_CLOSERS = re.compile(r"[\s\]}]+")


class CallReader:
    """Reads the call objects of one parser's text.

    `marked`: a marker announced a call, so unknown keys are skipped. Unmarked objects may be any JSON: with
    an unknown key they are content.
    """

    def __init__(self, parser: Parser, marked: bool, stops: Stops = NO_STOPS) -> None:
        self._parser = parser
        self._cursor: Cursor = parser.cursor
        self._marked = marked
        self._stops = stops

    def calls(self) -> Reading[Ending]:
        """Read one object or several, in a list or not, and the brackets left over after them.

        BROKEN: the held text (from `cursor.hold` on) is not a call. DONE: at least one call was read; any
        following text has been emitted as content or is still unread.
        """
        cursor = self._cursor
        yield from cursor.space()
        in_list = (yield from cursor.literal("[")) is not None
        yield from cursor.space()
        if (yield from cursor.literal("{")) is None:
            return Ending.BROKEN
        ending = yield from self._object()
        while ending is Ending.DONE:
            cursor.hold()
            yield from cursor.run(_BETWEEN)
            if (yield from cursor.literal("{")) is None:
                self._parser.not_a_call()
                break
            ending = yield from self._object()
            if ending is Ending.BROKEN:
                self._parser.not_a_call()
                return Ending.DONE
        if ending is Ending.DONE and (in_list or self._marked):
            yield from cursor.run(_CLOSERS)
        return ending

    def _object(self) -> Reading[Ending]:
        """A call object after its opening brace. BROKEN only if none of it has been emitted."""
        cursor, parser = self._cursor, self._parser
        name: str | None = None
        kept: list[str] | None = None
        started = False
        while (yield from self._key_follows()):
            key = yield from self._key()
            if key is None:
                return Ending.DONE if started else Ending.BROKEN
            ending = Ending.DONE
            if key == "name" and name is None:
                name = yield from self._name()
                if name is None:
                    return Ending.BROKEN
                if kept is not None:
                    started = True
                    parser.start_call(name)
                    parser.answer.arguments(_arguments_text(kept))
            elif key in ARGUMENT_KEYS and kept is None:
                kept = []
                if name is None:
                    ending = yield from json_text.value(cursor, kept.append, self._stops)
                    if ending is not Ending.DONE:
                        return Ending.BROKEN
                else:
                    if (yield from cursor.peek()) == "":
                        return Ending.BROKEN
                    started = True
                    parser.start_call(name)
                    ending = yield from self._arguments()
            elif self._marked or key in PASSED_OVER:
                ending = yield from json_text.value(cursor, _ignore, self._stops)
            else:
                return Ending.BROKEN
            if ending is not Ending.DONE:
                return ending if started else Ending.BROKEN
            yield from cursor.space()
            if (yield from cursor.peek()) != ",":
                break
            cursor.advance(1)
        if (yield from cursor.literal("}")) is None:
            return Ending.DONE if started else Ending.BROKEN
        if started:
            return Ending.DONE
        if name is None:
            return Ending.BROKEN
        parser.start_call(name)
        parser.answer.arguments("{}")
        return Ending.DONE

    def _key_follows(self) -> Reading[bool]:
        yield from self._cursor.space()
        return (yield from self._cursor.literal('"')) is not None

    def _key(self) -> Reading[str | None]:
        """A key and its colon."""
        key = yield from json_text.text(self._cursor)
        yield from self._cursor.space()
        if (yield from self._cursor.literal(":")) is None:
            return None
        yield from self._cursor.space()
        return key

    def _name(self) -> Reading[str | None]:
        """The name of one of the request's tools; None for anything else."""
        if (yield from self._cursor.literal('"')) is None:
            return None
        name = yield from json_text.text(self._cursor)
        return name if name in self._parser.answer.names else None

    def _arguments(self) -> Reading[Ending]:
        """Pass the arguments on: an object or list as it streams, anything else when it is complete."""
        arguments = self._parser.answer.arguments
        if (yield from self._cursor.peek()) in ("{", "["):
            return (yield from json_text.value(self._cursor, arguments, self._stops))
        pieces: list[str] = []
        ending = yield from json_text.value(self._cursor, pieces.append, self._stops)
        if ending is Ending.CUT and pieces and pieces[0] == '"':
            arguments(json_text.said_so_far(pieces[1:]))
        elif ending is not Ending.BROKEN:
            arguments(_arguments_text(pieces))
        return ending


def _arguments_text(written: list[str]) -> str:
    """A whole value as the arguments text it stands for."""
    if written[:1] == ['"']:
        said = json_text.said(written[1:])
        return "".join(written) if said is None else said.strip() or "{}"
    text = "".join(written)
    return "{}" if text in ("null", "") else text


def _ignore(_: str) -> None:
    pass
