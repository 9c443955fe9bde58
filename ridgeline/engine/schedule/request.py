"""Request: the immutable input. Sequence: the mutable state of each sample.

Pure data, no tensors. The server validates and builds `Request`; the scheduler owns every `Sequence`.
"""

from __future__ import annotations

import enum
import math
import sys
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ridgeline.engine.errors import InvalidRequest
from ridgeline.engine.grammar import Grammar
from ridgeline.engine.schedule.thinking import ThinkingBudget, ThinkingCount
from ridgeline.telemetry.timing import TimingRecord

if TYPE_CHECKING:
    from ridgeline.engine.grammar.library import Matcher

MAX_TOP_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 256  # of the Python API, for divergence between models; the HTTP API allows 20
MAX_SAMPLES = 128
BACKGROUND_PRIORITY = 1000


def is_background(priority: int) -> bool:
    """Whether a request with this priority runs only in the capacity interactive requests leave unused.

    The scheduler, the server's deadline and the metrics all use this function.
    """
    return priority >= BACKGROUND_PRIORITY


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to stop. Temperature 0 is greedy; top_k 0 means off."""

    max_tokens: int | None = None  # None: up to the end of the context
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False  # keep the matched stop string in the text
    show_special: bool = False  # also detokenize special tokens, for parsers that read them
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None  # alternatives per token; 0 = only the chosen token's
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None  # constrains the answer's text
    thinking: ThinkingBudget | None = None  # the closing tag is forced when it is used up

    def __post_init__(self) -> None:
        _check("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "must be at least 1")
        _check("min_tokens", self.min_tokens >= 0, "must not be negative")
        if self.max_tokens is not None:
            _check("min_tokens", self.min_tokens <= self.max_tokens, "must not exceed max_tokens")
        _check_range("temperature", self.temperature, 0.0, 100.0)
        _check("top_k", self.top_k >= 0, "must not be negative (0 turns it off)")
        _check_range("top_p", self.top_p, 0.0, 1.0)
        _check("top_p", self.top_p > 0.0, "must be greater than 0")
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.01, 10.0)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        for token, bias in self.logit_bias.items():
            _check("logit_bias", token >= 0, f"token id {token} is negative")
            _check_range("logit_bias", bias, -100.0, 100.0)
        _check("seed", self.seed is None or -(2**63) <= self.seed < 2**64, "must fit in 64 bits")
        _check("stop", all(self.stop), "must not contain an empty string")
        _check(
            "stop_token_ids", all(i >= 0 for i in self.stop_token_ids), "must not contain a negative token id"
        )
        _check("n", 1 <= self.n <= MAX_SAMPLES, f"must be between 1 and {MAX_SAMPLES}")
        for name, most in (("logprobs", MAX_TOP_LOGPROBS), ("prompt_logprobs", MAX_PROMPT_LOGPROBS)):
            count = getattr(self, name)
            _check(name, count is None or 0 <= count <= most, f"must be between 0 and {most}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def needs_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def wants_best_token_alone(self) -> bool:
        changes_logits = self.logit_bias or self.needs_penalties or self.grammar is not None
        return self.greedy and self.logprobs is None and not changes_logits


def _check(name: str, ok: bool, message: str) -> None:
    if not ok:
        raise InvalidRequest(name, message)


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise InvalidRequest(name, f"must be a number between {low:g} and {high:g}, got {value}")


@dataclass(frozen=True, slots=True)
class Request:
    """One accepted request: token ids in, `params.n` sequences out."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    arrival: float = 0.0  # monotonic seconds when the request arrived
    priority: int = 0  # lower is served first; from BACKGROUND_PRIORITY on, only in unused capacity
    adapter: str = ""  # LoRA adapter; part of the cache salt
    cache_namespace: str = ""  # requests with different namespaces never share cached prefixes
    compiled: Any = None  # the compiled grammar; set within the engine, never sent
    output_ids: list[int] = field(default_factory=list)  # generated elsewhere: the only sample continues them


class SeqState(enum.Enum):
    WAITING = "waiting"  # queued: never run, or preempted and to be recomputed
    RUNNING = "running"  # holds blocks, gets tokens every step
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    STOP = "stop"  # end-of-sequence token, stop id or stop string
    LENGTH = "length"  # max_tokens or the end of the context
    ABORT = "abort"  # the client went away or cancelled
    ERROR = "error"  # this sequence failed; the message says how


@dataclass(slots=True, eq=False)
class Sequence:
    """One growing list of tokens and its KV blocks. Only the scheduler changes it.

    tokens:       prompt followed by output
    num_computed: how many of `tokens` have their KV in the cache, counting applied steps only
    in_flight:    tokens being computed by steps in flight; the next step starts after them
    pending:      samples being taken by steps in flight: tokens that will exist but are not known yet
    steps_in_flight: how many steps compute or sample it; its blocks are not released before they land
    drafted:      of the tokens in flight, those that were guessed; until they land, no step is planned ahead
    block_table:  pool block ids; block i holds the KV of tokens [i*block_size, (i+1)*block_size)
    block_hashes: chained hashes of the full blocks of `tokens` known so far
    order:        sort key among all sequences: (priority, arrival, serial number, sample)
    furthest:     most tokens ever computed; computing a token below it again is the cost of a preemption
    prompt_logprobs_sent: prompt tokens whose log-probabilities the client already has
    timing_sent:  the client has the whole timing record except the times of the newest tokens
    end_ids:      tokens that end it, once it has min_tokens
    has_row:      a runner may keep state for it, and must be told when it ends
    argmax_from:  the length from which its parameters need only the best token
    forks_at:     the length at which siblings fork from it, when the step is applied; -1: never
    matcher:      its grammar state, advanced with `tokens`
    thinking:     its use of the thinking budget, likewise
    """

    request: Request
    index: int  # which of the n samples
    tokens: list[int]
    prompt_len: int
    max_len: int  # tokens at which the sequence ends with reason "length"
    seed: int  # seed of the random numbers: (seed, output position) decides every draw
    state: SeqState = SeqState.WAITING
    num_computed: int = 0
    in_flight: int = 0
    pending: int = 0
    steps_in_flight: int = 0
    drafted: int = 0
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    order: tuple[int, float, int, int] = (0, 0.0, 0, 0)
    end_ids: frozenset[int] = frozenset()
    furthest: int = 0
    prompt_logprobs_sent: int = 0
    timing_sent: bool = False
    has_row: bool = False
    finish_reason: FinishReason | None = None
    error: str | None = None
    timing: TimingRecord = field(default_factory=TimingRecord)
    # Constant, but read every step: cached.
    params: SamplingParams = field(init=False)
    background: bool = field(init=False)
    argmax_from: int = field(init=False)
    forks_at: int = field(init=False)
    matcher: Matcher | None = field(init=False)
    thinking: ThinkingCount | None = field(init=False)

    def __post_init__(self) -> None:
        self.params = self.request.params
        self.background = is_background(self.request.priority)
        plain = self.params.wants_best_token_alone
        self.argmax_from = self.prompt_len + self.params.min_tokens if plain else sys.maxsize
        self.forks_at = self.prompt_len + 1 if self.params.n > 1 else -1
        self.matcher = None if self.request.compiled is None else self.request.compiled.matcher()
        budget = self.params.thinking
        self.thinking = None if budget is None else ThinkingCount.of(budget)

    @property
    def forced_token(self) -> int | None:
        """The only token that its thinking budget allows next; None: any.

        A grammar may have to complete a character first.
        """
        forced = None if self.thinking is None else self.thinking.forced
        if forced is None or self.matcher is None or self.matcher.permits(forced):
            return forced
        return None

    @property
    def is_constrained(self) -> bool:
        """Whether a step may need a mask of its allowed tokens."""
        return self.matcher is not None or self.thinking is not None

    def needs_last_token(self, pending: int) -> bool:
        """Whether `pending` tokens that are still being sampled decide which tokens are allowed next."""
        if not pending:
            return False
        return self.matcher is not None or (self.thinking is not None and self.thinking.may_force(pending))

    def ahead(self) -> Sequence:
        """A copy whose tokens, grammar and thinking budget can advance on their own. For samplers."""
        ahead = copy(self)
        ahead.tokens = self.tokens[:]
        ahead.matcher = None if self.matcher is None else self.matcher.fork()
        ahead.thinking = copy(self.thinking)
        return ahead

    def ends_with(self, token: int) -> bool:
        """Whether this token, chosen next, ends it, apart from its grammar."""
        if token in self.end_ids and self.num_output >= self.params.min_tokens:
            return True
        return len(self.tokens) + 1 >= self.max_len

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def owes_prompt_logprobs(self) -> bool:
        """While this is true, a step is planned only after the host has read the last one."""
        return self.params.prompt_logprobs is not None and self.prompt_logprobs_sent < self.prompt_len - 1

    @property
    def name(self) -> str:
        return f"{self.request.request_id}/{self.index}"
