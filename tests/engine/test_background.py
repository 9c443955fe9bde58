"""Background requests: they run in the capacity that interactive traffic leaves, and delay no user."""

from __future__ import annotations

import random

import pytest

from ridgeline.engine.errors import QueueFull
from ridgeline.engine.schedule.request import BACKGROUND_PRIORITY, Request
from tests.engine.simulated_engine import answer_alone, engine_with, request, shape


def background(name: str, prompt: list[int] | int, **params: object) -> Request:
    return request(name, prompt, priority=BACKGROUND_PRIORITY, **params)


class TestGaps:
    def test_alone_background_has_the_whole_step(self) -> None:
        engine = engine_with(
            background("b", 30, max_tokens=4), background("c", 30, max_tokens=4), background_tokens=4
        )
        assert shape(engine.step()) == [("b/0", 0, 30), ("c/0", 0, 30)]

    def test_it_takes_no_part_in_a_step_that_computes_an_interactive_prompt(self) -> None:
        engine = engine_with(background("b", 4, max_tokens=40), prefill_chunk=6)
        engine.step()
        engine.scheduler.add(request("a", 10, max_tokens=4))
        assert shape(engine.step()) == [("a/0", 0, 6)]
        assert shape(engine.step()) == [("a/0", 6, 4)]
        assert shape(engine.step()) == [("a/0", 10, 1), ("b/0", 4, 1)]

    def test_beside_interactive_decodes_a_step_stays_a_short_one(self) -> None:
        engine = engine_with(
            request("a", 4, max_tokens=40), *(background(f"b{i}", 6) for i in range(3)), background_tokens=10
        )
        engine.step()
        assert shape(engine.step()) == [("a/0", 4, 1), ("b0/0", 0, 4)]
        assert shape(engine.step()) == [("a/0", 5, 1), ("b0/0", 4, 2), ("b1/0", 0, 2)]
        assert all(engine.step().num_tokens <= 5 for _ in range(20))

    def test_as_many_interactive_decodes_as_a_short_step_has_leave_nothing(self) -> None:
        engine = engine_with(
            *(request(f"a{i}", 2, max_tokens=20) for i in range(4)), background("b", 4), background_tokens=4
        )
        engine.step()
        assert shape(engine.step()) == [(f"a{i}/0", 2, 1) for i in range(4)]

    def test_steps_stay_short_until_interactive_requests_have_been_gone_for_a_while(self) -> None:
        engine = engine_with(
            request("a", 4, max_tokens=1), background("b", 60), background_tokens=4, background_quiet_s=5.0
        )
        engine.step()  # each takes 1.25 s
        counts = [engine.step().num_tokens for _ in range(5)]
        assert counts == [4, 4, 4, 4, 44]

    def test_an_interactive_request_is_admitted_first_whenever_it_came(self) -> None:
        engine = engine_with(background("b", 4), max_running=1)
        engine.scheduler.add(request("a", 4, arrival=99.0, max_tokens=1))
        assert shape(engine.step()) == [("a/0", 0, 4)]


class TestGivingWay:
    def test_without_a_place_the_latest_background_sequence_gives_way_at_once(self) -> None:
        engine = engine_with(
            *(background(f"b{i}", 4, arrival=float(i), max_tokens=9) for i in range(3)), max_running=3
        )
        engine.step()
        engine.scheduler.add(request("a", 4, arrival=9.0, max_tokens=3))
        plan = engine.step()
        assert ([seq.name for seq in plan.preempted], shape(plan)) == (["b2/0"], [("a/0", 0, 4)])
        engine.drain()
        assert engine.output["b2", 0] == answer_alone(background("b2", 4, max_tokens=9), 0, 128)[0]

    def test_as_many_places_as_a_request_has_samples(self) -> None:
        engine = engine_with(
            *(background(f"b{i}", 4, arrival=float(i), max_tokens=9) for i in range(4)), max_running=4
        )
        engine.step()
        engine.scheduler.add(request("a", 4, n=3, max_tokens=3))
        assert [seq.name for seq in engine.step().preempted] == ["b3/0", "b2/0", "b1/0"]

    def test_blocks_are_taken_from_background_and_no_more_than_needed(self) -> None:
        engine = engine_with(
            *(background(f"b{i}", 8, arrival=float(i), max_tokens=8) for i in range(3)), num_blocks=12
        )
        engine.step()
        assert engine.scheduler.pool.num_held == 6
        engine.scheduler.add(request("a", 28, max_tokens=4))
        plan = engine.step()
        assert ([seq.name for seq in plan.preempted], shape(plan)) == (["b2/0"], [("a/0", 0, 28)])

    def test_the_forecast_for_interactive_requests_is_made_without_background(self) -> None:
        """To the end both would need more blocks than there are; only the interactive one counts."""
        engine = engine_with(background("b", 8, max_tokens=60), num_blocks=20)
        engine.step()
        engine.scheduler.add(request("a", 8, max_tokens=60))
        plan = engine.step()
        assert (plan.preempted, shape(plan)) == ([], [("a/0", 0, 8)])
        engine.drain()
        assert engine.final["a", 0].timing.preemptions == 0  # type: ignore[union-attr]
        assert engine.final["b", 0].timing.preemptions > 0  # type: ignore[union-attr]

    @pytest.mark.parametrize("lookahead", [1, 2])
    def test_in_flight_it_gives_way_when_its_step_has_landed(self, lookahead: int) -> None:
        engine = engine_with(background("b", 4, max_tokens=40), max_running=1, lookahead=lookahead)
        engine.step()
        engine.scheduler.add(request("a", 4, max_tokens=2))
        assert shape(engine.launch()) == []  # b is being computed, and not planned further
        engine.land()
        plan = engine.launch()
        assert ([seq.name for seq in plan.preempted], shape(plan)) == (["b/0"], [("a/0", 0, 4)])
        engine.drain()

    def test_nobody_waits_for_a_prefix_that_background_computes(self) -> None:
        engine = engine_with(
            background("b", [1] * 40), prefill_chunk=8, awaited_tokens=4, background_tokens=4
        )
        engine.step()
        engine.scheduler.add(request("a", [1] * 40, max_tokens=2))
        assert shape(engine.step())[0][0] == "a/0"

    def test_after_a_lack_of_memory_what_was_left_running_goes_on_though_somebody_waits(self) -> None:
        engine = engine_with(*(background(f"b{i}", 4, arrival=float(i), max_tokens=6) for i in range(4)))
        engine.launch()
        engine.in_flight.clear()
        engine.scheduler.shed(engine.now)
        engine.scheduler.add(request("a", 4, max_tokens=2))
        plan = engine.scheduler.schedule(engine.now)
        assert [row.seq.name for row in plan.rows] == ["b0/0", "b1/0"]


class TestQueues:
    def test_each_class_fills_its_own_queue_alone(self) -> None:
        engine = engine_with(*(background(f"b{i}", 4) for i in range(2)), max_waiting=2)
        engine.scheduler.add(request("a0", 4))
        engine.scheduler.add(request("a1", 4))
        with pytest.raises(QueueFull, match="2 requests waiting"):
            engine.scheduler.add(request("a2", 4))
        with pytest.raises(QueueFull, match="2 requests waiting"):
            engine.scheduler.add(background("b2", 4))

    def test_a_priority_below_the_line_is_interactive_however_low(self) -> None:
        engine = engine_with(
            request("a", 4, priority=BACKGROUND_PRIORITY - 1, max_tokens=9), background("b", 4)
        )
        assert shape(engine.step()) == [("a/0", 0, 4)]


class TestInterference:
    """In virtual time: a step has a fixed cost and a cost per token, as on a small processor."""

    FIXED_S, PER_TOKEN_S = 0.0025, 0.0005

    def play(self, with_background: bool) -> tuple[list[float], int]:
        """Times to first token of interactive requests, and background requests that ended meanwhile."""
        dice = random.Random(5)
        engine = engine_with(
            step_tokens=256,
            prefill_chunk=256,
            max_running=32,
            max_waiting=64,
            num_blocks=4000,
            max_context=600,
        )
        scheduler, waiting, ttft_s = engine.scheduler, dict[str, float](), list[float]()
        now, next_at, asked, serial, ended = 0.0, 0.5, 0, 0, 0
        while now < 60.0:
            while next_at <= now:
                asked += 1
                waiting[f"a{asked}"] = next_at
                scheduler.add(request(f"a{asked}", dice.randint(20, 300), arrival=next_at, max_tokens=20))
                next_at += dice.expovariate(3.0)
            while with_background and len(scheduler.waiting.background) < 32:
                serial += 1
                scheduler.add(background(f"b{serial}", 30 + serial % 90, max_tokens=1 + serial % 16))
            plan = scheduler.schedule(now)
            if not plan:
                now = next_at
                continue
            now += self.FIXED_S + self.PER_TOKEN_S * plan.num_tokens
            tables = [list(row.seq.block_table) for row in plan.rows]
            for delta in scheduler.apply(engine._execute(plan, tables), now):
                if delta.request_id in waiting:  # only the first token counts
                    ttft_s.append(now - waiting.pop(delta.request_id))
                ended += delta.finish_reason is not None and delta.request_id.startswith("b")
        return sorted(ttft_s), ended

    def test_the_slowest_first_tokens_hardly_come_later_beside_a_batch(self) -> None:
        alone, _ = self.play(with_background=False)
        beside, ended = self.play(with_background=True)
        assert len(alone) == len(beside) > 150
        for share in (0.5, 0.99):
            place = int(share * len(alone))
            assert beside[place] <= 1.3 * alone[place]
        assert ended > 300  # in a minute, beside three interactive requests a second
