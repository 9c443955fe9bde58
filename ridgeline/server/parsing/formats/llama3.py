"""Llama 3.1 to 3.3: bare `{"name": …, "parameters": {…}}`, and built-in calls behind `<|python_tag|>`.

A built-in call is `<|python_tag|>name.call(key="value", …)`; its arguments become a JSON object.
"""

from __future__ import annotations

from ridgeline.server.parsing.cursor import Reading
from ridgeline.server.parsing.formats.generic_json import BareJsonParser
from ridgeline.server.parsing.formats.json_calls import CallReader
from ridgeline.server.parsing.formats.python_calls import NAME, keyword_arguments

PYTHON_TAG = "<|python_tag|>"


class Llama3Parser(BareJsonParser):
    """Several calls stand on separate lines or are separated by `;`."""

    tag = PYTHON_TAG

    def tagged(self, reader: CallReader) -> Reading[None]:
        yield from self.cursor.space()
        name = yield from self.cursor.word(NAME)
        if not name:
            yield from super().tagged(reader)
        elif name in self.answer.names and (yield from self.cursor.literal(".call(")):
            self.start_call(name)
            yield from keyword_arguments(self.cursor, self.answer)
        else:
            self.not_a_call()
