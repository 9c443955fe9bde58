"""Vocabulary: words that are one token each for a model, so that a text of n words has n tokens.

Found in the model's tokenizer if it is available, else with the server's /tokenize, else from the server's
counts (`usage.prompt_tokens`); without any of these, common words count as one token each. The run records
the method.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ridgeline.lab.errors import LabError
from ridgeline.lab.traffic.common_words import COMMON_WORDS
from ridgeline.models.text.tokenizer import Tokenizer

CountedBy = Literal["tokenizer", "/tokenize", "usage", "assumption"]
# A path and a body in, the answer's JSON out; None if the server has no such path or refuses.
Post = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any] | None]]

MOST_WORDS = 8192  # more do not make prompts more diverse
LEAST_WORDS = 16
MOST_ASKED = 128  # words sent to a server one by one
_WORD = re.compile(r" ?[a-z]{3,12}")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Words of one token, both first in a text and after a space.

    ids:              the token of each word after a space; () where they are not known
    text_overhead:    tokens that the server adds to a plain text: BOS where the model has one
    chat_overhead:    tokens of the template around the first message; None: messages cannot be sent
    turn_overhead:    tokens that it adds with each later message, and around the answer before it
    """

    words: tuple[str, ...]
    ids: tuple[int, ...]
    counted_by: CountedBy
    text_overhead: int = 0
    chat_overhead: int | None = None
    turn_overhead: int = 0

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> Vocabulary:
        """Every word of the tokenizer that certainly stays one token."""
        found = _single_words(tokenizer)
        if len(found) < LEAST_WORDS:
            raise LabError(f"the model's tokenizer has only {len(found)} words of one token: send token ids")
        words, ids = [word for word, _ in found], [id for _, id in found]
        sample = words[:: max(len(words) // 64, 1)]
        overhead = len(tokenizer.encode(" ".join(sample))) - len(sample)
        chat_overhead, turn_overhead = None, 0
        if tokenizer.chat_template is not None:
            one, three = (len(tokenizer.encode_chat(_chat(" ".join(sample), turns))) for turns in (1, 2))
            chat_overhead = one - len(sample)
            turn_overhead = three - one - 2 * len(sample)
        return cls(tuple(words), tuple(ids), "tokenizer", overhead, chat_overhead, turn_overhead)

    @classmethod
    async def from_server(cls, post: Post, model: str) -> Vocabulary:
        """From a server whose tokenizer is not available. Sends a handful of small requests."""
        found = await _by_tokenize(post, model)
        return found if found is not None else await _by_usage(post, model)


def _single_words(tokenizer: Tokenizer) -> list[tuple[str, int]]:
    """Words, with the id of each after a space. Spread over the vocabulary, which is sorted by frequency."""
    spelled = {}
    for id in range(tokenizer.vocab_size):
        text = tokenizer.whole_text(id)
        if text is not None and _WORD.fullmatch(text) and id not in tokenizer.special_ids:
            spelled[text] = id
    # Both with and without a space: the first word of a prompt must be one token too. Tokenizers that put
    # a space before every text have only the first form.
    puts_space = len(tokenizer.encode("the", add_special=False)) == 1 and "the" not in spelled
    both = [
        (text[1:], id)
        for text, id in spelled.items()
        if text.startswith(" ") and (puts_space or text[1:] in spelled)
    ]
    chosen = both[:: -(-len(both) // MOST_WORDS)] if len(both) > MOST_WORDS else both
    return [
        (word, id) for word, id in chosen if tokenizer.encode(f"the {word}", add_special=False)[1:] == [id]
    ]


async def _by_tokenize(post: Post, model: str) -> Vocabulary | None:
    """With /tokenize of ridgeline, vLLM and llama-server: {"tokens": [ids]}."""

    async def encode(text: str) -> list[int] | None:
        for body in (
            {"model": model, "prompt": text, "add_special_tokens": False},
            {"content": text, "add_special": False},  # llama-server's
        ):
            tokens = (await post("/tokenize", body) or {}).get("tokens")
            if isinstance(tokens, list) and tokens and all(type(token) is int for token in tokens):
                return tokens
        return None

    whole = await encode("the " + " ".join(COMMON_WORDS))
    if whole is None:
        return None
    words, ids = list(COMMON_WORDS), whole[1:]
    # At the start of a line they have no space, like the first word of a prompt.
    lines = await encode("\n".join(COMMON_WORDS))
    if len(ids) != len(words) or lines is None or len(lines) != 2 * len(words) - 1:
        words, ids = [], []
        for word in COMMON_WORDS[:MOST_ASKED]:  # some are several tokens: keep the others
            alone, pair = await encode(word), await encode(f"the {word}")
            if alone is not None and pair is not None and (len(alone), len(pair)) == (1, 2):
                words.append(word)
                ids.append(pair[1])
    if len(words) < LEAST_WORDS:
        return None
    overheads = await _overheads(post, model, words)
    if overheads is None:
        return None
    return Vocabulary(tuple(words), tuple(ids), "/tokenize", *overheads)


async def _by_usage(post: Post, model: str) -> Vocabulary:
    """From the counted prompt tokens of two requests of different length, if reported."""
    words = list(COMMON_WORDS)
    while len(words) >= LEAST_WORDS:
        overheads = await _overheads(post, model, words)
        if overheads is not None:
            return Vocabulary(tuple(words), (), "usage", *overheads)
        words = words[: len(words) // 2]  # the shortest and most frequent come first
    return Vocabulary(COMMON_WORDS, (), "assumption", 0, 0)


async def _overheads(post: Post, model: str, words: Sequence[str]) -> tuple[int, int | None, int] | None:
    """Tokens added to a plain text, to a message and to a later one; None: words are not one token each."""

    async def plain_tokens(text: str) -> int | None:
        return await _usage(post, "/v1/completions", {"model": model, "prompt": text, "max_tokens": 1})

    async def chat_tokens(text: str, turns: int = 1) -> int | None:
        body = {"model": model, "messages": _chat(text, turns), "max_tokens": 1}
        return await _usage(post, "/v1/chat/completions", body)

    plain = await _overhead(words, plain_tokens)
    chat = await _overhead(words, chat_tokens)
    if plain is None and chat is None:
        return None
    turn = 0
    if chat is not None:
        three = await chat_tokens(words[0], turns=2)
        turn = 0 if three is None else max(three - 3 - chat, 0)
    return plain or 0, chat, turn


def _chat(text: str, turns: int) -> list[dict[str, str]]:
    """A conversation of identical messages."""
    question = {"role": "user", "content": text}
    return [question] + [{"role": "assistant", "content": text}, question] * (turns - 1)


async def _overhead(words: Sequence[str], count: Callable[[str], Awaitable[int | None]]) -> int | None:
    """Tokens beyond the words; None if the server did not count, or counted more than one per word."""
    half = max(len(words) // 2, 1)
    short, long = await count(" ".join(words[:half])), await count(" ".join(words))
    if short is None or long is None or long - short != len(words) - half or short < half:
        return None
    return short - half


async def _usage(post: Post, path: str, body: dict[str, Any]) -> int | None:
    usage = (await post(path, body) or {}).get("usage")
    tokens = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    return tokens if type(tokens) is int else None
