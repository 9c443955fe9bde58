"""The scheduler as a specification, one small scene per promise. Block size 4 unless said."""

from __future__ import annotations

import random

import pytest

from ridgeline.engine.errors import InvalidRequest, QueueFull
from ridgeline.engine.kv.block_pool import PoolCorrupted
from ridgeline.engine.schedule.request import FinishReason
from ridgeline.engine.schedule.scheduler import Scheduler
from ridgeline.engine.schedule.step import StepResult
from tests.engine.simulated_engine import (
    EOS,
    VOCAB,
    answer_alone,
    engine_with,
    limits,
    request,
    shape,
)


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
        assert engine.scheduler.stats().prefill_tokens == 6  # computed all the same

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
        waits = engine.launch()  # old needs a block, and new, the victim, is being computed
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
        (samples,) = scheduler._sequences.samples.values()
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
        assert stats.prefill_tokens == 6
        assert stats.busy_s > 0

    def test_a_sequence_that_lost_a_block_is_noticed(self) -> None:
        engine = engine_with(request("a", 6))
        engine.step()
        engine.scheduler.running.first.block_table.pop()
        with pytest.raises(PoolCorrupted, match="has 1 references, but 0 live tables name it"):
            engine.scheduler.check_integrity()

    def test_a_sequence_that_vanished_is_noticed(self) -> None:
        engine = engine_with(request("a", 6))
        engine.scheduler.waiting.remove(engine.scheduler.waiting.first)
        with pytest.raises(PoolCorrupted, match="a/0 was accepted but is not in any list"):
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
