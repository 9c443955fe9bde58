"""A grammar made of arithmetic: what may come next hangs on every token before, so a mask that is found one
token early or late is another mask. For engines on devices made of arithmetic."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace

from ridgeline.engine.grammar import Grammar
from ridgeline.engine.grammar.masks import Mask, clear_bits
from ridgeline.engine.schedule.request import Request
from tests.engine.simulated_engine import EOS, VOCAB


@dataclass
class Winding:
    """Both the compiled grammar and, with tokens, a sequence's place in it. It allows three tokens or fewer
    anywhere, EOS among them at times but never alone, and is over after `length` tokens."""

    length: int = 1 << 30
    tokens: list[int] = field(default_factory=list)

    def matcher(self) -> Winding:
        return replace(self, tokens=[])

    @property
    def allowed(self) -> set[int]:
        digest = zlib.crc32(bytes([1, *self.tokens]))
        return {1 + digest % (VOCAB - 1), (digest >> 8) % VOCAB, (digest >> 16) % VOCAB}

    def fill(self, mask: Mask, barred: frozenset[int], ignores_eos: bool) -> str | None:
        mask[:] = 0
        mask[0] = sum(1 << token for token in self.allowed)
        clear_bits(mask, {*barred, EOS} if ignores_eos else barred)
        return None

    def fork(self) -> Winding:
        return replace(self, tokens=self.tokens[:])

    def permits(self, token: int) -> bool:
        return token in self.allowed

    def advance(self, token: int) -> bool:
        if token not in self.allowed:
            raise ValueError(f"the grammar does not allow token {token}")
        self.tokens.append(token)
        return token == EOS or len(self.tokens) == self.length


def constrained(req: Request, length: int = 1 << 30) -> Request:
    """The request under such a grammar."""
    params = replace(req.params, grammar=Grammar("regex", f"winding {length}"))
    return replace(req, params=params, compiled=Winding(length))
