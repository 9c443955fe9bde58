"""The gateway books what a hosted upstream may bill, also where its answer never said what it used."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from ridgeline.gateway.accounting import token_formula
from ridgeline.gateway.offload.offload import LARGE, PROCESSES
from ridgeline.gateway.tenants.keys import Limits
from tests.gateway.mock_upstream import MockUpstream
from tests.gateway.scripted_upstream import Answer, Asked, ScriptedUpstream, always, whole
from tests.gateway.stage import CHAT, Staged, asking, staged
from tests.gateway.test_endings import HEAD, chunk, event
from tests.gateway.test_processes import Gateway, streamed
from tests.gateway.test_trust import ANSWER, scripted
from tests.gateway.waiting import until
from tests.patience import PATIENCE_S

PRICED = [{"name": "*", "targets": ("up/*",), "price_in": 1.0, "price_out": 2.0}]


@contextlib.asynccontextmanager
async def hosted(tmp_path: Path, kind: str = "openai", **upstream: Any) -> Any:
    """A gateway before the mock as a hosted upstream, which cannot be asked for a request's usage."""
    mock = await MockUpstream().start()
    up = {"name": "up", "kind": kind, "url": mock.url, "probe_s": 0.0, **upstream}
    async with staged(tmp_path, {"upstreams": [up], "models": PRICED}) as stage:
        yield stage, mock
    await mock.stop()


async def leave_in_a_stream(stage: Staged, model: str, **fields: Any) -> None:
    async with stage.http.stream("POST", CHAT, json=asking(model, stream=True, **fields)) as answer:
        async for line in answer.aiter_lines():
            if "river" in line:
                return


async def leave_a_whole_answer(stage: Staged, mock: MockUpstream, model: str) -> None:
    asked = asyncio.create_task(stage.http.post(CHAT, json=asking(model)))
    await until(lambda: mock.running > 0)
    asked.cancel()


async def test_a_stream_that_its_client_left_is_read_on_for_its_usage(tmp_path: Path) -> None:
    async with hosted(tmp_path) as (stage, mock):
        await leave_in_a_stream(stage, "mock_out60_pace10_cached1")
        (row,) = await stage.rows(1)
        (book,) = mock.books.values()
        assert (row["outcome"], row["status"], row["usage_source"]) == ("client_gone", 499, "reported")
        assert (row["tokens_in"], row["tokens_out"], row["tokens_cached"]) == (book.tokens_in, 60, 1)
        assert (book.status, stage.parts.upstreams.snapshot()[0].inflight) == ("finished", 0)


async def test_a_whole_answer_that_its_client_left_is_read_for_its_usage(tmp_path: Path) -> None:
    async with hosted(tmp_path) as (stage, mock):
        await leave_a_whole_answer(stage, mock, "mock_out12_late1000")
        (row,) = await stage.rows(1)
        (book,) = mock.books.values()
        assert (row["outcome"], row["usage_source"]) == ("client_gone", "reported")
        assert (row["tokens_in"], row["tokens_out"]) == (book.tokens_in, 12)


async def test_an_upstream_that_is_not_read_on_is_closed_and_its_row_is_an_estimate(tmp_path: Path) -> None:
    async with hosted(tmp_path, read_on_s=0.0) as (stage, mock):
        await leave_in_a_stream(stage, "mock_out1000_pace10")
        (row,) = await stage.rows(1)
        (book,) = mock.books.values()
        await until(lambda: book.status == "aborted")  # it learns of the closed connection after the row
        assert (row["outcome"], row["usage_source"]) == ("client_gone", "estimated")
        assert row["tokens_in"] >= book.tokens_in > 0
        assert 0 < row["tokens_out"] < 1000
        assert row["cost_pusd"] == row["tokens_in"] * 10**6 + row["tokens_out"] * 2 * 10**6


async def test_reading_on_ends_after_its_time_and_what_came_of_it_is_marked(tmp_path: Path) -> None:
    async with hosted(tmp_path, read_on_s=0.2) as (stage, mock):
        await leave_a_whole_answer(stage, mock, "mock_out12_late60000")
        (row,) = await stage.rows(1)
        assert (row["outcome"], row["usage_source"]) == ("client_gone", "estimated")
        await until(lambda: mock.running == 0)
        assert row["tokens_in"] > 0
        assert row["tokens_out"] >= 20  # 100 a second for 0.2 s


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["openai", "anthropic"])
async def test_an_answer_without_usage_is_estimated_and_marked(
    tmp_path: Path, kind: str, stream: bool
) -> None:
    async with hosted(tmp_path, kind) as (stage, mock):
        answer = await stage.http.post(CHAT, json=asking("mock_out20_silent", stream=stream, max_tokens=99))
        assert answer.status_code == 200
        (row,) = await stage.rows(1)
        (book,) = mock.books.values()
        assert (row["outcome"], row["usage_source"]) == ("ok", "estimated")
        assert row["tokens_in"] >= book.tokens_in
        assert 20 <= row["tokens_out"] <= 40
        assert row["cost_pusd"] > 0


async def test_an_embedding_without_usage_is_estimated_by_its_input_alone(tmp_path: Path) -> None:
    async with hosted(tmp_path) as (stage, _):
        await stage.http.post(
            "/v1/embeddings", json={"model": "mock_silent", "input": "five words of some text"}
        )
        (row,) = await stage.rows(1)
        assert (row["usage_source"], row["tokens_out"]) == ("estimated", 0)
        assert 5 <= row["tokens_in"] <= 10


async def test_a_stream_that_broke_off_is_booked_with_its_input(tmp_path: Path) -> None:
    async with hosted(tmp_path) as (stage, mock):
        await stage.http.post(CHAT, json=asking("mock_out9_cut4", stream=True))
        (row,) = await stage.rows(1)
        (book,) = mock.books.values()
        assert (row["outcome"], row["usage_source"]) == ("upstream_failed", "estimated")
        assert row["tokens_in"] >= book.tokens_in
        assert row["tokens_out"] >= 4


async def test_the_gateways_own_embeddings_at_a_hosted_upstream_have_their_rows(tmp_path: Path) -> None:
    mock = await MockUpstream().start()
    values = {
        "upstreams": [{"name": "up", "kind": "openai", "url": mock.url, "probe_s": 0.0}],
        "models": PRICED,
        "embeddings": {"upstream": "up", "model": "vectors", "timeout_ms": 60_000.0},
    }
    async with staged(tmp_path, values, {"cache": "semantic"}) as stage:
        await stage.http.post(CHAT, json=asking("mock_out2", temperature=0))
        await until(lambda: len(stage.written_rows()) == 2)
        own, asked = sorted(stage.written_rows(), key=lambda row: row["key_id"] != "gateway")
        assert (own["key_id"], own["endpoint"], own["upstream_model"]) == ("gateway", "embeddings", "vectors")
        assert (own["usage_source"], own["cost_pusd"]) == ("reported", own["tokens_in"] * 10**6)
        assert asked["usage_source"] == "reported"
        assert sum(book.tokens_in for book in mock.books.values()) > 0
    await mock.stop()


async def test_the_usage_of_an_answer_that_cannot_be_translated_is_booked(tmp_path: Path) -> None:
    used = {"input_tokens": 7, "output_tokens": 3}
    broken = {"type": "message", "content": [{"type": "text", "text": 5}], "usage": used}
    async with ScriptedUpstream(always(200, broken)) as upstream:
        up = {"name": "up", "kind": "anthropic", "url": upstream.url, "probe_s": 0.0}
        async with staged(tmp_path, {"upstreams": [up], "models": PRICED}) as stage:
            refused = await stage.http.post(CHAT, json=asking("m", max_tokens=9))
            assert refused.status_code == 502
            (row,) = await stage.rows(1)
            assert (row["usage_source"], row["tokens_in"], row["tokens_out"]) == ("reported", 7, 3)


async def test_a_large_answer_whose_client_leaves_while_it_is_read_is_estimated_and_marked(
    tmp_path: Path,
) -> None:
    async def answer(_: Asked, writer: asyncio.StreamWriter) -> None:
        for process in stage.parts.offload._alive:  # nothing is read until the client has left
            process.send_signal(signal.SIGSTOP)
        message = {"role": "assistant", "content": "word " * 20_000}
        writer.write(whole(200, {"id": "x", "choices": [{"message": message}]}))

    async with ScriptedUpstream(answer) as upstream:
        up = {"name": "up", "kind": "openai", "url": upstream.url, "probe_s": 0.0, "read_on_s": 0.0}
        async with staged(tmp_path, {"upstreams": [up], "models": PRICED}) as stage:
            offload = stage.parts.offload
            offload.start()
            await until(lambda: len(offload._idle) == PROCESSES)
            request = asyncio.create_task(stage.http.post(CHAT, json=asking()))
            await until(lambda: bool(offload._busy))
            request.cancel()
            (row,) = await stage.rows(1)
            assert (row["outcome"], row["usage_source"]) == ("client_gone", "estimated")
            assert row["tokens_in"] > 0
            assert 20_000 <= row["tokens_out"] <= 40_000


async def test_a_large_answer_without_usage_is_weighed_in_small_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def watch(name: str) -> None:
        real = getattr(token_formula, name)

        def watched(text: bytes) -> Any:
            sizes.append(len(text))
            return real(text)

        monkeypatch.setattr(token_formula, name, watched)

    watch("weight")
    watch("texts_of")
    message = {"role": "assistant", "content": "wörd " * 200_000}
    answer = always(200, {"choices": [{"message": message}]})
    async with scripted(tmp_path, answer, models=PRICED) as (stage, _):
        assert (await stage.http.post(CHAT, json=asking("m"))).status_code == 200
        (row,) = await stage.rows(1)
    assert row["usage_source"] == "estimated"
    assert 200_000 <= row["tokens_out"] <= 400_000
    assert max(sizes) <= LARGE


class Hosted(Gateway):
    """As processes, before an upstream that cannot be asked for a request's usage."""

    def write_config(self, *lines: str, model: str = "*", target: str = "mock/*") -> None:
        super().write_config(*lines, model=model, target=target)
        self.config.write_text(self.config.read_text().replace('kind = "ridgeline"', 'kind = "openai"'))


def test_a_hosted_request_that_died_with_its_gateway_is_estimated_and_marked(tmp_path: Path) -> None:
    gateway = Hosted(tmp_path)
    try:
        lines: list[str] = []
        thread = streamed(gateway.client(), "mock_out20000_pace20", lines)
        begun, late = time.time(), time.monotonic() + PATIENCE_S
        while not any(one.stat().st_mtime > begun + 0.2 for one in tmp_path.glob("state/ledger/*/lock")):
            assert time.monotonic() < late  # it is known to have lived for a while
            time.sleep(0.05)
        pid = gateway.process.pid
        for one in (pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())):
            os.kill(one, signal.SIGKILL)
        thread.join(PATIENCE_S)
        gateway.process.wait()
        gateway.start()
        late = time.monotonic() + PATIENCE_S
        while "lost" not in (rows := {row["group"]["outcome"]: row for row in gateway.usage()["data"]}):
            assert time.monotonic() < late
            time.sleep(0.1)
        lost = rows["lost"]
        assert (lost["requests"], lost["estimated"]) == (1, 1)
        assert lost["tokens_in"] >= next(iter(gateway.books().values()))["tokens_in"] > 0
        assert lost["tokens_out"] > 0
    finally:
        gateway.end()


async def test_nothing_is_sent_again_for_a_client_that_has_left(tmp_path: Path) -> None:
    asked = asyncio.Event()
    left = asyncio.Event()

    async def answer(_: Asked, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await left.wait()
        writer.write(whole(500, {"error": {"message": "no"}}))

    async with scripted(tmp_path, answer) as (stage, upstream):
        request = asyncio.create_task(stage.http.post(CHAT, json=asking()))
        await asked.wait()
        request.cancel()
        await until(lambda: any(one.gone for one in stage.parts.deadlines.live))
        left.set()
        (row,) = await stage.rows(1)
        assert (row["outcome"], row["usage_source"], len(upstream.asked)) == ("client_gone", "none", 1)


def resets_first() -> Answer:
    """Takes the first request and closes without an answer; then answers."""
    seen = []

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        seen.append(asked)
        if len(seen) == 1:
            writer.close()
        else:
            writer.write(whole(200, ANSWER))

    return answer


async def test_an_attempt_that_may_have_been_computed_has_a_row_of_its_own(tmp_path: Path) -> None:
    async with scripted(tmp_path, resets_first(), models=PRICED) as (stage, upstream):
        assert (await stage.http.post(CHAT, json=asking("m", max_tokens=7))).status_code == 200
        assert len(upstream.asked) == 2
        own, lost = sorted(await stage.rows(2), key=lambda row: len(row["request_id"]))
        assert (own["outcome"], own["usage_source"], own["attempts"]) == ("ok", "reported", 2)
        assert lost["request_id"] == own["request_id"] + ".1"
        assert (lost["outcome"], lost["error_code"], lost["usage_source"]) == (
            "upstream_failed",
            "reset",
            "estimated",
        )
        assert lost["tokens_in"] > 0
        assert lost["tokens_out"] <= 7
        assert lost["cost_pusd"] > 0


async def test_a_request_whose_only_attempt_gave_no_answer_is_estimated_in_its_own_row(
    tmp_path: Path,
) -> None:
    async def close(_: Asked, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with scripted(tmp_path, close, models=PRICED, retries={"retries": 0}) as (stage, _):
        assert (await stage.http.post(CHAT, json=asking("m"))).status_code == 502
        (row,) = await stage.rows(1)
        assert (row["outcome"], row["usage_source"]) == ("upstream_failed", "estimated")
        assert row["tokens_in"] > 0


async def test_an_attempt_that_was_refused_or_never_sent_costs_nothing(tmp_path: Path) -> None:
    async with hosted(tmp_path) as (stage, _):
        assert (await stage.http.post(CHAT, json=asking("mock_fail503"))).status_code == 502
        (row,) = await stage.rows(1)
        assert (row["attempts"], row["usage_source"], row["cost_pusd"]) == (3, "none", 0)


async def test_a_request_whose_key_a_ridgeline_server_refused_costs_nothing(tmp_path: Path) -> None:
    """The server also refuses the question about the request's usage."""
    async with ScriptedUpstream(always(401, {"error": {"message": "no API key was given"}})) as upstream:
        up = {"name": "up", "kind": "ridgeline", "url": upstream.url, "probe_s": 0.0}
        async with staged(tmp_path, {"upstreams": [up], "models": PRICED}) as stage:
            answer = await stage.http.post(CHAT, json=asking("m"))
            assert answer.json()["error"]["code"] == "upstream_credentials_exhausted"
            (row,) = await stage.rows(1)
            assert (row["outcome"], row["usage_source"], row["cost_pusd"]) == ("upstream_failed", "none", 0)
            assert [one.path for one in upstream.asked] == [CHAT]


@pytest.mark.parametrize("winner", ["first", "second"])
async def test_a_hedge_that_lost_has_a_row_of_its_own(tmp_path: Path, winner: str) -> None:
    second_asked = asyncio.Event()
    never = asyncio.Event()

    async def first(_: Asked, writer: asyncio.StreamWriter) -> None:
        await (second_asked if winner == "first" else never).wait()
        writer.write(whole(200, ANSWER))

    async def second(_: Asked, writer: asyncio.StreamWriter) -> None:
        second_asked.set()
        if winner == "first":
            await never.wait()
        writer.write(whole(200, ANSWER))

    async with ScriptedUpstream(first) as one, ScriptedUpstream(second) as two:
        ups = [
            {"name": name, "kind": "openai", "url": up.url, "probe_s": 0.0}
            for name, up in (("one", one), ("two", two))
        ]
        models = [
            {
                "name": "m",
                "targets": ("one/m", "two/m"),
                "hedge_after_ms": 20.0,
                "price_in": 1.0,
                "price_out": 2.0,
            }
        ]
        async with staged(tmp_path, {"upstreams": ups, "models": models}) as stage:
            assert (await stage.http.post(CHAT, json=asking("m"))).status_code == 200
            own, lost = sorted(await stage.rows(2), key=lambda row: len(row["request_id"]))
            assert own["usage_source"] == "reported"
            assert own["upstream"] == ("one" if winner == "first" else "two")
            assert lost["request_id"] == own["request_id"] + ".2"
            assert lost["upstream"] == ("two" if winner == "first" else "one")
            assert (lost["usage_source"], lost["tokens_in"] > 0) == ("estimated", True)
            assert not stage.parts.ledger._journal.unfinished


async def test_estimates_count_against_limits(tmp_path: Path) -> None:
    mock = await MockUpstream().start()
    up = {"name": "up", "kind": "openai", "url": mock.url, "probe_s": 0.0}
    key = {"limits": Limits(tokens_per_minute=1000)}
    async with staged(tmp_path, {"upstreams": [up], "models": PRICED}, key) as stage:
        body = asking("mock_out100_silent", max_tokens=100)
        assert (await stage.http.post(CHAT, json=body)).status_code == 200
        (row,) = await stage.rows(1)
        left = int((await stage.http.post(CHAT, json=body)).headers["x-ratelimit-remaining-tokens"])
        assert row["tokens_in"] + row["tokens_out"] > 100
        assert left < 1000 - row["tokens_in"] - row["tokens_out"]
    await mock.stop()


def save_tokenizer_of_words(folder: Path) -> None:
    words = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(folder / "tokenizer.json"))


async def test_a_large_request_is_counted_in_another_process_and_its_bytes_are_held_until_then(
    tmp_path: Path,
) -> None:
    save_tokenizer_of_words(tmp_path)

    async def answer(_: Asked, writer: asyncio.StreamWriter) -> None:
        for process in offload._alive:  # nothing is counted until the test goes on
            process.send_signal(signal.SIGSTOP)
        message = {"role": "assistant", "content": "one two three"}
        writer.write(whole(200, {"id": "x", "choices": [{"message": message}]}))

    models_ = [{"name": "m", "targets": ("up/m",), "tokenizer": tmp_path}]
    async with scripted(tmp_path, answer, models=models_) as (stage, _):
        offload, held = stage.parts.offload, stage.parts.body_bytes
        offload.start()
        await until(lambda: len(offload._idle) == PROCESSES)
        messages = [{"role": "user", "content": "word " * 20_000}]
        assert (await stage.http.post(CHAT, json={"model": "m", "messages": messages})).status_code == 200
        try:
            await until(lambda: bool(offload._busy))
            assert held.total > 100_000
        finally:
            for process in offload._alive:
                process.send_signal(signal.SIGCONT)
        (row,) = await stage.rows(1)
        assert (row["usage_source"], row["tokens_in"], row["tokens_out"]) == ("estimated", 20_000 + 4, 3)
        await until(lambda: held.total == 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_model_s_own_tokenizer_counts_where_it_is_named(tmp_path: Path, stream: bool) -> None:
    save_tokenizer_of_words(tmp_path)

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        if stream:
            writer.write(HEAD + chunk(event("one two") + event(" three") + "data: [DONE]\n\n") + b"0\r\n\r\n")
        else:
            message = {"role": "assistant", "content": "one two three"}
            writer.write(whole(200, {"id": "x", "choices": [{"message": message}]}))

    models_ = [{"name": "m", "targets": ("up/m",), "tokenizer": tmp_path}]
    async with scripted(tmp_path, answer, models=models_) as (stage, _):
        messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "count to\nthree"}]
        await stage.http.post(CHAT, json={"model": "m", "messages": messages, "stream": stream})
        (row,) = await stage.rows(1)
        assert (row["usage_source"], row["tokens_in"], row["tokens_out"]) == ("estimated", 5 + 2 * 4, 3)
