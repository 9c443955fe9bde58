"""A request's whole way: key, limits, upstream, row. Whatever becomes of it, its row says so."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from ridgeline.gateway.pipeline import finishing
from ridgeline.gateway.tenants.keys import Limits
from tests.gateway.stage import CHAT, asking, staged
from tests.gateway.waiting import until
from tests.patience import PATIENCE_S


async def test_an_answer_is_the_upstreams_own_bytes_and_its_row_has_what_it_used(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        answer = await stage.http.post(CHAT, json=asking("mock_out5"))
        assert answer.status_code == 200
        (book,) = stage.mock.books.values()
        (row,) = await stage.rows(1)
        assert (
            (row["tokens_in"], row["tokens_out"]) == (book.tokens_in, book.tokens_out) == (book.tokens_in, 5)
        )
        assert answer.json()["usage"]["completion_tokens"] == 5
        assert row["request_id"] == answer.headers["x-request-id"] == next(iter(stage.mock.books))
        assert (row["outcome"], row["status"], row["usage_source"]) == ("ok", 200, "reported")
        assert row["cost_pusd"] == book.tokens_in * 1_000_000 + 5 * 2_000_000
        assert row["total_ms"] >= row["ttft_ms"] > 0


async def test_a_stream_is_relayed_and_its_usage_is_booked_though_the_client_never_asked_for_it(
    tmp_path: Path,
) -> None:
    async with staged(tmp_path) as stage:
        answer = await stage.http.post(CHAT, json=asking("mock_out7", stream=True))
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        chunks = [json.loads(event) for event in events[:-1]]
        assert all(chunk["choices"] for chunk in chunks), "the chunk that only has usage was not asked for"
        assert sum(bool(chunk["choices"][0]["delta"].get("content")) for chunk in chunks) == 7
        (row,) = await stage.rows(1)
        assert (row["stream"], row["tokens_out"], row["usage_source"]) == (1, 7, "reported")


async def test_usage_that_was_asked_for_reaches_the_client(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        body = asking("mock_out3", stream=True, stream_options={"include_usage": True})
        text = (await stage.http.post(CHAT, json=body)).text
        assert '"completion_tokens":3' in text.replace(" ", "")


async def test_no_key_a_wrong_key_and_a_revoked_one_are_401_and_nothing_is_forwarded(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        for secret in ("", "rl-wrong", "x" * 1000):
            answer = await stage.client(secret).post(CHAT, json=asking())
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
        assert not stage.mock.books


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [("/v1/nothing", "POST", 404), (CHAT, "GET", 405), ("/v1/files/", "GET", 404), ("/metrics", "GET", 404)],
)
async def test_paths_and_methods_that_are_not_there(
    tmp_path: Path, path: str, method: str, status: int
) -> None:
    async with staged(tmp_path) as stage:
        answer = await stage.http.request(method, path)
        assert answer.status_code == status
        assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", None),
        (b"[1]", None),
        (b"[" * 5000, None),
        (b'{"messages": []}', "model"),
        (b'{"model": 5, "messages": []}', "model"),
        (b'{"model": "mock", "stream": "yes"}', "stream"),
        (b'{"model": "mock", "max_tokens": -1}', "max_tokens"),
        (b"\xff\xfe", None),
    ],
)
async def test_a_bad_body_is_400_that_names_the_field_and_nothing_is_forwarded(
    tmp_path: Path, body: bytes, param: str | None
) -> None:
    async with staged(tmp_path, key={"limits": Limits(tokens_per_minute=100_000)}) as stage:
        answer = await stage.http.post(CHAT, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
        assert not stage.mock.books
        (row,) = await stage.rows(1)
        assert (row["outcome"], row["tokens_in"]) == ("invalid", 0)


async def test_a_key_is_held_to_its_models_and_endpoints(tmp_path: Path) -> None:
    scope: dict[str, Any] = {"models": ("mock", "fast-*"), "endpoints": ("chat",)}
    async with staged(tmp_path, key=scope) as stage:
        assert (await stage.http.post(CHAT, json=asking("mock"))).status_code == 200
        assert (await stage.http.post(CHAT, json=asking("fast-one"))).status_code == 200
        refused = await stage.http.post(CHAT, json=asking("other"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "model_not_allowed")
        refused = await stage.http.post("/v1/embeddings", json={"model": "mock", "input": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "endpoint_not_allowed")
        assert len(stage.mock.books) == 2


async def test_a_model_named_twice_is_read_by_the_upstream_as_it_was_checked_here(tmp_path: Path) -> None:
    async with staged(tmp_path, key={"models": ("mock_out2",)}) as stage:
        body = b'{"model": "mock_out9", "messages": [], "model": "mock_out2"}'
        answer = await stage.http.post(CHAT, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 200
        assert [book.model for book in stage.mock.books.values()] == ["mock_out2"]


async def test_a_client_that_leaves_frees_the_upstream_at_once_and_is_booked_exactly(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        request = stage.http.build_request("POST", CHAT, json=asking("mock_out1000_pace5", stream=True))
        answer = await stage.http.send(request, stream=True)
        async for line in answer.aiter_lines():
            if "river" in line:
                break
        await answer.aclose()
        await stage.upstream_is_idle()
        (row,) = await stage.rows(1)
        (book,) = stage.mock.books.values()
        assert (row["outcome"], row["status"], row["usage_source"]) == ("client_gone", 499, "reported")
        assert (row["tokens_in"], row["tokens_out"]) == (book.tokens_in, book.tokens_out)
        assert 0 < row["tokens_out"] < 1000


async def test_where_too_many_answers_are_asked_after_the_next_is_booked_as_it_was_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finishing, "MAX_LATE", 0)
    async with staged(tmp_path) as stage:
        body = asking("mock_out1000_pace5", stream=True)
        async with stage.http.stream("POST", CHAT, json=body) as answer:
            async for line in answer.aiter_lines():
                if "river" in line:
                    break
        (row,) = await stage.rows(1)
        assert (row["outcome"], row["usage_source"]) == ("client_gone", "estimated")
        assert row["tokens_out"] > 0


async def test_a_client_that_leaves_before_a_whole_answer_frees_the_upstream_too(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        asked = asyncio.create_task(stage.http.post(CHAT, json=asking("mock_out4_late600000")))
        while not stage.mock.running:
            await asyncio.sleep(0.005)
        asked.cancel()
        await stage.upstream_is_idle()
        (row,) = await stage.rows(1)
        assert row["outcome"] == "client_gone"


async def test_a_stream_that_breaks_off_ends_with_an_error_event_and_exact_usage(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        text = (await stage.http.post(CHAT, json=asking("mock_out9_cut4_pace2", stream=True))).text
        last = [line for line in text.splitlines() if line.startswith("data: ")][-1]
        assert json.loads(last[6:])["error"]["code"] == "upstream_broken"
        assert "[DONE]" not in text
        (row,) = await stage.rows(1)
        (book,) = stage.mock.books.values()
        assert (row["outcome"], row["error_code"]) == ("upstream_failed", "upstream_broken")
        assert row["tokens_out"] == book.tokens_out == 4


async def test_what_an_upstream_refuses_reaches_the_client_as_it_was_said(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        answer = await stage.http.post(CHAT, json=asking("mock_fail422"))
        assert answer.status_code == 422
        (row,) = await stage.rows(1)
        assert (row["outcome"], row["status"], row["cost_pusd"]) == ("refused", 422, 0)


async def test_an_upstream_that_always_fails_is_502_with_nothing_of_where_it_is(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        answer = await stage.http.post(CHAT, json=asking("mock_fail500"))
        assert answer.status_code == 502
        assert "127.0.0.1" not in answer.text
        (row,) = await stage.rows(1)
        assert (row["outcome"], row["attempts"]) == ("upstream_failed", 3)
        assert [one["kind"] for one in json.loads(row["route"])["attempts"]] == ["first", "retry", "retry"]


async def test_a_fallback_answers_when_the_first_target_fails(tmp_path: Path) -> None:
    models = [{"name": "safe", "targets": ("mock/mock_fail503", "mock/mock_out3")}]
    async with staged(tmp_path, {"models": models, "retries": {"retries": 0}}) as stage:
        answer = await stage.http.post(CHAT, json=asking("safe"))
        assert answer.status_code == 200
        (row,) = await stage.rows(1)
        assert (row["model_asked"], row["upstream_model"], row["attempts"]) == ("safe", "mock_out3", 2)


async def test_headers_of_a_client_that_are_not_meant_for_upstreams_stay_here(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        forged = {
            "x-request-id": "forged",
            "x-forwarded-for": "10.0.0.1",
            "x-ridgeline-model": "other",
            "cookie": "a=b",
            "api-base": "http://evil.example",
        }
        await stage.http.post(CHAT, json=asking(api_base="http://evil.example"), headers=forged)
        seen = {name.decode(): value.decode() for name, value in stage.mock.last_headers}
        assert seen["x-request-id"].startswith("req_")
        assert stage.secret not in str(seen)
        for name in ("x-forwarded-for", "x-ridgeline-model", "cookie", "api-base"):
            assert name not in seen


async def test_a_rate_limit_is_429_with_retry_after_and_standard_headers(tmp_path: Path) -> None:
    async with staged(tmp_path, key={"limits": Limits(requests_per_minute=2)}) as stage:
        first = await stage.http.post(CHAT, json=asking())
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        await stage.http.post(CHAT, json=asking())
        refused = await stage.http.post(CHAT, json=asking())
        assert refused.status_code == 429
        assert 0 < int(refused.headers["retry-after"]) <= 61
        rows = await stage.rows(3)
        assert [row["outcome"] for row in rows].count("limited") == 1
        assert len(stage.mock.books) == 2


async def test_tokens_that_were_reserved_and_not_used_are_given_back(tmp_path: Path) -> None:
    async with staged(tmp_path, key={"limits": Limits(tokens_per_minute=1000)}) as stage:
        for _ in range(5):  # each reserves more than half of them, and uses a few
            answer = await stage.http.post(CHAT, json=asking("mock_out2", max_tokens=600))
            assert answer.status_code == 200


async def test_a_budget_of_money_ends_a_day(tmp_path: Path) -> None:
    async with staged(tmp_path, key={"limits": Limits(daily_usd=0.0001)}) as stage:
        body = asking("mock_out20", max_tokens=20)  # 20 tokens at 2 dollars per million, and the prompt
        assert (await stage.http.post(CHAT, json=body)).status_code == 200
        refused = await stage.http.post(CHAT, json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "budget_exceeded")


async def test_an_exact_cache_hit_costs_nothing_and_is_the_same_answer(tmp_path: Path) -> None:
    async with staged(tmp_path, key={"cache": "exact"}) as stage:
        body = asking("mock_out4", temperature=0)
        first = await stage.http.post(CHAT, json=body)
        again = await stage.http.post(CHAT, json=body)
        assert first.headers["x-ridgeline-cache"] == "miss"
        assert again.headers["x-ridgeline-cache"] == "hit"
        assert again.content == first.content
        assert len(stage.mock.books) == 1
        rows = await stage.rows(2)
        cached = next(row for row in rows if row["outcome"] == "cached")
        assert (cached["cost_pusd"], cached["tokens_out"], cached["cache"]) == (0, 0, "exact")


async def test_a_cached_stream_is_replayed_as_it_was(tmp_path: Path) -> None:
    async with staged(tmp_path, key={"cache": "exact"}) as stage:
        body = asking("mock_out4", temperature=0, stream=True)
        first = await stage.http.post(CHAT, json=body)
        again = await stage.http.post(CHAT, json=body)
        assert again.headers["x-ridgeline-cache"] == "hit"
        assert again.content == first.content


async def test_a_body_too_large_is_413_and_one_too_slow_408(tmp_path: Path) -> None:
    limits = {"gateway": {"max_body_bytes": 1000, "upload_timeout_s": 0.2}}
    async with staged(tmp_path, limits) as stage:
        answer = await stage.http.post(CHAT, json=asking(x="y" * 2000))
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
        for begun in ("", "{"):
            reader, writer = await asyncio.open_connection(stage.http.base_url.host, stage.http.base_url.port)
            writer.write(
                f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {stage.secret}\r\n"
                f"content-type: application/json\r\ncontent-length: 50\r\n\r\n{begun}".encode()
            )
            assert (await asyncio.wait_for(reader.read(), PATIENCE_S)).startswith(b"HTTP/1.1 408 ")
            writer.close()
        assert not stage.mock.books


async def test_a_deadline_for_the_whole_answer_is_504_and_frees_the_upstream(tmp_path: Path) -> None:
    async with staged(tmp_path, {"gateway": {"request_timeout_s": 0.3}}) as stage:
        answer = await stage.http.post(CHAT, json=asking("mock_late600000"))
        assert answer.status_code == 504
        await stage.upstream_is_idle()
        (row,) = await stage.rows(1)
        assert row["outcome"] == "upstream_failed"


async def test_the_models_a_key_may_use_are_listed(tmp_path: Path) -> None:
    models = [{"name": name, "targets": ("mock/mock",)} for name in ("fast", "large", "secret")]
    async with staged(tmp_path, {"models": models}, key={"models": ("fast", "large")}) as stage:
        listed = (await stage.http.get("/v1/models")).json()
        assert [one["id"] for one in listed["data"]] == ["fast", "large"]
        assert (await stage.http.get("/v1/models/secret")).status_code == 404


async def test_a_slow_reader_gets_everything_and_holds_up_only_its_own_stream(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        body = json.dumps(asking("mock_out60000", stream=True)).encode()  # far more than sockets buffer
        reader, writer = await asyncio.open_connection(
            stage.http.base_url.host, stage.http.base_url.port, limit=1 << 12
        )
        writer.write(
            f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {stage.secret}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.3)  # nothing is taken meanwhile
        assert (await stage.http.post(CHAT, json=asking("mock_out2"))).status_code == 200
        received = b""
        async with asyncio.timeout(PATIENCE_S):
            while not received.endswith(b"\r\n0\r\n\r\n"):
                received += await reader.read(1 << 16)
        assert received.count(b'"content":" river"') == 60000
        assert b"[DONE]" in received
        writer.close()


async def test_a_reader_that_takes_nothing_is_cut(tmp_path: Path) -> None:
    async with staged(tmp_path, {"gateway": {"stream_stall_s": 0.3}}) as stage:
        body = json.dumps(asking("mock_out200000", stream=True)).encode()
        reader, writer = await asyncio.open_connection(
            stage.http.base_url.host, stage.http.base_url.port, limit=1 << 12
        )
        writer.write(
            f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {stage.secret}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        (row,) = await stage.rows(1)
        assert row["error_code"] == "slow_reader"
        await until(lambda: not stage.mock.running)
        writer.close()
        assert reader


async def test_audio_is_passed_on_as_it_came_but_for_the_models_name(tmp_path: Path) -> None:
    models = [{"name": "hear", "targets": ("mock/whisper-9",)}]
    async with staged(tmp_path, {"models": models}) as stage:
        sound = bytes(range(256)) * 40
        sent = {"data": {"model": "hear", "language": "en"}, "files": {"file": ("a.wav", sound, "audio/wav")}}
        answer = await stage.http.post("/v1/audio/transcriptions", **sent)  # type: ignore[arg-type]
        assert answer.status_code == 404, "the mock hears nothing, and its answer is the client's"
        assert sound in stage.mock.last_body
        assert b"whisper-9" in stage.mock.last_body
        assert b"hear" not in stage.mock.last_body
        kinds = dict(stage.mock.last_headers)[b"content-type"]
        assert kinds.startswith(b"multipart/form-data; boundary=")
        assert kinds != answer.request.headers["content-type"].encode(), "the client's boundary is not ours"
        assert b"audio/wav" in stage.mock.last_body
