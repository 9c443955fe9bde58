"""Custom kinds of the config: `name=regex`. A pattern that could be slow is refused when the gateway starts.

Python's `re` cannot be interrupted, so the pattern is bounded: its syntax tree gives the number of ways to
match at one position, and a line is never longer than a zone.
"""

from __future__ import annotations

import re
import re._constants as sre
import re._parser as sre_parser
from collections.abc import Iterable
from typing import Any

from ridgeline.gateway.guard.zones import LONGEST
from ridgeline.options import OptionError

MOST_WAYS = 20_000
_NAME = re.compile(r"[a-z][a-z0-9_]{1,24}")


def compiled(patterns: Iterable[str], known: Iterable[str] = ()) -> dict[str, re.Pattern[str]]:
    """Compiled patterns by kind. OptionError names the wrong pattern and the reason."""
    kinds: dict[str, re.Pattern[str]] = {}
    for text in patterns:
        name, sign, regex = text.partition("=")
        name = name.strip()
        where = f"guards: patterns: {name!r}: "
        if not sign or not regex or not _NAME.fullmatch(name):
            raise OptionError(f"guards: patterns: {text!r}: write name=regex, with a name of a-z, 0-9 and _")
        if name in kinds or name in known:
            raise OptionError(where + "a kind of this name exists already")
        try:
            pattern = re.compile(regex)
            ways = _ways(sre_parser.parse(regex))
        except (re.error, RecursionError, OverflowError) as error:
            raise OptionError(where + f"not a regular expression: {error}") from None
        if pattern.fullmatch(""):
            raise OptionError(where + "matches the empty text, and so at every position")
        if ways > MOST_WAYS:
            raise OptionError(
                where + f"may try {min(ways, 10**12):,} ways at one position; the limit is {MOST_WAYS:,}: "
                "bound its repeats, such as {1,32}, and do not nest them"
            )
        kinds[name] = pattern
    return kinds


def _ways(tree: Any) -> int:
    """The most ways that the pattern can try before it fails at one position."""
    total = 1
    for operator, argument in tree:
        total = min(total * _ways_of(operator, argument), 10**15)
    return total


def _ways_of(operator: Any, argument: Any) -> int:
    if operator in (sre.MAX_REPEAT, sre.MIN_REPEAT):
        least, most, body = argument
        most = min(int(most), LONGEST)
        inner = _ways(body)
        if inner > 1:
            return min(inner ** min(most, 60), 10**15) if most > 1 else inner + 1
        return most - int(least) + 1
    if operator is sre.POSSESSIVE_REPEAT:
        return _ways(argument[2])
    if operator is sre.BRANCH:
        return sum(_ways(branch) for branch in argument[1])
    if operator is sre.SUBPATTERN:
        return _ways(argument[-1])
    if operator is sre.ATOMIC_GROUP:
        return _ways(argument)
    if operator in (sre.ASSERT, sre.ASSERT_NOT):
        return _ways(argument[1])
    if operator is sre.GROUPREF_EXISTS:
        return _ways(argument[1]) + (_ways(argument[2]) if argument[2] else 1)
    return 1
