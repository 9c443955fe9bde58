"""Regular expressions of schemas, written so that every reading of them agrees with the grammar library's.

What counts as white space differs between ECMAScript, Python and the library; dates are more than their
letters. Used by `keywords`; it checks no expression, the library does.
"""

from __future__ import annotations

import re

_SPACE = r"\t\n\x0b\x0c\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"  # to everybody
_MAYBE_SPACE = _SPACE + r"\ufeff\x1c-\x1f\x85"  # to somebody
_PART = re.compile(r"\\.|[\[\].]", re.DOTALL)  # what may have to be written otherwise
_OUTSIDE = {  # of []
    r"\s": f"[{_SPACE}]",
    r"\S": f"[^{_MAYBE_SPACE}]",
    r"\W": r"[^\p{L}\p{M}\p{N}_]",
    r"\D": r"[^\p{Nd}]",
    ".": r"[^\n\r\u2028\u2029]",
}


# Between two tokens of JSON. Bounded: a model that likes blanks would never come to an end.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"


def strict_pattern(pattern: str) -> str:
    r"""\s as what everybody takes for space, \S as what nobody does, and so on; within [] \s alone."""
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


# Of four digits and not beginning with 0: there was no year 0, and some calendars begin later than others.
_LEAP_YEAR = "([1-9][0-9](0[48]|[2468][048]|[13579][26])|([2468][048]|[13579][26])00)"
_DATE = (
    "([1-9][0-9]{3}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    f"|02-(0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
DATE = f"^{_DATE}$"
TIME = f"^{_TIME}$"
DATE_TIME = f"^{_DATE}T{_TIME}$"
