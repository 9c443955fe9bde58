"""Token ids for planned requests, for the scheduler's prefix index.

Only what is equal in the plan is equal here: shared blocks by their ids, and a conversation's history with
its answers; all other tokens are unique to the request. Token values have no other meaning.
"""

from __future__ import annotations

from ridgeline.lab.traffic.request import PlannedRequest, Traffic

OWN, ANSWER, SHARED = 1 << 28, 2 << 28, 3 << 28  # disjoint ranges of ids, all below 2³¹


class TokenPrompts:
    def __init__(self, traffic: Traffic) -> None:
        self._requests = traffic.requests
        self._block_tokens = traffic.prefix_block_tokens
        self._shared: dict[int, int] = {}  # prefix id → token id
        self._history: dict[int, list[int]] = {}  # conversation → its last prompt and the answer to it

    def prompt(self, index: int) -> list[int]:
        planned = self._requests[index]
        if planned.conversation is None:
            return self._opening(index, planned)
        history = self._history.get(planned.conversation, []) if planned.turn else []
        new = planned.input_tokens - len(history)
        tokens = history + [OWN + index] * max(new, 1) if history else self._opening(index, planned)
        self._history[planned.conversation] = tokens + [self.answer_token(index)] * planned.output_tokens
        return tokens

    def answer_token(self, index: int) -> int:
        return ANSWER + index

    def _opening(self, index: int, planned: PlannedRequest) -> list[int]:
        tokens: list[int] = []
        if self._block_tokens:
            for block in planned.prefix:
                token = SHARED + self._shared.setdefault(block, len(self._shared))
                tokens += [token] * min(self._block_tokens, planned.input_tokens - len(tokens))
        return tokens + [OWN + index] * (max(planned.input_tokens, 1) - len(tokens))
