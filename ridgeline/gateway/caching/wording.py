"""What two questions must share beside their meaning: numbers, negations, names, quoted words.

Vectors hardly see them: "in 2019" and "in 2020" lie closer together than most paraphrases do. The semantic
cache keeps this digest with each answer and lets no similarity outweigh it. It errs towards a miss.
"""

from __future__ import annotations

import re
from hashlib import sha256

_WORDS = re.compile(r"[^\W_]+(?:['’][^\W_]+)*|[+\-*/<>=%$€£^&|~#@\\]+")
_QUOTED = re.compile(r"\"([^\"]{1,200})\"|“([^”]{1,200})”|`([^`]{1,200})`|(?<!\w)'([^']{1,200})'(?!\w)")
_NUMBERS = """
zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million
billion first second third fourth fifth half double twice once both
"""
_NEGATIONS = """
not no never none nothing nobody neither nor without cannot except unless hardly isn't aren't wasn't weren't
don't doesn't didn't won't can't couldn't shouldn't wouldn't haven't hasn't
"""
# Opposites that vectors put side by side, because they stand in the same sentences.
_OPPOSITES = """
before after above below over under more less fewer most least max min maximum minimum increase decrease
ascending descending enable disable allow deny start stop begin end open close add remove insert delete
up down left right north south east west highest lowest largest smallest longest shortest best worst last
earliest latest oldest newest positive negative even odd encode decode encrypt decrypt upload download
import export buy sell morning evening day night today tomorrow yesterday daily weekly monthly yearly
advantages disadvantages
"""
# What begins sentences with a capital letter and is no name.
_BEGINNINGS = """
a an the i i'm i've is are was were do does did can could should would will what what's who who's whose when
where why which how please tell give show explain list write name describe translate find summarize compare
compute calculate define provide help let my our your his her its their this that these those there it he
she we they you in on at for from to of and or but if as by with about be have has had make create convert
any some all
"""
_marked = frozenset(_NUMBERS.split() + _NEGATIONS.split() + _OPPOSITES.split())
_beginnings = frozenset(_BEGINNINGS.split())


def literals(text: str) -> bytes:
    """A digest of the words in which two questions must agree, in whatever order they stand."""
    kept = ["q:" + next(filter(None, quoted.groups())) for quoted in _QUOTED.finditer(text)]
    kept += [word.lower().replace("’", "'") for word in _WORDS.findall(text) if _must_agree(word)]
    return sha256("\n".join(sorted(kept)).encode("utf-8", "surrogatepass")).digest()


def _must_agree(word: str) -> bool:
    lower = word.lower().replace("’", "'")
    if word != lower:
        return lower not in _beginnings
    return lower in _marked or not word[0].isalnum() or any(letter.isdigit() for letter in word)
