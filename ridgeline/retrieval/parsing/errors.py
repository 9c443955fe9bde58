"""Why a file has no text. The names are OpenAI's `last_error.code`."""

from __future__ import annotations

from typing import ClassVar, Literal

FailureCode = Literal["server_error", "unsupported_file", "invalid_file"]


class ParseError(Exception):
    """The message is shown to the owner of the file."""

    code: ClassVar[FailureCode]


class UnsupportedFile(ParseError):
    """A kind of file that is not read here."""

    code = "unsupported_file"


class InvalidFile(ParseError):
    """The file is not what its name says, is damaged, or takes more than its limits."""

    code = "invalid_file"
