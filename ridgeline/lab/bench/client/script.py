"""PlannedScript: a plan's requests as bytes for one server, and what follows each answer. Used by `load`."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ridgeline.lab.bench.client.client import SentRequest
from ridgeline.lab.bench.client.conversation import Conversations, FollowUp, form_of
from ridgeline.lab.bench.client.target import Target
from ridgeline.lab.bench.config import BenchConfig
from ridgeline.lab.traffic.prompts import PromptMaker
from ridgeline.lab.traffic.request import PlannedRequest, Traffic
from ridgeline.lab.traffic.vocabulary import Vocabulary

WARM_TOKENS = 64  # of a warm-up prompt, if the run's prompt lengths are unknown


@dataclass(frozen=True, slots=True)
class Scripts:
    """warmup: sent before the run, unmeasured. how: the source of the prompts' lengths, for the report."""

    warmup: PlannedScript
    main: PlannedScript
    how: str


async def make_scripts(config: BenchConfig, target: Target) -> Scripts:
    """A cold run draws new words, unless the server separates runs by a cache salt."""
    vocabulary = config.vocabulary or await Vocabulary.from_server(target.post, target.model)
    salt = secrets.token_hex(4) if config.cache == "cold" and not target.cache_salt else ""
    traffic = config.traffic

    def maker(salt: str) -> PromptMaker:
        return PromptMaker(
            vocabulary,
            form=form_of(traffic, config.api, vocabulary),
            seed=config.seed,
            block_tokens=traffic.prefix_block_tokens,
            salt=salt,
        )

    main = PlannedScript(traffic, target, maker(salt), counts_text=config.count_tokens is not None)
    if config.cache == "primed":
        warmup = PlannedScript(traffic, target, maker(salt), is_primer=True)
    else:
        alone = [
            replace(one, prefix=(), conversation=None, turn=0, said=None, input_tokens=tokens)
            for one in traffic.requests
            for tokens in (one.input_tokens or WARM_TOKENS,)
        ]
        chosen = tuple(alone[place % len(alone)] for place in range(config.warmup))
        warmup = PlannedScript(replace(traffic, requests=chosen), target, maker(f"{salt} warm-up"))
    is_given = any(request.said is not None for request in traffic.requests)
    how = f"{form_of(traffic, config.api, vocabulary)}, words of one token by {vocabulary.counted_by}"
    return Scripts(warmup, main, "of the user's own" if is_given else how)


class PlannedScript:
    """is_primer: send every prompt once, with an answer of one token and no follow-up. counts_text: answers
    may have to be counted by their text.
    """

    def __init__(
        self,
        traffic: Traffic,
        target: Target,
        maker: PromptMaker,
        is_primer: bool = False,
        counts_text: bool = False,
    ) -> None:
        self._target, self._is_primer = target, is_primer
        self._conversations = Conversations(traffic, maker)
        self.requests: Sequence[PlannedRequest] = traffic.requests
        has_turns = any(request.turn for request in traffic.requests)
        self.keeps_text = not is_primer and (counts_text or has_turns)

    def openers(self) -> list[int]:
        return self._conversations.openers()

    def body(self, index: int) -> bytes:
        tokens = 1 if self._is_primer else self.requests[index].output_tokens
        return self._target.request(self._conversations.prompt(index).fields, tokens)

    def answered(self, sent: SentRequest) -> FollowUp | None:
        if not self.keeps_text:
            return None
        answer = sent.answer
        answer.settle()
        return self._conversations.answered(sent.index, answer.text, answer.n_in, answer.n_out)

    def failed(self, index: int) -> list[int]:
        return self._conversations.failed(index) if self.keeps_text else []
