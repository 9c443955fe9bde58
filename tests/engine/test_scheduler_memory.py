"""The scheduler where KV blocks are scarce or shared: prefix cache, admission by forecast, preemption."""

from __future__ import annotations

from tests.engine.simulated_engine import (
    SimulatedEngine,
    answer_alone,
    engine_with,
    request,
    shape,
)


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

    def test_a_miss_is_told_apart_by_what_was_evicted(self) -> None:
        engine = engine_with(num_blocks=4)
        engine.scheduler.index.evicted = {}
        assert self.ask(engine, "a", list(self.PROMPT)) == 0
        assert engine.scheduler.stats().prefix_evicted == 0  # new
        self.ask(engine, "b", list(range(50, 63)))
        assert self.ask(engine, "c", list(self.PROMPT)) == 0
        assert engine.scheduler.stats().prefix_evicted == 8  # the ninth token fills no block
        assert self.ask(engine, "d", [*self.PROMPT, 10]) == 8
        assert engine.scheduler.stats().prefix_evicted == 8

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
