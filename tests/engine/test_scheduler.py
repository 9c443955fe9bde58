"""The scheduler as a specification, one small scene per promise. Block size 4 unless said."""

from __future__ import annotations

import random

import pytest

from ridgeline.engine.block_pool import PoolCorrupted
from ridgeline.engine.errors import InvalidRequest, QueueFull
from ridgeline.engine.forecast import OutputLengths
from ridgeline.engine.request import FinishReason
from ridgeline.engine.scheduler import Scheduler
from ridgeline.engine.step import StepPlan, StepResult
from tests.engine.simulated_engine import EOS, VOCAB, SimulatedEngine, answer_alone, limits, request


def shape(plan: StepPlan) -> list[tuple[str, int, int]]:
    """A plan as (sequence, start, count)."""
    return [(row.seq.name, row.start, row.count) for row in plan.rows]


def engine_with(*requests: object, expect: int | None = None, **changes: object) -> SimulatedEngine:
    """`expect`: how long the forecast believes answers to be, right or wrong."""
    lengths = None if expect is None else OutputLengths(evidence=99, cold_tokens=expect)
    engine = SimulatedEngine(limits(**changes), lengths)
    for req in requests:
        engine.scheduler.add(req)  # type: ignore[arg-type]
    return engine


class TestRefusal:
    @pytest.mark.parametrize(
        ("req", "field", "says"),
        [
            (request("a", []), "prompt", "is empty"),
            (request("a", 128), "prompt", "has 128 tokens; the longest sequence here is 128"),
            (request("a", [1, -5]), "prompt", "contains -5, which is not a token id"),
            (request("a", [1, 2**31]), "prompt", "contains 2147483648"),
            (request("a", 4, n=9), "n", "is 9; at most 8 sequences run together"),
        ],
    )
    def test_what_can_never_be_served_is_refused_with_the_field(
        self, req: object, field: str, says: str
    ) -> None:
        with pytest.raises(InvalidRequest, match=says) as refusal:
            engine_with(req)
        assert refusal.value.field == field

    def test_a_prompt_the_pool_can_never_hold_is_refused(self) -> None:
        with pytest.raises(InvalidRequest, match="KV cache 8"):
            engine_with(request("a", 8), num_blocks=2)

    def test_a_second_request_under_a_living_id_is_refused_and_the_first_unharmed(self) -> None:
        engine = engine_with(request("a", 4, max_tokens=2))
        with pytest.raises(InvalidRequest, match="'a' is already being served"):
            engine.scheduler.add(request("a", 4))
        engine.drain()
        engine.scheduler.add(request("a", 4))  # ended: the id may be used again

    def test_a_full_queue_refuses_and_names_a_time(self) -> None:
        engine = engine_with(*(request(f"r{i}", 4) for i in range(3)), max_waiting=3)
        with pytest.raises(QueueFull, match="3 requests waiting") as refusal:
            engine.scheduler.add(request("late", 4))
        assert refusal.value.retry_after_s == 1.0

    def test_the_time_to_retry_follows_the_recent_pace(self) -> None:
        engine = engine_with(*(request(f"r{i}", 2, max_tokens=8) for i in range(3)), max_running=1)
        engine.drain()
        for i in range(16):
            engine.scheduler.add(request(f"w{i}", 2))
        with pytest.raises(QueueFull) as refusal:
            engine.scheduler.add(request("late", 2))
        assert refusal.value.retry_after_s == 60.0  # 10 s each, 16 waiting: cut to a minute

    @pytest.mark.parametrize("name", ["step_tokens", "prefill_chunk", "max_running", "num_blocks"])
    def test_limits_that_allow_nothing_are_refused_by_name(self, name: str) -> None:
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            limits(**{name: 0})


class TestStep:
    def test_decodes_come_first_and_prefill_chunks_fill_the_rest(self) -> None:
        engine = engine_with(
            *(request(name, length, max_tokens=20) for name, length in (("a", 3), ("b", 20))),
            step_tokens=8,
            prefill_chunk=6,
        )
        assert shape(engine.step()) == [("a/0", 0, 3), ("b/0", 0, 5)]
        assert shape(engine.step()) == [("a/0", 3, 1), ("b/0", 5, 6)]
        engine.scheduler.add(request("c", 9, max_tokens=20))
        assert shape(engine.step()) == [("a/0", 4, 1), ("b/0", 11, 6), ("c/0", 0, 1)]
        assert shape(engine.step()) == [("a/0", 5, 1), ("b/0", 17, 3), ("c/0", 1, 4)]

    def test_only_the_row_that_reaches_the_end_is_sampled(self) -> None:
        engine = engine_with(request("a", 10), prefill_chunk=4)
        sampled = [bool(engine.step().rows[0].samplers) for _ in range(4)]
        assert sampled == [False, False, True, True]

    def test_the_newest_token_has_no_kv_until_the_next_step(self) -> None:
        engine = engine_with(request("a", 4))
        engine.step()
        (seq,) = engine.scheduler.running
        assert (len(seq.tokens), seq.num_computed) == (5, 4)

    def test_priority_comes_before_arrival_and_arrival_before_all_else(self) -> None:
        engine = engine_with(
            request("late", 4, arrival=2.0),
            request("early", 4, arrival=1.0),
            request("urgent", 4, arrival=3.0, priority=-1),
            request("twin", 4, arrival=1.0),
            max_running=1,
        )
        ends = []
        while engine.scheduler.has_work:
            engine.step()
            ends += [seq.request.request_id for seq in engine.scheduler.running]
            for name in ends:
                engine.abort(name)
        assert ends == ["urgent", "early", "twin", "late"]

    def test_no_more_sequences_run_than_allowed(self) -> None:
        engine = engine_with(*(request(f"r{i}", 2, max_tokens=3) for i in range(5)), max_running=2)
        assert len(engine.step().rows) == 2
        engine.drain()

    def test_an_empty_scheduler_plans_nothing_and_has_no_result_to_take(self) -> None:
        scheduler = Scheduler(limits())
        assert not scheduler.schedule(0.0)
        assert not scheduler.has_work
        with pytest.raises(RuntimeError, match="without a step in flight"):
            scheduler.apply(StepResult([]), 0.0)

    def test_a_result_for_another_number_of_rows_is_an_error(self) -> None:
        engine = engine_with(request("a", 4))
        engine.scheduler.schedule(0.0)
        with pytest.raises(ValueError, match="shorter"):
            engine.scheduler.apply(StepResult([]), 0.0)


class TestEnd:
    def test_max_tokens_ends_with_length(self) -> None:
        engine = engine_with(request("a", 4, max_tokens=3))
        engine.drain()
        final = engine.final["a", 0]
        assert (final.finish_reason, len(engine.output["a", 0])) == (FinishReason.LENGTH, 3)

    def test_without_max_tokens_the_end_of_the_context_ends_it(self) -> None:
        engine = engine_with(request("a", 4), max_context=16)
        engine.drain()
        assert len(engine.output["a", 0]) == 12

    def test_a_pool_smaller_than_the_context_is_the_end_of_the_context(self) -> None:
        engine = engine_with(request("a", 4), max_context=1000, num_blocks=3)
        engine.drain()
        assert (len(engine.output["a", 0]), engine.scheduler.counters.preemptions) == (8, 0)

    def test_the_end_token_is_delivered_and_named(self) -> None:
        engine = engine_with(request("a", 4, ignore_eos=False))
        engine.drain()
        final = engine.final["a", 0]
        assert (final.finish_reason, final.stop_token) == (FinishReason.STOP, EOS)
        assert engine.output["a", 0].index(EOS) == len(engine.output["a", 0]) - 1

    def test_a_stop_token_id_ends_it_even_where_eos_is_ignored(self) -> None:
        stop = answer_alone(request("a", 4, max_tokens=9), 0, 128)[0][5]
        engine = engine_with(request("a", 4, stop_token_ids=(stop,)))
        engine.drain()
        assert engine.final["a", 0].stop_token == stop
        assert engine.output["a", 0].count(stop) == 1

    def test_no_token_stops_before_min_tokens(self) -> None:
        every_token = tuple(range(VOCAB))
        engine = engine_with(request("a", 4, stop_token_ids=every_token, min_tokens=5))
        engine.drain()
        assert len(engine.output["a", 0]) == 6

    def test_an_error_in_one_sample_ends_that_sequence_only(self) -> None:
        engine = engine_with(request("a", 4, max_tokens=6), request("b", 4, max_tokens=6, n=2))
        engine.failing_samples["b", 1] = 2
        engine.drain()
        assert engine.final["b", 1].finish_reason is FinishReason.ERROR
        assert engine.final["b", 1].error == "sampling failed"
        assert len(engine.output["b", 1]) == 2
        assert [len(engine.output[key]) for key in (("a", 0), ("b", 0))] == [6, 6]

    def test_a_prompt_that_fails_ends_all_samples_that_depend_on_it(self) -> None:
        engine = engine_with(request("a", 4, max_tokens=6), request("b", 6, n=3), prefill_chunk=4)
        engine.failing_prompts.add("b")
        engine.drain()
        reasons = [engine.final["b", index].finish_reason for index in range(3)]
        assert reasons == [FinishReason.ERROR] * 3
        assert engine.final["a", 0].finish_reason is FinishReason.LENGTH

    def test_the_timing_record_tells_the_whole_life(self) -> None:
        engine = engine_with(request("a", 6, arrival=0.5, max_tokens=2), prefill_chunk=4)
        engine.drain()
        timing = engine.final["a", 0].timing
        assert timing is not None
        assert (timing.arrival, timing.admitted, timing.first_prefill) == (0.5, 1.0, 1.0)
        assert timing.token_times == [2.5, 3.75]
        assert (timing.end, timing.end_reason) == (3.75, "length")
        assert (timing.prompt_tokens, timing.output_tokens, timing.preemptions) == (6, 2, 0)


class TestAbort:
    def test_a_queued_request_is_gone_at_once(self) -> None:
        engine = engine_with(request("a", 4))
        (delta,) = engine.abort("a")
        assert delta.finish_reason is FinishReason.ABORT
        assert not engine.scheduler.has_work

    def test_between_steps_blocks_are_free_at_once(self) -> None:
        engine = engine_with(request("a", 40), prefill_chunk=8, prefix_cache=False)
        engine.step()
        assert engine.scheduler.pool.num_held == 10
        engine.abort("a")
        assert engine.scheduler.pool.num_free == 64

    def test_in_flight_blocks_stay_until_the_step_lands_and_its_token_is_dropped(self) -> None:
        engine = engine_with(request("a", 6))
        engine.launch()
        (delta,) = engine.abort("a")
        assert delta.timing is not None
        assert engine.scheduler.pool.num_held == 2
        assert engine.scheduler.has_work
        assert engine.land() == []
        assert (engine.scheduler.pool.num_held, engine.scheduler.has_work) == (0, False)

    def test_all_samples_end_whether_or_not_the_prompt_is_done(self) -> None:
        engine = engine_with(request("a", 6, n=3), prefill_chunk=4)
        engine.step()
        assert [delta.index for delta in engine.abort("a")] == [0, 1, 2]
        engine.scheduler.add(request("b", 6, n=3))
        engine.step()
        engine.step()
        assert [delta.index for delta in engine.abort("b")] == [0, 1, 2]
        assert engine.scheduler.pool.num_held == 0

    def test_one_sample_can_be_ended_alone_once_it_speaks(self) -> None:
        engine = engine_with(request("a", 6, n=2, max_tokens=5), prefill_chunk=4)
        engine.step()
        assert engine.abort("a", index=1) == []
        engine.step()
        assert [delta.index for delta in engine.abort("a", index=1)] == [1]
        engine.drain()
        assert len(engine.output["a", 0]) == 5

    def test_what_is_unknown_or_over_is_left_alone(self) -> None:
        engine = engine_with(request("a", 4, max_tokens=1))
        engine.drain()
        assert engine.abort("a") == []
        assert engine.abort("never seen") == []


class TestPrefixCache:
    PROMPT = (1, 2, 3, 4, 5, 6, 7, 8, 9)

    def ask(self, engine: SimulatedEngine, name: str, prompt: list[int], **changes: object) -> int:
        """How many tokens of the prompt were found."""
        engine.scheduler.add(request(name, prompt, **({"max_tokens": 1} | changes)))
        engine.drain()
        timing = engine.final[name, 0].timing
        assert timing is not None
        return timing.cached_tokens

    def test_a_repeated_beginning_is_not_computed_again(self) -> None:
        engine = engine_with()
        assert self.ask(engine, "a", list(self.PROMPT)) == 0
        assert self.ask(engine, "b", [*self.PROMPT, 10, 11]) == 8
        assert shape(engine.plans[-1]) == [("b/0", 8, 3)]
        stats = engine.scheduler.stats()
        assert (stats.prefix_queries, stats.prefix_hits) == (20, 8)

    def test_at_least_the_last_prompt_token_is_computed(self) -> None:
        engine = engine_with()
        assert self.ask(engine, "a", [1, 2, 3, 4, 5, 6, 7, 8]) == 0
        assert self.ask(engine, "b", [1, 2, 3, 4, 5, 6, 7, 8]) == 4

    def test_an_answer_is_found_when_the_chat_goes_on(self) -> None:
        engine = engine_with()
        self.ask(engine, "a", [1, 2, 3], max_tokens=10)
        history = [1, 2, 3, *engine.output["a", 0]]
        assert self.ask(engine, "b", [*history, 1, 2]) == 12

    def test_the_last_sampled_token_is_not_taken_for_computed(self) -> None:
        engine = engine_with()
        self.ask(engine, "a", [1, 2, 3], max_tokens=5)  # 8 tokens, but the KV of 7
        history = [1, 2, 3, *engine.output["a", 0]]
        assert self.ask(engine, "b", [*history, 1, 2]) == 4

    def test_adapter_and_namespace_keep_prefixes_apart(self) -> None:
        engine = engine_with()
        self.ask(engine, "a", list(self.PROMPT))
        assert self.ask(engine, "b", list(self.PROMPT), cache_namespace="other") == 0
        assert self.ask(engine, "c", list(self.PROMPT), adapter="lora") == 0
        assert self.ask(engine, "d", list(self.PROMPT)) == 8

    def test_prompt_logprobs_are_computed_in_full_and_still_fill_the_cache(self) -> None:
        engine = engine_with()
        assert self.ask(engine, "a", list(self.PROMPT), prompt_logprobs=0) == 0
        assert self.ask(engine, "b", list(self.PROMPT), prompt_logprobs=0) == 0
        assert engine.prompt_logprobs["b"] == list(self.PROMPT[1:])
        assert self.ask(engine, "c", list(self.PROMPT)) == 8

    def test_prompt_logprobs_of_chunks_join_to_the_whole_prompt(self) -> None:
        engine = engine_with(prefill_chunk=2)
        self.ask(engine, "a", list(self.PROMPT), prompt_logprobs=0)
        assert engine.prompt_logprobs["a"] == list(self.PROMPT[1:])

    def test_turned_off_nothing_is_found_or_kept(self) -> None:
        engine = engine_with(prefix_cache=False)
        self.ask(engine, "a", list(self.PROMPT))
        assert self.ask(engine, "b", list(self.PROMPT)) == 0
        assert engine.scheduler.pool.num_cached == 0

    def test_a_reset_forgets_everything(self) -> None:
        engine = engine_with()
        self.ask(engine, "a", list(self.PROMPT))
        assert engine.scheduler.reset_prefix_cache() == 2
        assert self.ask(engine, "b", list(self.PROMPT)) == 0

    def test_blocks_of_a_running_sequence_are_shared_while_it_runs(self) -> None:
        engine = engine_with(request("a", list(self.PROMPT)))
        engine.step()
        engine.scheduler.add(request("b", list(self.PROMPT)))
        engine.step()
        first, second = engine.scheduler.running
        assert first.block_table[:2] == second.block_table[:2]
        assert first.block_table[2] != second.block_table[2]


class TestForecast:
    def test_a_request_waits_until_it_fits_to_the_end_so_nobody_is_preempted(self) -> None:
        together = [request(f"r{i}", 8, max_tokens=24) for i in range(4)]
        careful = engine_with(*together, num_blocks=16)
        careful.step()
        assert (len(careful.scheduler.running), len(careful.scheduler.waiting)) == (2, 2)
        careful.drain()
        assert careful.scheduler.counters.preemptions == 0
        careless = engine_with(*together, num_blocks=16, expect=1)
        careless.drain()
        assert careless.scheduler.counters.preemptions > 0

    def test_one_that_ends_soon_makes_room_for_one_that_comes(self) -> None:
        engine = engine_with(request("a", 24, max_tokens=2), request("b", 4, max_tokens=28), num_blocks=9)
        engine.step()
        assert len(engine.scheduler.running) == 2  # 6 + 8 blocks at most, but never at the same time
        engine.drain()
        assert engine.scheduler.counters.preemptions == 0

    def test_a_shared_prefix_is_counted_once(self) -> None:
        prompt = list(range(1, 12)) * 4
        engine = engine_with(request("a", prompt, max_tokens=4), num_blocks=16)
        engine.step()
        for name in ("b", "c"):
            engine.scheduler.add(request(name, prompt, max_tokens=3))
            engine.step()
        assert len(engine.scheduler.running) == 3  # three times 12 blocks, 10 of them the same
        engine.drain()
        assert engine.scheduler.counters.preemptions == 0

    def test_places_are_kept_for_samples_to_come(self) -> None:
        engine = engine_with(request("a", 8, n=3, max_tokens=4), request("b", 4), max_running=3)
        assert shape(engine.step()) == [("a/0", 0, 8)]
        assert len(engine.scheduler.running) == 3

    def test_what_fits_at_all_runs_when_nothing_else_does(self) -> None:
        engine = engine_with(request("a", 8, n=8), num_blocks=4, max_context=16)
        assert engine.step()


class TestPreemption:
    def test_the_latest_gives_way_and_says_the_same_in_the_end(self) -> None:
        old, new = request("old", 8, max_tokens=20), request("new", 8, arrival=1.0, max_tokens=20)
        engine = engine_with(old, new, num_blocks=8, expect=1)
        engine.drain()
        assert {seq.name for plan in engine.plans for seq in plan.preempted} == {"new/0"}
        for req in (old, new):
            assert engine.output[req.request_id, 0] == answer_alone(req, 0, 128)[0]
        timing = engine.final["new", 0].timing
        assert timing is not None
        assert timing.preemptions == engine.scheduler.stats().preemptions > 0
        assert timing.recomputed_tokens == engine.scheduler.stats().recomputed_tokens

    def test_a_lower_priority_gives_way_even_if_it_came_first(self) -> None:
        engine = engine_with(
            request("batch", 8, priority=5, max_tokens=20),
            request("chat", 8, arrival=1.0, max_tokens=20),
            num_blocks=8,
            expect=1,
        )
        engine.drain()
        assert {seq.name for plan in engine.plans for seq in plan.preempted} == {"batch/0"}

    def test_cached_blocks_are_evicted_before_anybody_is_preempted(self) -> None:
        engine = engine_with(request("past", 24, max_tokens=1), num_blocks=8)
        engine.drain()
        assert engine.scheduler.pool.num_cached == 6
        engine.scheduler.add(request("now", 8, max_tokens=20))
        engine.drain()
        assert engine.scheduler.counters.preemptions == 0

    def test_what_stayed_cached_is_not_computed_again(self) -> None:
        engine = engine_with(
            request("old", 4, max_tokens=10), request("new", 12, arrival=1.0), num_blocks=5, expect=1
        )
        while not (plan := engine.step()).preempted:
            pass
        (victim,) = plan.preempted
        assert (victim.num_computed, victim.block_table) == (0, [])
        computed_before = victim.furthest
        engine.drain()
        timing = engine.final["new", 0].timing
        assert timing is not None
        assert 0 < timing.recomputed_tokens < computed_before

    def test_the_preempted_returns_before_those_who_came_later(self) -> None:
        engine = engine_with(
            *(request(name, 8, arrival=i, max_tokens=20) for i, name in enumerate(("a", "b", "c"))),
            num_blocks=8,
            max_running=2,
            expect=1,
        )
        while not engine.step().preempted:
            pass
        assert [seq.name for seq in engine.scheduler.waiting] == ["b/0", "c/0"]

    def test_the_preempted_is_not_admitted_again_in_the_same_step(self) -> None:
        """Twins that computed the same blocks: once one has lost its own, it fits on the other's at once."""
        twins = [request(name, list(range(1, 10)), max_tokens=9) for name in ("a", "b")]
        engine = engine_with(*twins, num_blocks=6, expect=1)
        while not (plan := engine.step()).preempted:
            pass
        assert shape(plan) == [("a/0", 12, 1)]
        assert shape(engine.step()) == [("a/0", 13, 1), ("b/0", 12, 1)]

    def test_prompt_logprobs_are_sent_once_though_the_prompt_is_computed_twice(self) -> None:
        engine = engine_with(
            request("old", 4, max_tokens=14),
            request("new", 12, arrival=1.0, prompt_logprobs=0, max_tokens=2),
            num_blocks=5,
            prefill_chunk=4,
            step_tokens=3,
            expect=1,
            prefix_cache=False,
        )
        engine.drain()
        assert engine.scheduler.counters.recomputed_tokens > 0
        assert engine.prompt_logprobs["new"] == request("new", 12).prompt_ids[1:]


class TestStepsInFlight:
    def test_a_sequence_in_flight_is_not_planned_again(self) -> None:
        engine = engine_with(request("a", 4, max_tokens=8), request("b", 4, max_tokens=8), step_tokens=4)
        assert shape(engine.launch()) == [("a/0", 0, 4)]
        assert shape(engine.launch()) == [("b/0", 0, 4)]
        assert shape(engine.launch()) == []
        engine.land()
        assert shape(engine.launch()) == [("a/0", 4, 1)]

    def test_nobody_is_preempted_in_flight(self) -> None:
        engine = engine_with(
            request("old", 4), request("new", 4, arrival=1.0), num_blocks=2, step_tokens=4, expect=1
        )
        assert shape(engine.launch()) == [("old/0", 0, 4)]
        assert shape(engine.launch()) == [("new/0", 0, 4)]
        engine.land()
        waits = engine.launch()  # old needs a block, and new, who must give one, is being computed
        assert (shape(waits), waits.preempted) == ([], [])
        engine.land()
        plan = engine.launch()
        assert (shape(plan), [seq.name for seq in plan.preempted]) == ([("old/0", 4, 1)], ["new/0"])

    def test_blocks_of_a_request_aborted_in_flight_are_waited_for(self) -> None:
        engine = engine_with(request("a", 12), num_blocks=4)
        engine.launch()
        engine.abort("a")
        engine.scheduler.add(request("b", 12, max_tokens=2))
        assert shape(engine.launch()) == []
        engine.land()
        assert shape(engine.launch()) == [("b/0", 0, 12)]

    def test_cached_blocks_about_to_be_used_are_not_counted_as_free(self) -> None:
        engine = engine_with(request("past", [1, 2, 3, 4, 5], max_tokens=1), num_blocks=4)
        engine.drain()
        engine.scheduler.add(request("a", 8))
        engine.launch()
        engine.abort("a")
        # One block free, one cached: with the cached one taken, one is left where two are needed.
        engine.scheduler.add(request("b", [1, 2, 3, 4, *[6] * 8], max_tokens=2))
        assert shape(engine.launch()) == []
        engine.land()
        assert shape(engine.launch()) == [("b/0", 4, 8)]


class TestSamples:
    def test_the_prompt_is_computed_once_and_its_blocks_are_shared(self) -> None:
        engine = engine_with(request("a", 8, n=3, max_tokens=4))
        plan = engine.step()
        assert [seq.name for seq in plan.rows[0].samplers] == ["a/0", "a/1", "a/2"]
        assert engine.scheduler.pool.num_held == 2
        assert shape(engine.step()) == [("a/0", 8, 1), ("a/1", 8, 1), ("a/2", 8, 1)]
        assert engine.plans[-1].copies == []  # the prompt ended with its block: there is nothing to copy
        assert engine.scheduler.counters.prompt_tokens == 8

    def test_a_half_full_last_block_is_copied_for_all_but_the_last_to_write(self) -> None:
        engine = engine_with(request("a", 6, n=3, max_tokens=4))
        engine.step()
        plan = engine.step()
        tables = [seq.block_table for seq in engine.scheduler.running]
        assert [copy.source for copy in plan.copies] == [tables[2][1]] * 2
        assert [copy.target for copy in plan.copies] == [tables[0][1], tables[1][1]]
        assert len({table[0] for table in tables}) == 1
        assert engine.step().copies == []

    def test_the_first_is_the_answer_without_n_and_the_others_differ(self) -> None:
        engine = engine_with(request("alone", [5, 6, 7], max_tokens=12))
        engine.scheduler.add(request("many", [5, 6, 7], n=3, max_tokens=12))
        engine.drain()
        samples = [engine.output["many", index] for index in range(3)]
        assert samples[0] == engine.output["alone", 0]
        assert len({tuple(sample) for sample in samples}) == 3

    def test_one_that_ends_at_its_first_token_leaves_the_others_their_blocks(self) -> None:
        stop = answer_alone(request("a", 6, max_tokens=1), 0, 128)[0][0]
        req = request("a", 6, n=3, max_tokens=6, stop_token_ids=(stop,))
        engine = engine_with(req)
        engine.drain()
        assert [len(engine.output["a", index]) for index in range(3)] == [
            len(answer_alone(req, index, 128)[0]) for index in range(3)
        ]
        assert len(engine.output["a", 0]) == 1

    def test_a_sibling_alone_gives_way_where_the_pool_is_too_small_for_all(self) -> None:
        req = request("a", 6, n=3, max_tokens=9)
        engine = engine_with(req, num_blocks=4)
        engine.drain()
        assert engine.scheduler.counters.preemptions > 0
        for index in range(3):
            assert engine.output["a", index] == answer_alone(req, index, 128)[0]


class TestSeeds:
    def seeds(self, rng_seed: int, **params: object) -> list[int]:
        scheduler = Scheduler(limits(), rng=random.Random(rng_seed))
        scheduler.add(request("a", 4, **params))
        (samples,) = scheduler._samples.values()
        return [seq.seed for seq in samples]

    def test_a_given_seed_is_the_first_samples_seed_and_decides_the_others(self) -> None:
        first, second = self.seeds(1, seed=42, n=2), self.seeds(2, seed=42, n=2)
        assert first == second
        assert first[0] == 42 != first[1]

    def test_without_a_seed_the_injected_source_draws_one(self) -> None:
        assert self.seeds(1, seed=None) == self.seeds(1, seed=None) != self.seeds(2, seed=None)
        assert 0 <= self.seeds(1, seed=None)[0] < 2**63


class TestWhatCanBeSeen:
    def test_stats_tell_gauges_and_counters(self) -> None:
        engine = engine_with(request("a", 6, max_tokens=4), request("b", 6), max_running=1)
        engine.step()
        stats = engine.scheduler.stats()
        assert (stats.running, stats.waiting) == (1, 1)
        assert (stats.kv_blocks_total, stats.kv_blocks_held, stats.kv_blocks_cached) == (64, 2, 0)
        assert (stats.steps, stats.prompt_tokens, stats.output_tokens) == (1, 6, 1)
        assert (stats.block_size, stats.last_step_end) == (4, 1.25)

    def test_a_sequence_that_lost_a_block_is_noticed(self) -> None:
        engine = engine_with(request("a", 6))
        engine.step()
        engine.scheduler.running.first.block_table.pop()
        with pytest.raises(PoolCorrupted, match="has 1 references, but 0 live tables name it"):
            engine.scheduler.check_integrity()

    def test_a_sequence_that_vanished_is_noticed(self) -> None:
        engine = engine_with(request("a", 6))
        engine.scheduler.waiting.remove(engine.scheduler.waiting.first)
        with pytest.raises(PoolCorrupted, match="a/0 was accepted and is nowhere"):
            engine.scheduler.check_integrity()

    def test_a_block_indexed_before_it_is_full_is_noticed(self) -> None:
        engine = engine_with(request("a", 8), prefill_chunk=4)
        engine.step()
        (seq,) = engine.scheduler.running
        engine.scheduler.index.insert(seq.block_hashes[1], seq.block_table[1])
        with pytest.raises(PoolCorrupted, match="is indexed before it is full"):
            engine.scheduler.check_integrity()


def test_the_limits_name_the_longest_sequence_there_can_be() -> None:
    assert limits(max_context=100, num_blocks=10).context == 40
    assert limits(max_context=30, num_blocks=10).context == 30
