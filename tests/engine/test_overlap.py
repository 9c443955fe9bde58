"""The overlapped loop against a device with its own timing: step N+1 is launched before N is read, and
nothing that is found out late loses a token, repeats one, or frees a block early."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ridgeline.engine.errors import DeviceOutOfMemory, InvalidRequest, QueueFull
from ridgeline.engine.schedule.forecast import OutputLengths
from ridgeline.engine.schedule.request import FinishReason, Request
from ridgeline.engine.schedule.scheduler import SchedulerLimits
from ridgeline.engine.schedule.step import StepPlan
from ridgeline.engine.schedule.step_budget import FIRST_TRIAL_STEPS
from ridgeline.engine.schedule.thinking import ThinkingBudget
from tests.engine.fake_device import Failure, never
from tests.engine.lettered import budget
from tests.engine.overlapped import Overlapped
from tests.engine.simulated_engine import answer_alone, engine_with, limits, request, shape
from tests.engine.test_scheduler_properties import Arrival, arrivals, forecasts, scheduler_limits
from tests.engine.winding_grammar import constrained

FAILED = "the forward pass failed: RuntimeError: "


# ── whatever arrives, ends, fails and is aborted ─────────────────────────────────────────────────────────

# Steps until the next arrival, the request, how long its grammar lets it continue (None: no grammar), and its
# thinking budget.
Traffic = list[tuple[int, Arrival, int | None, ThinkingBudget | None]]
lengths = st.sampled_from([None, None, 1, 3, 30])
budgets = st.one_of(
    st.none(), st.builds(budget, st.integers(0, 4), leads=st.booleans(), inside=st.booleans())
)
traffic = st.lists(st.tuples(st.integers(0, 4), arrivals(), lengths, budgets), min_size=1, max_size=8)
aborts = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 20)), max_size=3)
timings = st.one_of(st.none(), st.randoms(use_true_random=False))


def play(engine: Overlapped, arriving: Traffic, aborted: list[tuple[int, int]] = ()) -> Overlapped:
    step = 0
    for pause, arrival, length, thinking in arriving:
        for _ in range(pause):
            engine.step()
            step += 1
            for when, number in aborted:
                if when == step and engine.requests:
                    engine.abort(list(engine.requests)[number % len(engine.requests)])
        name, now = f"r{len(engine.requests)}", float(step)
        options = {"priority": arrival.priority, "cache_namespace": arrival.namespace}
        params = replace(arrival.params, thinking=thinking)
        req = Request(name, arrival.prompt, params, arrival=now, **options)
        try:
            engine.add(req if length is None else constrained(req, length))
        except (InvalidRequest, QueueFull):
            continue
    return engine.run()


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(scheduler_limits(), forecasts, timings, traffic, aborts)
def test_overlapped_everything_ends_and_says_what_it_would_say_alone(
    figures: SchedulerLimits,
    forecast: OutputLengths,
    timing: random.Random | None,
    arriving: Traffic,
    aborted: list[tuple[int, int]],
) -> None:
    play(Overlapped(figures, forecast=forecast, timing=timing), arriving, aborted).check_answers()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(scheduler_limits(), timings, traffic)
def test_overlap_on_and_off_say_the_same(
    figures: SchedulerLimits, timing: random.Random | None, arriving: Traffic
) -> None:
    at_once = [(0, *what) for _, *what in arriving]
    ahead = play(Overlapped(figures, timing=timing), at_once)
    plain = play(Overlapped(figures, lookahead=0), at_once)
    assert ahead.output == plain.output
    assert not plain.device.log, "without overlap nothing is launched ahead"


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(scheduler_limits(), forecasts, timings, traffic, aborts, st.randoms(use_true_random=False))
def test_whatever_the_device_refuses_or_breaks_the_rest_says_what_it_would_say_alone(
    figures: SchedulerLimits,
    forecast: OutputLengths,
    timing: random.Random | None,
    arriving: Traffic,
    aborted: list[tuple[int, int]],
    chance: random.Random,
) -> None:
    def sometimes(kind: type[Exception], share: float) -> Failure:
        return lambda _: kind("made to fail") if chance.random() < share else None

    def refuse(plan: StepPlan) -> Exception | None:
        return sometimes(DeviceOutOfMemory, 0.15)(plan) or sometimes(RuntimeError, 0.05)(plan)

    engine = Overlapped(
        figures,
        forecast=forecast,
        timing=timing,
        fail_launch=refuse,
        fail_complete=refuse,
        fail_collect=sometimes(RuntimeError, 0.03),
        fail_execute=sometimes(RuntimeError, 0.1),
    )
    play(engine, arriving, aborted).check_answers("out of memory", FAILED)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(scheduler_limits(), forecasts, traffic, st.integers(1, 3))
def test_a_device_with_memory_for_few_rows_serves_everybody(
    figures: SchedulerLimits, forecast: OutputLengths, arriving: Traffic, most: int
) -> None:
    def full(plan: StepPlan) -> DeviceOutOfMemory | None:
        return DeviceOutOfMemory("full") if len(plan.rows) > most else None

    engine = play(Overlapped(figures, forecast=forecast, fail_launch=full), arriving)
    engine.check_answers()


# ── scenes ───────────────────────────────────────────────────────────────────────────────────────────────


def test_a_step_is_launched_before_the_one_before_is_read() -> None:
    engine = Overlapped(limits(), request("a", 4, max_tokens=4)).run()
    assert engine.device.log == [
        *("launch 0", "launch 1", "collect 0", "launch 2", "collect 1", "launch 3", "collect 2", "collect 3")
    ]
    engine.check_answers()


def test_chunks_of_a_prompt_follow_each_other_ahead() -> None:
    engine = Overlapped(limits(prefill_chunk=4), request("a", 12, max_tokens=2))
    assert engine.step() == []
    engine.step()
    seq = engine.scheduler.running.first
    assert (seq.num_computed, seq.in_flight) == (4, 4)
    engine.run().check_answers()


def test_nothing_is_computed_beyond_the_last_allowed_token() -> None:
    engine = Overlapped(limits(), request("a", 4, max_tokens=3)).run()
    assert engine.scheduler.counters.steps == 3


@pytest.mark.parametrize("at", [0, 1, 4, 7])
def test_a_stop_is_found_one_step_late_and_the_token_after_it_is_nobodys(at: int) -> None:
    """Also on the last token that max_tokens allows."""
    said = answer_alone(request("a", 4, max_tokens=8), 0, 128)[0]
    stop = said[at]
    engine = Overlapped(limits(), request("a", 4, max_tokens=8, stop_token_ids=(stop,)))
    while not engine.final:
        engine.step()
    first = said.index(stop) + 1
    is_last = first == 8
    assert engine.output["a", 0] == said[:first]
    assert engine.core.has_work is not is_last  # the step after it is still in flight,
    assert (engine.scheduler.pool.num_held > 0) is not is_last  # and its blocks are waited for
    engine.run().check_answers()
    assert engine.scheduler.stats().output_tokens == first


def test_an_abort_in_flight_frees_its_blocks_when_its_last_step_has_landed() -> None:
    engine = Overlapped(limits(), request("a", 6), request("b", 6, max_tokens=9))
    for _ in range(3):
        engine.step()
    leaving = next(seq for seq in engine.scheduler.running if seq.request.request_id == "a")
    assert leaving.steps_in_flight == 1
    engine.abort("a")
    assert leaving.block_table
    engine.step()
    assert not leaving.block_table
    engine.run().check_answers()


def test_who_must_give_way_in_flight_gives_way_when_its_token_is_there() -> None:
    old, new = request("old", 8, max_tokens=20), request("new", 8, arrival=1.0, max_tokens=20)
    forecast = OutputLengths(evidence=99, cold_tokens=1)
    engine = Overlapped(limits(num_blocks=8), old, new, forecast=forecast)
    engine.run().check_answers()
    timing = engine.final["new", 0].timing
    assert timing is not None
    assert timing.preemptions == engine.scheduler.counters.preemptions > 0
    assert engine.final["old", 0].timing.preemptions == 0


def test_the_elder_never_waits_while_who_must_give_way_goes_on() -> None:
    forecast = OutputLengths(evidence=99, cold_tokens=1)
    requests = [request("old", 8, max_tokens=20), request("new", 11, arrival=1.0, max_tokens=16)]
    engine = Overlapped(limits(num_blocks=7), *requests, forecast=forecast)
    while ("old", 0) not in engine.final:
        engine.step()
    computed = [{row.seq.request.request_id for row in plan.rows} for plan in engine.device.plans]
    while "old" not in computed[-1]:
        computed.pop()
    assert {"new"} not in computed
    assert engine.scheduler.counters.preemptions > 0


def test_who_is_aborted_after_it_gave_way_is_retired_once() -> None:
    forecast = OutputLengths(evidence=99, cold_tokens=1)
    requests = [request("old", 8, max_tokens=20), request("new", 11, arrival=1.0, max_tokens=16)]
    engine = Overlapped(limits(num_blocks=7), *requests, forecast=forecast)
    while not engine.scheduler.counters.preemptions:
        engine.step()
    engine.abort("new")
    engine.run().check_answers()
    retired = [seq.name for plan in engine.device.plans for seq in plan.retired]
    assert retired == ["new/0"]


def test_blocks_of_one_that_ended_in_flight_are_waited_for_before_anybody_gives_way() -> None:
    """`a` waits for its prompt's scores; `b` ends with a step in flight, and all blocks are held."""
    requests = [request("a", 4, prompt_logprobs=0, max_tokens=4), request("b", 4)]
    engine = engine_with(*requests, num_blocks=3, expect=1, lookahead=1)
    engine.launch()
    assert shape(engine.launch()) == [("b/0", 4, 1)]
    engine.land()
    engine.abort("b")
    waits = engine.launch()
    assert (shape(waits), waits.preempted) == ([], [])
    engine.land()
    assert shape(engine.launch()) == [("a/0", 4, 1)]


def test_samples_part_only_when_their_prompt_has_landed() -> None:
    engine = Overlapped(limits(), request("a", 6, n=3, max_tokens=5))
    assert engine.step() == []
    assert len(engine.step()) == 3  # nothing could be launched before the prompt was read
    assert engine.device.log == ["launch 0", "collect 0"]
    engine.run().check_answers()


def test_steps_are_launched_ahead_again_once_the_prompt_logprobs_have_been_read() -> None:
    asked = request("a", 6, prompt_logprobs=0, max_tokens=4)
    engine = Overlapped(limits(prefill_chunk=3), asked).run()
    prefill = ["launch 0", "collect 0", "launch 1", "collect 1"]
    decode = ["launch 2", "launch 3", "collect 2", "launch 4", "collect 3", "collect 4"]
    assert engine.device.log == prefill + decode
    engine.check_answers()


def test_samples_of_a_scored_prompt_are_launched_ahead() -> None:
    engine = Overlapped(limits(), request("a", 6, n=2, prompt_logprobs=0, max_tokens=4)).run()
    assert engine.device.log[:5] == ["launch 0", "collect 0", "launch 1", "launch 2", "collect 1"]
    engine.check_answers()


def test_a_preempted_sequence_whose_prompt_was_scored_is_launched_ahead_when_it_is_computed_again() -> None:
    refused = iter([DeviceOutOfMemory("full")])

    def at_the_third(plan: StepPlan) -> Exception | None:
        return next(refused, None) if plan.step_id == 2 else None

    requests = [request(name, 6, prompt_logprobs=0, max_tokens=6) for name in ("a", "b")]
    engine = Overlapped(limits(step_tokens=600), *requests, fail_launch=at_the_third).run()
    engine.check_answers()
    assert engine.scheduler.counters.preemptions == 1
    again = engine.device.log.index("launch 3")
    assert engine.device.log[again : again + 3] == ["launch 3", "launch 4", "collect 3"]


def test_under_a_grammar_tokens_are_chosen_when_it_has_seen_the_one_before() -> None:
    """The forward pass is launched ahead all the same."""
    engine = Overlapped(limits(), constrained(request("a", 4, max_tokens=4))).run()
    steps = ("launch 1", "collect 0", "complete 1", "launch 2", "collect 1", "complete 2")
    assert engine.device.log == ["launch 0", *steps, "launch 3", "collect 2", "complete 3", "collect 3"]
    engine.check_answers()
    assert engine.output["a", 0] != answer_alone(request("a", 4, max_tokens=4), 0, 128)[0]


def test_chunks_of_a_prompt_under_a_grammar_wait_for_nothing() -> None:
    engine = Overlapped(limits(prefill_chunk=4), constrained(request("a", 12, max_tokens=2))).run()
    assert [entry for entry in engine.device.log if "complete" in entry] == ["complete 3"]
    engine.check_answers()


def test_a_grammar_that_is_over_bars_nothing_of_the_step_that_is_under_way() -> None:
    engine = Overlapped(limits(), constrained(request("a", 4), length=3), request("b", 4, max_tokens=9))
    engine.run().check_answers()
    assert engine.final["a", 0].finish_reason is FinishReason.STOP
    over = engine.device.plans[3].rows[0].seq
    assert (over.request.request_id, over.matcher.tokens) == ("a", engine.output["a", 0])


@pytest.mark.parametrize("error", [RuntimeError("odd"), DeviceOutOfMemory("full")], ids=["other", "memory"])
def test_a_step_that_cannot_be_completed_is_computed_again(error: Exception) -> None:
    refused = iter([error])
    requests = [constrained(request("a", 6, max_tokens=6)), constrained(request("b", 6, n=2, max_tokens=6))]

    def at_the_third(plan: StepPlan) -> Exception | None:
        return next(refused, None) if plan.step_id >= 3 else None

    engine = Overlapped(limits(step_tokens=600), *requests, fail_complete=at_the_third)
    engine.run().check_answers()
    assert next(refused, None) is None
    assert {final.finish_reason for final in engine.final.values()} == {FinishReason.LENGTH}


def test_a_step_that_failed_on_the_device_ends_its_sequences_and_no_other() -> None:
    def second(plan: StepPlan) -> Exception | None:
        return RuntimeError("illegal instruction") if plan.step_id == 1 else None

    engine = Overlapped(limits(), request("a", 6, max_tokens=9), fail_collect=second)
    engine.step()
    engine.step()
    engine.add(request("b", 6, max_tokens=3))
    engine.run().check_answers(FAILED)
    assert engine.final["a", 0].error == "the forward pass failed: RuntimeError: illegal instruction"
    assert len(engine.output["a", 0]) == 1  # what came before the failed step, and nothing of the one after
    assert engine.final["b", 0].finish_reason is FinishReason.LENGTH


def test_a_launch_that_fails_is_run_row_by_row_once_the_others_have_landed() -> None:
    def third(plan: StepPlan) -> Exception | None:
        return RuntimeError("made to fail") if plan.step_id == 3 else None

    def b_alone(plan: StepPlan) -> Exception | None:
        return RuntimeError("b is bad") if plan.rows[0].seq.request.request_id == "b" else None

    requests = [request("a", 6, max_tokens=6), request("b", 6, max_tokens=6)]
    engine = Overlapped(limits(), *requests, fail_launch=third, fail_execute=b_alone)
    engine.run().check_answers(FAILED)
    assert engine.final["a", 0].finish_reason is FinishReason.LENGTH
    assert "b is bad" in (engine.final["b", 0].error or "")
    assert len(engine.output["b", 0]) == 3


def test_out_of_memory_halves_the_budget_and_everybody_is_served() -> None:
    def full(plan: StepPlan) -> DeviceOutOfMemory | None:
        return DeviceOutOfMemory("full") if plan.num_tokens > 600 else None

    figures = limits(
        step_tokens=2048, prefill_chunk=2048, num_blocks=2048, max_context=4096, prefix_cache=False
    )
    requests = [request(f"r{i}", 900, max_tokens=3) for i in range(3)]
    engine = Overlapped(figures, *requests, fail_launch=full).run()
    engine.check_answers()
    assert engine.scheduler.stats().step_tokens == 512
    assert all(final.finish_reason is FinishReason.LENGTH for final in engine.final.values())


def test_the_budget_is_whole_again_after_a_shortage_that_has_passed() -> None:
    refused = iter([DeviceOutOfMemory("full")] * 2)

    def twice(plan: StepPlan) -> DeviceOutOfMemory | None:
        return next(refused, None)

    figures = limits(
        step_tokens=2048, prefill_chunk=2048, num_blocks=2048, max_context=4096, prefix_cache=False
    )
    engine = Overlapped(figures, request("a", 900, max_tokens=2 * FIRST_TRIAL_STEPS + 9), fail_launch=twice)
    budgets = []
    while engine.core.has_work:
        engine.step()
        budgets.append(engine.scheduler.stats().step_tokens)
    engine.check_answers()
    assert [size for size, _ in itertools.groupby(budgets)] == [1024, 512, 1024, 2048]
    assert budgets.count(512) >= FIRST_TRIAL_STEPS
    engine.add(request("b", 2000, max_tokens=1))
    engine.run()
    assert engine.device.plans[-1].num_tokens == 2000


def test_samples_whose_blocks_were_never_copied_start_again() -> None:
    """The step in which they part is refused: their tables name blocks that nothing was copied into."""
    refused = iter([DeviceOutOfMemory("full")])

    def at_the_fork(plan: StepPlan) -> DeviceOutOfMemory | None:
        return next(refused, None) if plan.copies else None

    engine = Overlapped(limits(), request("a", 6, n=3, max_tokens=5), fail_launch=at_the_fork)
    engine.run().check_answers()
    assert next(refused, None) is None
    assert [len(engine.output["a", index]) for index in range(3)] == [5, 5, 5]


def test_a_device_without_any_memory_ends_each_with_the_reason() -> None:
    requests = [request(f"r{i}", 6, n=1 + i, max_tokens=3) for i in range(3)]
    engine = Overlapped(limits(), *requests, fail_launch=lambda _: DeviceOutOfMemory("none"))
    engine.run().check_answers("out of memory")
    assert len(engine.final) == 6
    assert all((final.error or "").startswith("out of memory") for final in engine.final.values())


@pytest.mark.parametrize("where", ["fail_launch", "fail_complete", "fail_collect"])
@pytest.mark.parametrize("step", [0, 1, 4])
def test_ctrl_c_leaves_no_step_in_flight_and_the_books_balanced(where: str, step: int) -> None:
    def interrupt(plan: StepPlan) -> BaseException | None:
        return KeyboardInterrupt() if plan.step_id >= step else None

    requests = [constrained(request("a", 6, max_tokens=9)), request("b", 9)]
    engine = Overlapped(limits(), *requests, **{where: interrupt})
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    engine.device.in_flight.clear()  # their tickets are never collected
    assert not engine.core.has_work
    engine.scheduler.check_integrity()
    assert engine.scheduler.pool.num_held == 0
    engine.device.fail_launch = engine.device.fail_complete = engine.device.fail_collect = never
    engine.requests.clear()
    engine.add(request("c", 6, max_tokens=4, ignore_eos=False))
    engine.run()
    assert engine.output["c", 0] == answer_alone(engine.requests["c"], 0, 128)[0]


def test_records_of_overlapping_steps_add_up_to_the_time_that_passed() -> None:
    engine = Overlapped(limits(), request("a", 4, max_tokens=9)).run()
    records = engine.core.steps.dump()
    assert [record.step_id for record in records] == list(range(9))
    assert all(0 < record.busy_s <= record.wall_s for record in records)
    busy = sum(record.busy_s for record in records)
    assert busy == engine.core.last_step_end - records[0].start - records[0].schedule_s


def test_leaving_the_loop_collects_what_is_in_flight() -> None:
    engine = Overlapped(limits(), request("a", 6))
    for _ in range(3):
        engine.step()
    engine.abort("a")
    engine.core.drain()
    assert (engine.core.has_work, engine.scheduler.pool.num_held) == (False, 0)
