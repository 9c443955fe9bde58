"""Recorded traffic: lengths, moments and hashes, no word of what was said; and that the lab replays it."""

from __future__ import annotations

import json
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from ridgeline.lab.traffic.traces import read_recorded
from ridgeline.options import OptionError
from ridgeline.server.config import ServerConfig
from ridgeline.server.process.main import _served_models
from ridgeline.server.records import recording
from ridgeline.server.records.recording import EndedRequest, TrafficRecorder
from tests.server.scripted_client import hang, say
from tests.server.stage import CHAT, COMPLETIONS, HELLO, Stage, until

MANY = 1 << 30


def ended(prompt: list[int], arrival: float | None = None, **changed: Any) -> EndedRequest:
    values = {"endpoint": CHAT, "model": "m", "cache_namespace": "", "end": "stop", "output_tokens": 3}
    moment = time.monotonic() if arrival is None else arrival
    return EndedRequest(moment, prompt, **{**values, **changed})


def recorded(path: Path, *requests: EndedRequest, max_bytes: int = MANY) -> list[dict[str, Any]]:
    recorder = TrafficRecorder(path, max_bytes)
    for request in requests:
        recorder.add(request)
    recorder.close()
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_a_request_leaves_one_line_with_lengths_and_no_content(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    stage = Stage()
    stage.served_models.recorder = TrafficRecorder(path, MANY)
    secret = "the password is swordfish"
    assert (await stage.post(CHAT, {**HELLO, "messages": [{"role": "user", "content": secret}]})).is_success
    assert (await stage.post(COMPLETIONS, {"prompt": [[1, 2], [3]], "n": 2, "max_tokens": 9})).is_success
    stage.served_models.recorder.close()
    text = path.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["endpoint"] for line in lines] == [CHAT] + [COMPLETIONS] * 4
    assert [line["input_length"] for line in lines[1:]] == [2, 2, 1, 1]
    assert all(line["output_length"] > 0 and line["model"] == "m" for line in lines)
    assert "swordfish" not in text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_server_records_only_where_it_was_told_to(tmp_path: Path) -> None:
    assert _served_models([], ServerConfig(), None).recorder is None  # type: ignore[arg-type]
    told = _served_models([], ServerConfig(record_traffic=tmp_path / "a"), None)  # type: ignore[arg-type]
    assert told.recorder is not None
    told.recorder.close()
    assert (tmp_path / "a").exists()


async def test_texts_are_recorded_only_on_request_and_a_warning_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "traffic.jsonl"
    config = ServerConfig(record_traffic=path, record_texts=True)
    stage = Stage(script=say("the answer"))
    recorder = _served_models([], config, None).recorder  # type: ignore[arg-type]
    assert recorder is not None
    assert "users' content" in caplog.text
    stage.served_models.recorder = recorder
    assert (
        await stage.post(CHAT, {**HELLO, "messages": [{"role": "user", "content": "a question"}]})
    ).is_success
    assert (await stage.post(COMPLETIONS, {"prompt": [[104, 105], [106]], "n": 2})).is_success
    recorder.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert "a question" in lines[0]["text"]
    assert lines[0]["text"].endswith("the answer")
    assert [line["text"] for line in lines[1:]] == ["hithe answer"] * 2 + ["jthe answer"] * 2
    assert all(line["hash_ids"] for line in lines)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [request.input_tokens for request in read_recorded(path).requests][1:] == [2, 2, 1, 1]


def test_texts_need_a_file() -> None:
    with pytest.raises(OptionError, match="record_texts needs record_traffic"):
        ServerConfig(record_texts=True)


async def test_an_aborted_request_is_recorded_with_what_it_got(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    stage = Stage(script=hang(after="four"))
    stage.served_models.recorder = TrafficRecorder(path, MANY)
    async with stage.served() as http:
        async with http.stream("POST", CHAT, json={**HELLO, "stream": True}) as answer:
            async for line in answer.aiter_lines():
                if "four" in line:
                    break
        await until(path.read_text)
    stage.served_models.recorder.close()
    line = json.loads(path.read_text())
    assert (line["end"], line["output_length"]) == ("abort", 4)


def test_equal_hashes_are_equal_prefixes(tmp_path: Path) -> None:
    shared = list(range(200))
    lines = recorded(
        tmp_path / "a",
        ended([*shared, 1, 2, 3]),
        ended([*shared, 9]),
        ended([7, *shared]),
        ended(shared, cache_namespace="other"),
        ended(shared, model="other"),
    )
    first, second, shifted, other_space, other_model = (line["hash_ids"] for line in lines)
    assert [len(hashes) for hashes in (first, second, shifted)] == [4, 4, 4]
    assert first[:3] == second[:3]
    assert first[3] != second[3]
    assert len({*first, *shifted, *other_space, *other_model}) == 16
    assert max(first) < 2**53


def test_two_recordings_of_one_prompt_have_nothing_in_common(tmp_path: Path) -> None:
    one, two = (recorded(tmp_path / name, ended(list(range(100))))[0]["hash_ids"] for name in "ab")
    assert set(one).isdisjoint(two)


def test_the_lab_reads_what_was_recorded(tmp_path: Path) -> None:
    now = time.monotonic() + 1
    recorded(
        tmp_path / "a",
        ended(list(range(100)), now + 2.5, output_tokens=7),
        ended(list(range(70)), now, output_tokens=5),
        ended([1], now + 1, output_tokens=0, end="abort"),
    )
    traffic = read_recorded(tmp_path / "a")
    assert [(r.input_tokens, r.output_tokens) for r in traffic.requests] == [(70, 5), (100, 7)]
    assert traffic.requests[1].at == pytest.approx(2.5, abs=1e-3)
    assert traffic.requests[0].prefix[0] == traffic.requests[1].prefix[0]
    assert traffic.prefix_block_tokens == recording.BLOCK_TOKENS


def test_a_restarted_server_goes_on_with_its_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    before = recorded(path, ended([1, 2, 3]))
    lines = recorded(path, ended([4, 5]))
    assert len(lines) == 2
    assert lines[0] == before[0]
    assert lines[1]["began"] == before[0]["began"]
    assert lines[1]["timestamp"] > lines[0]["timestamp"]


@pytest.mark.parametrize("content", [b"dear diary\n", b'{"endpoint": "\xff\xfe"}\n'])
def test_a_file_that_is_no_recording_is_left_alone(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(OptionError, match="is not a recording"):
        TrafficRecorder(path, MANY)
    assert path.read_bytes() == content
    with pytest.raises(OptionError, match="cannot be written"):
        TrafficRecorder(tmp_path, MANY)


def test_a_full_file_grows_no_more(tmp_path: Path) -> None:
    line = len(json.dumps(recorded(tmp_path / "a", ended([1]))[0], separators=(",", ":"))) + 1
    lines = recorded(tmp_path / "b", *(ended([1]) for _ in range(50)), max_bytes=5 * line)
    assert 3 <= len(lines) <= 5
    assert (tmp_path / "b").stat().st_size <= 5 * line


def test_what_the_thread_cannot_keep_up_with_goes_unrecorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "WAITING_TOKENS", 50)
    recorder = TrafficRecorder(tmp_path / "a", MANY)
    prompt = list(range(100_000))
    for _ in range(100):
        recorder.add(ended(prompt))
    recorder.close()
    written = len((tmp_path / "a").read_text().splitlines())
    assert recorder.unrecorded == 100 - written > 0
