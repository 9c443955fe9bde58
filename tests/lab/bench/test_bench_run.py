"""Whole runs: against servers that misbehave, and against a real one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from ridgeline.lab.bench.config import BenchConfig, ClosedLoop, OpenLoop, RequestDeadlines
from ridgeline.lab.bench.figures.metrics import flat
from ridgeline.lab.bench.figures.record import RequestRecord
from ridgeline.lab.bench.figures.result import BenchResult
from ridgeline.lab.bench.reports.text_summary import text_of
from ridgeline.lab.bench.run import in_loop, run_bench
from ridgeline.lab.errors import BadInput
from ridgeline.lab.slo import parse_slo
from ridgeline.lab.traffic.request import PlannedRequest, Traffic
from ridgeline.lab.traffic.source import TrafficOptions, build_traffic
from ridgeline.lab.traffic.vocabulary import Vocabulary
from tests.conftest import LiveServer
from tests.lab.bench.faulty_server import HEAD, Behaviour, Call, faulty_server

WORDS = Vocabulary(tuple(f"w{n}" for n in range(32)), tuple(range(32)), "tokenizer")


def traffic(*moments: float) -> Traffic:
    return Traffic("test", tuple(PlannedRequest(at, 4, 3) for at in moments))


def at_once(count: int) -> Traffic:
    return traffic(*[0.0] * count)


def config(url: str, sent: Traffic, mode: ClosedLoop | OpenLoop, **more: Any) -> BenchConfig:
    return BenchConfig(url, sent, mode, vocabulary=WORDS, **more)


async def ran(behave: Behaviour, sent: Traffic, mode: ClosedLoop | OpenLoop, **more: Any) -> BenchResult:
    async with faulty_server(behave) as (_, server):
        return await run_bench(config(server.url, sent, mode, **more))


async def good(call: Call) -> None:
    await call.answer(call.body["max_tokens"])


async def slow(call: Call) -> None:
    await asyncio.sleep(0.05)
    await call.answer(3)


def sent_at(record: RequestRecord) -> float:
    assert record.t_send is not None
    return record.t_send


# ── closed loops ──


async def test_a_closed_loop_keeps_exactly_its_concurrency_under_way() -> None:
    async with faulty_server(slow) as (_, server):
        result = await run_bench(config(server.url, at_once(20), ClosedLoop(4)))
        assert (server.peak, server.calls) == (4, 20)
    named = flat(result.summary)
    assert named["concurrency_peak"] == 4
    assert result.summary.ok == 20


async def test_a_slot_is_due_again_when_its_answer_has_ended() -> None:
    result = await ran(slow, at_once(4), ClosedLoop(1))
    for before, after in zip(result.records, result.records[1:], strict=False):
        assert after.t_sched == before.t_end


async def test_a_failed_request_frees_its_slot() -> None:
    async def every_other(call: Call) -> None:
        await (good(call) if call.number % 2 else call.reply(503, b'{"error":{"message":"full"}}'))

    result = await ran(every_other, at_once(10), ClosedLoop(2))
    assert (result.summary.ok, result.summary.causes) == (5, {"http_503": 5})


async def test_nothing_is_sent_after_the_runs_duration_and_what_is_under_way_is_awaited() -> None:
    result = await ran(slow, at_once(500), ClosedLoop(2), duration_s=0.3)
    assert 2 <= result.summary.ok < 40
    assert result.summary.failed == result.summary.cancelled == 0


# ── open loops ──


async def test_an_open_loop_keeps_to_its_moments_though_the_server_stalls() -> None:
    all_came = asyncio.Event()

    async def stall(call: Call) -> None:
        if call.number == len(moments) - 1:
            all_came.set()
        await all_came.wait()
        await call.answer(3)

    moments = [0.0, 0.05, 0.1, 0.3, 0.31, 0.4]
    async with faulty_server(stall) as (_, server):
        result = await run_bench(config(server.url, traffic(*moments), OpenLoop()))
        assert server.peak == 6  # all under way before the first had ended
    assert [record.t_sched for record in result.records] == pytest.approx(moments)
    first_end = min(record.t_end or 0 for record in result.records)
    assert all(sent_at(record) < first_end for record in result.records)
    assert result.summary.headline[0] == "ttft_sched_ms"


async def test_a_cap_holds_an_open_loop_back_and_the_wait_counts_from_the_planned_moment() -> None:
    async def slower(call: Call) -> None:
        await asyncio.sleep(0.3)
        await call.answer(3)

    async with faulty_server(slower) as (_, server):
        result = await run_bench(config(server.url, at_once(6), OpenLoop(max_concurrency=2)))
        assert (server.peak, server.calls) == (2, 6)
    late = sorted(result.records, key=sent_at)[-1]
    assert late.t_sched == 0.0
    assert late.held_s == pytest.approx(sent_at(late), abs=0.3)  # it waited for room, not for the client
    assert late.held_s > 0.59  # for two answers of 300 ms each
    assert result.validity.client_delay_p99_ms is not None
    assert result.validity.client_delay_p99_ms < 500
    assert "at most 2 in flight" in text_of(result)


async def test_prompts_of_the_users_own_are_sent_as_they_are(tmp_path: Path) -> None:
    lines = [
        {"prompt": "Which river is longest?", "max_tokens": 5},
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]},
    ]
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    sent = build_traffic(TrafficOptions(traffic=f"prompts:{file}", output="3"))
    bodies: list[dict[str, Any]] = []

    async def keep(call: Call) -> None:
        bodies.append(call.body)
        await call.answer(call.body["max_tokens"])

    chat = Vocabulary(WORDS.words, (), "tokenizer", chat_overhead=4)
    async with faulty_server(keep) as (_, server):
        asked = BenchConfig(server.url, sent, ClosedLoop(1), api="chat", vocabulary=chat, warmup=1)
        result = await run_bench(asked)
    warm, first, second = bodies[-3:]
    assert "river" not in str(warm)  # the words of a warm-up prime no cache
    assert first["messages"] == [{"role": "user", "content": "Which river is longest?"}]
    assert second["messages"] == lines[1]["messages"]
    assert (first["max_tokens"], second["max_tokens"]) == (5, 3)
    assert result.summary.ok == 2
    assert not any("another length" in note for note in result.summary.notes)
    with pytest.raises(BadInput, match="give --api chat"):
        await ran(good, sent, ClosedLoop(1))


async def test_a_server_that_hangs_never_hangs_the_run() -> None:
    async def hang(call: Call) -> None:
        await asyncio.sleep(600)

    short = RequestDeadlines(first_byte_s=0.2)
    result = await ran(hang, traffic(0.0, 0.05, 0.1), OpenLoop(), deadlines=short)
    assert result.summary.causes == {"first_byte_timeout": 3}
    assert not result.validity.valid
    assert "nothing to measure" in result.validity.reasons[0]


async def test_the_runs_own_deadline_ends_what_is_under_way_and_counts_it_as_failed() -> None:
    async def hang(call: Call) -> None:
        await asyncio.sleep(600)

    result = await ran(hang, traffic(0.0, 0.0, 600.0), OpenLoop(), deadlines=RequestDeadlines(run_s=0.4))
    assert result.summary.causes == {"run_timeout": 2}


async def test_a_server_that_dies_in_the_middle_of_a_run_is_counted_by_cause() -> None:
    async with faulty_server(good) as (_, server):

        async def dying(call: Call) -> None:
            if call.number < 3:
                await call.answer(3)
            else:
                call.reset()

        server.behave = dying
        result = await run_bench(config(server.url, at_once(8), ClosedLoop(1)))
    assert (result.summary.ok, result.summary.causes) == (3, {"reset": 5})
    assert result.validity.valid  # the server's fault, not the client's
    assert "5 of 8 requests failed" in " ".join(result.validity.warnings)


async def test_answers_without_usage_are_counted_by_a_tokenizer_where_there_is_one() -> None:
    async def uncounted(call: Call) -> None:
        await call.raw(HEAD)
        await call.events({"choices": [{"index": 0, "delta": {"reasoning_content": "so it is"}}]})
        await asyncio.sleep(0.03)
        await call.text("two words")
        await call.end()

    result = await ran(uncounted, at_once(2), ClosedLoop(1), count_tokens=lambda text: len(text.split()))
    for record in result.records:
        assert (record.n_out, record.counted_by, record.split_by) == (5, "tokenizer", "spread")
        assert sum(record.chunk_tokens) == 5
    assert "2 answers came without usage: their tokens are counted by" in text_of(result)


# ── warm-up, stops, files ──


async def test_warm_up_requests_come_first_with_words_of_their_own() -> None:
    prompts: list[Any] = []

    async def noted(call: Call) -> None:
        prompts.append(tuple(call.body["prompt"]))
        await call.answer(3)

    result = await ran(noted, at_once(5), ClosedLoop(2), warmup=3)
    assert (result.summary.warmup, result.summary.offered) == (3, 5)
    assert len(set(prompts)) == 8
    assert all(record.t_end is not None and record.t_end <= 0 for record in result.records if record.warmup)


async def test_a_primed_run_has_sent_every_prompt_before() -> None:
    prompts: list[Any] = []

    async def noted(call: Call) -> None:
        prompts.append((tuple(call.body["prompt"]), call.body["max_tokens"]))
        await call.answer(call.body["max_tokens"])

    result = await ran(noted, at_once(4), ClosedLoop(1), cache="primed")
    before, after = prompts[:4], prompts[4:]
    assert [words for words, _ in before] == [words for words, _ in after]
    assert {tokens for _, tokens in before} == {1}
    assert "primed" in result.settings["prefix_cache"]


async def test_the_same_seed_draws_the_same_words_unless_the_run_is_to_be_cold() -> None:
    prompts: list[Any] = []

    async def noted(call: Call) -> None:
        prompts.append(tuple(call.body["prompt"]))
        await call.answer(3)

    for cache, seed in (("as_is", 1), ("as_is", 1), ("as_is", 2), ("cold", 1)):
        await ran(noted, at_once(1), ClosedLoop(1), cache=cache, seed=seed)
    first, again, other, cold = prompts
    assert first == again
    assert len({first, other, cold}) == 3


async def test_turns_of_a_conversation_follow_their_answers_and_fail_with_them() -> None:
    def turns(conversation: int) -> list[PlannedRequest]:
        return [
            PlannedRequest(0.0, 4 + 7 * turn, 3, conversation=conversation, turn=turn, think_s=0.05)
            for turn in range(3)
        ]

    async def moody(call: Call) -> None:
        if call.number == 1:  # the second turn of the first one
            await call.reply(500, b"{}")
        else:
            await call.answer(3)

    sent = Traffic("talk", tuple(turns(0) + turns(1)))
    result = await ran(moody, sent, ClosedLoop(1))
    by_turn = {(record.conversation, record.turn): record for record in result.records}
    assert len(by_turn) == 6
    statuses = [record.status for record in result.records]
    assert statuses.count("failed") == 2
    assert result.summary.causes == {"http_500": 1, "earlier_turn": 1}  # the refused one and what hung on it
    ok = [by for by, record in by_turn.items() if record.status == "ok" and by[1] > 0]
    for conversation, turn in ok:
        before, record = by_turn[conversation, turn - 1], by_turn[conversation, turn]
        assert before.t_end is not None
        assert record.t_sched == pytest.approx(before.t_end + 0.05)


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_end_the_run_and_keep_what_was_measured(
    signal_number: signal.Signals, tmp_path: Path
) -> None:
    async def interrupted() -> BenchResult:
        async def first_ones(call: Call) -> None:
            if call.number == 5:
                os.kill(os.getpid(), signal_number)
            if call.number >= 3:
                await asyncio.sleep(600)
            await call.answer(3)

        async with faulty_server(first_ones) as (_, server):
            return await run_bench(config(server.url, at_once(100), ClosedLoop(3)))

    result = in_loop(interrupted())
    assert result.interrupted
    assert (result.summary.ok, result.summary.cancelled, result.summary.failed) == (3, 3, 0)
    result.save(tmp_path)
    assert BenchResult.load(tmp_path).summary.ok == 3
    assert "stopped early" in text_of(result)
    assert "STOPPED by the user" in text_of(result)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL  # a later one ends the program


async def test_a_run_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    async def half(call: Call) -> None:
        await (good(call) if call.number % 2 else call.reply(500, b"{}"))

    result = await ran(half, at_once(6), ClosedLoop(1), slo=parse_slo("ttft=1000"))
    assert flat(result.summary)["adj_ttft_ms.p90"] == float("inf")  # which JSON has no number for
    result.save(tmp_path)
    again = BenchResult.load(tmp_path)
    assert again == result


def test_a_broken_run_folder_is_refused_by_line(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"run\.json"):
        BenchResult.load(tmp_path)
    result = asyncio.run(ran(good, at_once(2), ClosedLoop(1)))
    result.save(tmp_path)
    with (tmp_path / "requests.jsonl").open("ab") as file:
        file.write(b'{"index": "one"}\n')
    with pytest.raises(BadInput, match="line 3"):
        BenchResult.load(tmp_path)


# ── a real server ──


def test_a_real_server_is_measured_in_both_loops_and_its_limits_stand_beside(
    live_server: LiveServer, tmp_path: Path
) -> None:
    sent = Traffic("real", tuple(PlannedRequest(0.1 * n, 40, 12) for n in range(12)))
    for mode, api in ((ClosedLoop(3), "completions"), (OpenLoop(), "chat")):
        asked = BenchConfig(live_server.base_url, sent, mode, api=api, warmup=2, slo=parse_slo("ttft=60000"))
        result = in_loop(run_bench(asked))
        assert (result.summary.ok, result.summary.causes) == (12, {})
        assert result.settings["server"] == "ridgeline"
        for record in result.records:
            assert (record.n_in, record.n_out, record.counted_by) == (40, 12, "usage")
            assert record.server is not None
        named = flat(result.summary)
        assert named["attainment"] == 1.0
        assert named["cache_hit"] is not None
        # By its own clock the server is never slower than it looks from outside.
        assert named["server_ttft_ms.p50"] <= named["ttft_ms.p50"]
        assert named["inference_ms.mean"] + named["outside_inference_ms.mean"] == pytest.approx(
            named["e2e_ms.mean"]
        )
        assert {share.name for share in result.shares} >= {"output_tokens_per_s", "computed_tokens_per_s"}
        assert "% of" in text_of(result)
        result.save(tmp_path / api)
        assert BenchResult.load(tmp_path / api) == result


async def test_a_stream_of_comments_keeps_no_run_alive_beyond_a_requests_deadline() -> None:
    async def drip(call: Call) -> None:
        await call.raw(HEAD)
        while True:
            await call.raw(b"4\r\n: .\n\r\n")
            await asyncio.sleep(0.05)

    result = await ran(drip, at_once(2), ClosedLoop(2), deadlines=RequestDeadlines(request_s=0.5))
    assert result.summary.causes == {"request_timeout": 2}
