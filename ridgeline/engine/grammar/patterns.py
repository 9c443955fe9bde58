"""Regular expressions of schemas, rewritten so that all validators agree with the grammar library.

ECMAScript, Python and the library disagree on white space, and a date is more than its characters. Used by
`keywords`; expressions are validated by the library, not here.
"""

from __future__ import annotations

import re

_SPACE = r"\t\n\x0b\x0c\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"  # in every dialect
_MAYBE_SPACE = _SPACE + r"\ufeff\x1c-\x1f\x85"  # in some dialect
_PART = re.compile(r"\\.|[\[\].]", re.DOTALL)  # parts that may need rewriting
_OUTSIDE = {  # outside of []
    r"\s": f"[{_SPACE}]",
    r"\S": f"[^{_MAYBE_SPACE}]",
    r"\W": r"[^\p{L}\p{M}\p{N}_]",
    r"\D": r"[^\p{Nd}]",
    ".": r"[^\n\r\u2028\u2029]",
}


# Between two tokens of JSON. Bounded: a model that prefers blanks would never end.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"


def strict_pattern(pattern: str) -> str:
    r"""Restrict \s to characters that are space in every dialect, \S to those in none; within [] only \s."""
    inside = False

    def written(found: re.Match[str]) -> str:
        nonlocal inside
        text = found.group()
        if text in "[]":
            inside = text == "["
        elif inside:
            return _SPACE if text == r"\s" else text
        return _OUTSIDE.get(text, text)

    return _PART.sub(written, pattern)


# Four digits, not beginning with 0: there was no year 0, and calendars start in different years.
_LEAP_YEAR = "([1-9][0-9](0[48]|[2468][048]|[13579][26])|([2468][048]|[13579][26])00)"
_DATE = (
    "([1-9][0-9]{3}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    f"|02-(0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
DATE = f"^{_DATE}$"
TIME = f"^{_TIME}$"
DATE_TIME = f"^{_DATE}T{_TIME}$"
