"""Whatever arrives, in whatever order, into however small a pool: what was accepted ends, and says what it
would have said alone. The simulated engine checks blocks, budget and order at every step on the way."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from ridgeline.engine.errors import InvalidRequest, QueueFull
from ridgeline.engine.schedule.forecast import OutputLengths
from ridgeline.engine.schedule.request import BACKGROUND_PRIORITY, FinishReason, Request, SamplingParams
from ridgeline.engine.schedule.scheduler import SchedulerLimits
from tests.engine.simulated_engine import VOCAB, SimulatedEngine, answer_alone

# Three beginnings that many prompts share, so that prefixes are hit, half hit and missed.
BEGINNINGS = ([1] * 9, [1, 2, 3, 4, 5, 6, 7, 8], [2, 1, 2, 1])


@dataclass(frozen=True)
class Arrival:
    prompt: list[int]
    params: SamplingParams
    priority: int
    namespace: str
    failing_sample: int | None  # at which output sampling fails
    failing_prompt: bool


@st.composite
def scheduler_limits(draw: st.DrawFn) -> SchedulerLimits:
    block_size = draw(st.integers(1, 4))
    return SchedulerLimits(
        step_tokens=draw(st.integers(1, 12)),
        prefill_chunk=draw(st.integers(1, 8)),
        max_running=draw(st.integers(1, 6)),
        max_waiting=draw(st.integers(2, 8)),
        block_size=block_size,
        num_blocks=draw(st.integers(-(-12 // block_size), 14)),
        max_context=draw(st.integers(12, 32)),
        prefix_cache=draw(st.sampled_from([True, True, True, False])),
        awaited_tokens=draw(st.integers(1, 8)),
        background_tokens=draw(st.integers(1, 6)),
        background_quiet_s=draw(st.sampled_from([0.0, 4.0, 1000.0])),
        eos_ids=(0,),
    )


@st.composite
def arrivals(draw: st.DrawFn) -> Arrival:
    beginning = draw(st.sampled_from(BEGINNINGS))
    prompt = beginning[: draw(st.sampled_from([9, 7, 5, 1]))]
    prompt = prompt + draw(st.lists(st.integers(1, VOCAB - 1), max_size=3))
    max_tokens = draw(st.sampled_from([6, 12, 2, 1, None]))
    rare = st.sampled_from([False] * 9 + [True])
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, 2)) if max_tokens is None else 0,
        ignore_eos=draw(st.booleans()),
        stop_token_ids=draw(st.sampled_from([(), (), (3,)])),
        n=draw(st.sampled_from([1, 1, 1, 2, 3])),
        seed=draw(st.integers(0, 5)),
        prompt_logprobs=0 if draw(rare) else None,
    )
    return Arrival(
        prompt=prompt,
        params=params,
        priority=draw(st.sampled_from([0, 0, 1, -1, BACKGROUND_PRIORITY, BACKGROUND_PRIORITY + 1])),
        namespace=draw(st.sampled_from(["", "", "tenant"])),
        failing_sample=draw(st.integers(0, 3)) if draw(rare) else None,
        failing_prompt=draw(rare),
    )


# From "every answer is one token" (admits all, preempts much) to "every answer is long" (admits few).
forecasts = st.builds(OutputLengths, evidence=st.sampled_from([0, 4, 99]), cold_tokens=st.integers(1, 32))


class Ledger:
    """What was accepted, and what must come of it."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self.engine = engine
        self.accepted: dict[str, Request] = {}
        self.aborted: set[str] = set()

    def submit(self, arrival: Arrival) -> None:
        name = f"r{len(self.accepted)}"
        engine = self.engine
        req = Request(
            name,
            arrival.prompt,
            arrival.params,
            arrival=engine.now,
            priority=arrival.priority,
            cache_namespace=arrival.namespace,
        )
        try:
            engine.scheduler.add(req)
        except InvalidRequest:
            limits = engine.limits
            assert len(arrival.prompt) >= limits.context or arrival.params.n > limits.max_running
            return
        except QueueFull:
            queues = engine.scheduler.waiting
            queue = queues.background if arrival.priority >= BACKGROUND_PRIORITY else queues.interactive
            assert len(queue) >= engine.limits.max_waiting
            return
        self.accepted[name] = req
        if arrival.failing_sample is not None:
            engine.failing_samples[name, arrival.params.n - 1] = arrival.failing_sample
        if arrival.failing_prompt:
            engine.failing_prompts.add(name)

    def abort(self, number: int) -> None:
        if self.accepted:
            name = list(self.accepted)[number % len(self.accepted)]
            self.engine.abort(name)
            self.aborted.add(name)

    def settle(self) -> None:
        context = self.engine.limits.context
        samples = sum(req.params.n for req in self.accepted.values())
        self.engine.drain(most_steps=20 + 4 * samples * context)
        for req in self.accepted.values():
            for index in range(req.params.n):
                self._check_answer(req, index)
        pool = self.engine.scheduler.pool
        assert pool.num_free + pool.num_cached == pool.num_blocks
        assert not self.engine.scheduler.has_work

    def _check_answer(self, req: Request, index: int) -> None:
        engine, key = self.engine, (req.request_id, index)
        alone, reason = answer_alone(req, index, engine.limits.context)
        output, final = engine.output[key], engine.final[key]
        failing_at = 0 if req.request_id in engine.failing_prompts else engine.failing_samples.get(key)
        if final.finish_reason is FinishReason.ABORT:
            assert req.request_id in self.aborted
            assert output == alone[: len(output)]
        elif failing_at is not None and failing_at < len(alone):
            assert (output, final.finish_reason) == (alone[:failing_at], FinishReason.ERROR)
        else:
            assert (output, final.finish_reason) == (alone, reason)
        if index == 0 and output and req.params.prompt_logprobs is not None:
            assert engine.prompt_logprobs[req.request_id] == req.prompt_ids[1:]


lookaheads = st.sampled_from([0, 1, 1, 2])


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    scheduler_limits(),
    forecasts,
    lookaheads,
    st.lists(st.tuples(st.integers(0, 4), arrivals()), min_size=1, max_size=10),
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 20)), max_size=3),
)
def test_everything_accepted_ends_and_says_what_it_would_say_alone(
    limits: SchedulerLimits,
    forecast: OutputLengths,
    lookahead: int,
    traffic: list[tuple[int, Arrival]],
    aborts: list[tuple[int, int]],
) -> None:
    ledger = Ledger(SimulatedEngine(limits, forecast, lookahead))
    step = 0
    for pause, arrival in traffic:
        for _ in range(pause):
            ledger.engine.step()
            step += 1
            for when, number in aborts:
                if when == step:
                    ledger.abort(number)
        ledger.submit(arrival)
    ledger.settle()


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(scheduler_limits(), lookaheads, st.lists(arrivals(), min_size=2, max_size=6))
def test_asked_again_everything_is_answered_the_same_from_the_cache(
    limits: SchedulerLimits, lookahead: int, traffic: list[Arrival]
) -> None:
    """The second time the pool is full of the first time's blocks, some of them evicted."""
    engine = SimulatedEngine(limits, lookahead=lookahead)
    for _ in range(2):
        ledger = Ledger(engine)
        for arrival in traffic:
            ledger.submit(arrival)
        ledger.settle()
        engine.output.clear()
        engine.final.clear()
        engine.prompt_logprobs.clear()
        engine.failing_samples.clear()
        engine.failing_prompts.clear()


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, aborts and resets between and during steps, up to two steps in flight."""

    @initialize(limits=scheduler_limits(), forecast=forecasts, lookahead=lookaheads)
    def start(self, limits: SchedulerLimits, forecast: OutputLengths, lookahead: int) -> None:
        self.engine = SimulatedEngine(limits, forecast, lookahead)
        self.ledger = Ledger(self.engine)

    @rule(arrival=arrivals())
    def submit(self, arrival: Arrival) -> None:
        self.ledger.submit(arrival)

    @rule(number=st.integers(0, 50))
    def abort(self, number: int) -> None:
        self.ledger.abort(number)

    @precondition(lambda self: len(self.engine.in_flight) < 2)
    @rule()
    def launch(self) -> None:
        self.engine.launch()

    @precondition(lambda self: self.engine.in_flight)
    @rule()
    def land(self) -> None:
        self.engine.land()

    @precondition(lambda self: not self.engine.in_flight)
    @rule(steps=st.integers(1, 5))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.engine.step()

    @rule()
    def forget_prefixes(self) -> None:
        self.engine.scheduler.reset_prefix_cache()

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            self.ledger.settle()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
