"""A vocabulary of single bytes and the markers of one format, to walk grammars with the library itself."""

from __future__ import annotations

import random
from collections.abc import Sequence

import llguidance

END = 256
ENDINGS = ("\n</parameter>\n", "</｜DSML｜parameter>\n", '<|"|>', '"')


class Vocabulary:
    """Every byte is a token, so is the end, so are the markers: special ones, or plain ones."""

    bos_token_id = None
    eos_token_id = END

    def __init__(self, special: Sequence[str] = (), plain: Sequence[str] = ()) -> None:
        self.tokens = [bytes([byte]) for byte in range(256)] + [b"<end>"]
        self.ids: dict[str, int] = {}
        for text in (*special, *plain):
            self.ids[text] = len(self.tokens)
            self.tokens.append(text.encode())
        self.special_token_ids = [END, *(self.ids[text] for text in special)]
        self.library = llguidance.LLTokenizer(llguidance.TokenizerWrapper(self), slices=[])

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())

    def matcher(self, source: str) -> llguidance.LLMatcher:
        matcher = llguidance.LLMatcher(self.library, llguidance.LLMatcher.grammar_from_lark(source))
        assert not matcher.is_error(), f"{matcher.get_error()}\n{source}"
        return matcher

    def allowed(self, matcher: llguidance.LLMatcher) -> list[int]:
        return [token for token, bias in enumerate(matcher.compute_logit_bias()) if bias]

    def tokens_of(self, text: str) -> list[int]:
        """The text with its markers as tokens."""
        data, tokens, at = text.encode(), [], 0
        markers = sorted(((text.encode(), id) for text, id in self.ids.items()), key=lambda m: -len(m[0]))
        while at < len(data):
            found = next((m for m in markers if data.startswith(m[0], at)), None)
            tokens.append(data[at] if found is None else found[1])
            at += 1 if found is None else len(found[0])
        return tokens

    def accepts(self, source: str, text: str) -> bool:
        """Whether the grammar lets the whole text through and an answer may end there."""
        matcher = self.matcher(source)
        return (
            all(matcher.try_consume_tokens([token]) for token in self.tokens_of(text))
            and matcher.is_accepting()
        )

    def walk(self, source: str, random_source: random.Random, limit: int = 400) -> str | None:
        """A random text that the grammar lets through; None if it has not come to an end within the limit.

        Letters and brackets are preferred to other bytes, and ends of values are now and then written whole:
        a text is to end, and to be readable.
        """
        matcher = self.matcher(source)
        written: list[int] = []
        while len(written) < limit:
            allowed = self.allowed(matcher)
            assert allowed, f"nothing may follow {self.text(written)!r}\n{source}"
            if END in allowed and (len(allowed) == 1 or random_source.random() < 0.3):
                return self.text(written)
            ending = self.tokens_of(random_source.choice(ENDINGS))
            if random_source.random() < 0.2 and matcher.validate_tokens(ending) == len(ending):
                assert matcher.consume_tokens(ending)
                written += ending
                continue
            groups = (
                [token for token in allowed if token < 128 and chr(token) in '"}]<\n'],
                [token for token in allowed if token < 128 and chr(token).isalnum()],
                [token for token in allowed if token > END],
            )
            other = [token for token in allowed if token != END and not any(token in g for g in groups)]
            choices = [group for group in groups if group]
            if other and (not choices or random_source.random() < 0.3):
                choices = [other]
            token = random_source.choice(random_source.choice(choices))
            assert matcher.consume_token(token), matcher.get_error()
            written.append(token)
            if matcher.is_stopped():
                return self.text(written)
        return None

    def text(self, tokens: Sequence[int]) -> str:
        return b"".join(self.tokens[token] for token in tokens).decode("utf-8", "replace")
