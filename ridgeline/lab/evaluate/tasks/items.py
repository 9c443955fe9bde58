"""Items: one question each, in the form that is sent. Immutable, and the same for every subject.

An item's digest identifies its content: a stored outcome counts only for the item that it was made for.
"""

from __future__ import annotations

import hashlib

import msgspec

# What an answer must equal. `number` and `strict_number` are GSM8K's flexible and strict extraction.
MATCHES = ("exact", "contains", "number", "strict_number")


class Choices(msgspec.Struct, frozen=True, tag="choices"):
    """The most likely of several continuations of one prompt."""

    id: str
    prompt: str
    choices: tuple[str, ...]
    gold: int
    delimiter: str = " "  # between prompt and choice; belongs to the continuation


class Contexts(msgspec.Struct, frozen=True, tag="contexts"):
    """The context, of several, under which one continuation is the most likely (WinoGrande)."""

    id: str
    contexts: tuple[str, ...]
    continuation: str
    gold: int


class LastWord(msgspec.Struct, frozen=True, tag="last_word"):
    """A continuation that must be greedy token by token (LAMBADA)."""

    id: str
    context: str
    word: str


class Passage(msgspec.Struct, frozen=True, tag="passage"):
    """A text of which every token is scored."""

    id: str
    text: str


class Question(msgspec.Struct, frozen=True, tag="question"):
    """A prompt whose generated answer is compared with the expected one."""

    id: str
    prompt: str
    answer: str
    match: str = "exact"
    stops: tuple[str, ...] = ()
    max_tokens: int = 256


class Program(msgspec.Struct, frozen=True, tag="program"):
    """The beginning of a program; the generated rest must pass `test`, which defines check(candidate)."""

    id: str
    prompt: str
    entry_point: str
    test: str
    stops: tuple[str, ...] = ()
    max_tokens: int = 1024


Item = Choices | Contexts | LastWord | Passage | Question | Program
NEEDS_LOGPROBS = (Choices, Contexts, LastWord, Passage)


def digest_of(item: Item) -> str:
    return hashlib.blake2b(msgspec.json.encode(item), digest_size=8).hexdigest()
