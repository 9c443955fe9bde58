"""Turn a request into its sequences: reject what can never be served, and create the n samples of the rest.

Called by Scheduler.add(). A bad request is found here, where it affects only itself, and not during a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

from ridgeline.engine.errors import InvalidRequest
from ridgeline.engine.schedule.request import Request, SamplingParams, Sequence
from ridgeline.telemetry.timing import TimingRecord

TOKEN_LIMIT = 2**31  # token ids are hashed and computed as 32-bit numbers
RETRY_AFTER_RANGE_S = (1.0, 60.0)


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The scheduler's limits. The engine builds them from its config and memory plan."""

    step_tokens: int  # most tokens one step computes
    prefill_chunk: int  # most tokens of one sequence per step
    max_running: int  # most sequences computed together
    # Most sequences queued when a request is accepted; background ones are counted separately.
    max_waiting: int
    block_size: int
    num_blocks: int
    max_context: int
    prefix_cache: bool = True
    # Wait for a prefix that another sequence computes if it has at least this many tokens.
    awaited_tokens: int = 512
    # While there is interactive traffic, a step with background rows has at most this many tokens, so that a
    # new interactive request waits for a short step. Half of it while interactive sequences decode.
    background_tokens: int = 8
    # Seconds without interactive requests before background work may fill whole steps.
    background_quiet_s: float = 10.0
    eos_ids: tuple[int, ...] = ()
    model_salt: str = ""  # distinguishes this model's KV from another's

    def __post_init__(self) -> None:
        for name in (
            "step_tokens",
            "prefill_chunk",
            "max_running",
            "max_waiting",
            "block_size",
            "num_blocks",
            "background_tokens",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def background_tokens_beside(self) -> int:
        return max(1, self.background_tokens // 2)

    @property
    def context(self) -> int:
        """The longest sequence that can be served: it fits the model's context and, alone, the pool."""
        return min(self.max_context, self.num_blocks * self.block_size)


class CompletionRate:
    """How fast requests finished lately. Gives the Retry-After value when the queue is full."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=64)

    def record(self, now: float) -> None:
        self._ends.append(now)

    def retry_after_s(self, waiting: int) -> float:
        """Seconds the queue takes at the recent rate."""
        least_s, most_s = RETRY_AFTER_RANGE_S
        if len(self._ends) < 2:
            return least_s
        s_per_request = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return min(most_s, max(least_s, s_per_request * waiting))


def refuse_unservable(request: Request, limits: SchedulerLimits) -> None:
    """Raise InvalidRequest for a request that can never be served."""
    prompt = request.prompt_ids
    if not prompt:
        raise InvalidRequest("prompt", "is empty; it needs at least one token")
    if len(prompt) >= limits.context:
        raise InvalidRequest(
            "prompt",
            f"has {len(prompt)} tokens; the longest sequence here is {limits.context} tokens"
            f" (context {limits.max_context}, KV cache {limits.num_blocks * limits.block_size}),"
            f" and the answer needs at least one",
        )
    if min(prompt) < 0 or max(prompt) >= TOKEN_LIMIT:
        wrong = next(token for token in prompt if not 0 <= token < TOKEN_LIMIT)
        raise InvalidRequest("prompt", f"contains {wrong}, which is not a token id")
    _refuse_unservable_output(request, limits)
    if request.params.n > limits.max_running:
        raise InvalidRequest(
            "n", f"is {request.params.n}; at most {limits.max_running} sequences run together here"
        )


def _refuse_unservable_output(request: Request, limits: SchedulerLimits) -> None:
    """Output generated elsewhere must leave something to generate."""
    output, params = request.output_ids, request.params
    if not output:
        return
    if params.n != 1:
        raise InvalidRequest("output_ids", f"continue one sample; n is {params.n}")
    if min(output) < 0 or max(output) >= TOKEN_LIMIT:
        raise InvalidRequest("output_ids", "contain a number that is not a token id")
    room = _longest(len(request.prompt_ids), params, limits) - len(request.prompt_ids)
    if len(output) >= room:
        raise InvalidRequest("output_ids", f"are {len(output)} tokens, and the answer has at most {room}")


def _longest(prompt_len: int, params: SamplingParams, limits: SchedulerLimits) -> int:
    """Tokens at which a sequence ends."""
    most_output = limits.context if params.max_tokens is None else params.max_tokens
    return min(prompt_len + most_output, limits.context)


def make_sequences(
    request: Request, limits: SchedulerLimits, serial: int, draw_seed: Callable[[], int]
) -> list[Sequence]:
    """The n samples of a request. The first one computes the prompt for all.

    A sample that continues output generated elsewhere is like one that was preempted: its tokens are computed
    again, and (seed, output position) decides the next draw. Raises InvalidRequest for impossible output.
    """
    params = request.params
    prompt_len = len(request.prompt_ids)
    seed = draw_seed() if params.seed is None else params.seed
    end_ids = frozenset(params.stop_token_ids + (() if params.ignore_eos else tuple(limits.eos_ids)))
    samples = [
        Sequence(
            request=request,
            index=index,
            tokens=[*request.prompt_ids, *request.output_ids],
            prompt_len=prompt_len,
            max_len=_longest(prompt_len, params, limits),
            seed=sample_seed(seed, index),
            order=(request.priority, request.arrival, serial, index),
            end_ids=end_ids,
            timing=TimingRecord(arrival=request.arrival, prompt_tokens=prompt_len),
        )
        for index in range(params.n)
    ]
    if request.output_ids:
        _replay(samples[0], request.output_ids)
    return samples


def _replay(seq: Sequence, output: list[int]) -> None:
    """Advance the grammar and the thinking budget over output generated elsewhere."""
    for place, token in enumerate(output):
        complete = token in seq.end_ids and place >= seq.params.min_tokens
        if seq.matcher is not None:
            try:
                complete |= seq.matcher.advance(token)
            except ValueError as error:
                raise InvalidRequest("output_ids", str(error)) from None
        if complete:
            raise InvalidRequest("output_ids", f"end at position {place}: there is nothing to continue")
        if seq.thinking is not None:
            seq.thinking.advance(token)


def sample_seed(seed: int, index: int) -> int:
    """The seed of each sample. The first sample uses `seed` itself, so n = 1 and the first of n agree."""
    if index == 0:
        return seed
    digest = blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
