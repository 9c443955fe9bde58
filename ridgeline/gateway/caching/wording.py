"""Wording: the words that two questions must share, beside their meaning, to share an answer.

Embeddings hardly see the words that change an answer: "before 1770" and "after 1770", "safe" and "not safe"
are closer than most paraphrases. So numbers, symbols, negations, names and quoted words must be equal; and
questions that differ in a single content word, or only in its position, count as different. In doubt it is a
miss.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

_WORDS = re.compile(r"[^\W_]+(?:['’][^\W_]+)*|[+\-*/<>=%$€£^&|~#@\\]+")
_QUOTED = re.compile(r"\"([^\"]{1,200})\"|“([^”]{1,200})”|`([^`]{1,200})`|(?<!\w)'([^']{1,200})'(?!\w)")
_IDEOGRAPHS = "\u2e80"  # and everything after it: Chinese, Japanese, Korean
_NUMBERS = """
zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million
billion first second third fourth fifth half double twice once both
"""
_NEGATIONS = """
not no never none nothing nobody neither nor without cannot except unless hardly isn't aren't wasn't weren't
don't doesn't didn't won't can't couldn't shouldn't wouldn't haven't hasn't
"""
# Function words, in which paraphrases differ. All others are content words.
_LIGHT = """
a an the i i'm i've me is are was were be been am do does did can could should would will may might must have
has had what what's who who's whom whose when where which how please tell give show explain list name describe
let my our your his her its their this that these those there it he she we they you in on at of and or as by
to so just also any some way mean means meaning
"""
_marked = frozenset(_NUMBERS.split() + _NEGATIONS.split())
_light = frozenset(_LIGHT.split())


@dataclass(frozen=True, slots=True)
class Wording:
    fixed: tuple[str, ...]  # words that must be equal, sorted
    words: tuple[str, ...]  # all words, in order
    weighty: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> Wording:
        found = [(word, word.lower().replace("’", "'")) for word in _WORDS.findall(text)]
        fixed = [next(filter(None, quoted.groups())) for quoted in _QUOTED.finditer(text)]
        fixed += [lower for word, lower in found if _is_fixed(word, lower)]
        words = tuple(lower for _, lower in found)
        return cls(tuple(sorted(fixed)), words, tuple(word for word in words if word not in _light))

    def agrees(self, other: Wording) -> bool:
        """Whether the wording allows both to mean the same."""
        if self.words == other.words:
            return True
        if self.fixed != other.fixed or sorted(self.words) == sorted(other.words):
            return False
        only_here, only_there = _unlike(self.weighty, other.weighty)
        return (only_here, only_there) == (0, 0) or max(only_here, only_there) > 1


def _is_fixed(word: str, lower: str) -> bool:
    if word != lower and lower not in _light and lower not in _marked:
        return True  # a name, or the first word of a sentence: unknown which
    if any(letter >= _IDEOGRAPHS for letter in word):
        return True  # written without spaces: a run of characters is not a word and cannot be compared
    is_symbol = not word[0].isalnum() or (len(word) == 1 and lower not in _light)
    return is_symbol or lower in _marked or any(letter.isdigit() for letter in word)


def _unlike(first: tuple[str, ...], second: tuple[str, ...]) -> tuple[int, int]:
    """How many content words each has alone. Forms of one word (store, stored) count as equal."""
    left, right = Counter(first), Counter(second)
    only_left, only_right = list((left - right).elements()), list((right - left).elements())
    for word in list(only_left):
        same = next((other for other in only_right if _one_word(word, other)), None)
        if same is not None:
            only_left.remove(word)
            only_right.remove(same)
    return len(only_left), len(only_right)


def _one_word(one: str, other: str) -> bool:
    short, long = sorted((one, other), key=len)
    return len(short) >= 4 and len(long) - len(short) <= 3 and long.startswith(short)
