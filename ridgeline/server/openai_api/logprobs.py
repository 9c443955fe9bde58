"""Log-probabilities in the clients' shapes: chat, the older completions shape, the prompt's.

All three come from the engine's TokenLogprob. Token texts and offsets come from the token's bytes, so that
partial characters are shown as such.
"""

from __future__ import annotations

from dataclasses import replace

from ridgeline.engine.schedule.step import TokenLogprob
from ridgeline.models.text.tokenizer import Tokenizer
from ridgeline.server.answering.prompts import Prompt
from ridgeline.server.openai_api.response_bodies import (
    ChatLogprob,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)

LEAST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI writes this for a probability of zero


class TokenNames:
    """Text representations of one model's tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.bytes_of = tokenizer.token_bytes
        self._special_ids = tokenizer.special_ids

    def name(self, token: int) -> str:
        """The token's text; a token that is not a whole character is written as its bytes, \\xf0\\x9f."""
        raw = self.bytes_of(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "".join(f"\\x{byte:02x}" for byte in raw)

    def is_shown(self, token: int) -> bool:
        """Special tokens are not part of the text."""
        return token not in self._special_ids


def chat_logprobs(names: TokenNames, tokens: list[TokenLogprob]) -> list[ChatLogprob]:
    return [
        ChatLogprob(
            names.name(token.token),
            _finite(token.logprob),
            list(names.bytes_of(token.token)),
            [TopLogprob(names.name(id), _finite(value), list(names.bytes_of(id))) for id, value in token.top],
        )
        for token in tokens
    ]


def prompt_logprobs(
    names: TokenNames, prompt: Prompt, tokens: list[TokenLogprob], alternatives: int
) -> PromptLogprobs:
    """One entry per prompt token: the first has no probability, the others have candidates by token id."""
    entries: PromptLogprobs = [None] if prompt.ids else []
    for token in tokens:
        ranked = [(id, value, place) for place, (id, value) in enumerate(token.top[:alternatives], start=1)]
        chosen = (token.token, token.logprob, token.rank)
        entries.append(
            {
                str(id): PromptLogprob(_finite(value), rank, names.name(id))
                for id, value, rank in [chosen, *ranked]
            }
        )
    return entries


class TextOffsets:
    """The start of each token in the text, in characters, for one choice from its beginning."""

    def __init__(self, names: TokenNames, start: int) -> None:
        self._names = names
        self._characters = start  # begun so far

    def next(self, token: int) -> int:
        if not self._names.is_shown(token):
            return self._characters
        raw = self._names.bytes_of(token)
        # A continuation byte belongs to the character that an earlier token began.
        offset = self._characters - 1 if raw and _continues(raw[0]) else self._characters
        self._characters += sum(not _continues(byte) for byte in raw)
        return max(offset, 0)


def completion_logprobs(
    names: TokenNames, tokens: list[TokenLogprob], offsets: TextOffsets
) -> CompletionLogprobs:
    shaped = CompletionLogprobs()
    for token in tokens:
        shaped.tokens.append(names.name(token.token))
        shaped.token_logprobs.append(_finite(token.logprob))
        shaped.top_logprobs.append(_candidates(names, token))
        shaped.text_offset.append(offsets.next(token.token))
    return shaped


def echoed_logprobs(
    names: TokenNames, prompt: Prompt, tokens: list[TokenLogprob], alternatives: int
) -> CompletionLogprobs:
    """The prompt's entries for an echo. The first token has no probability, as nothing precedes it."""
    tokens = [replace(token, top=token.top[:alternatives]) for token in tokens]
    offsets = TextOffsets(names, 0)
    first = prompt.ids[0]
    shaped = CompletionLogprobs([names.name(first)], [None], [None], [offsets.next(first)])
    extend(shaped, completion_logprobs(names, tokens, offsets))
    return shaped


def extend(shaped: CompletionLogprobs, more: CompletionLogprobs) -> None:
    for name in shaped.__struct_fields__:
        getattr(shaped, name).extend(getattr(more, name))


def _candidates(names: TokenNames, token: TokenLogprob) -> dict[str, float]:
    """Text to value, best first. Of two tokens with the same text, the more likely one is kept."""
    candidates: dict[str, float] = {}
    for id, value in [*token.top, (token.token, token.logprob)]:
        candidates.setdefault(names.name(id), _finite(value))
    return candidates


def _continues(byte: int) -> bool:
    return byte & 0xC0 == 0x80


def _finite(value: float) -> float:
    return max(value, LEAST_LOGPROB)
