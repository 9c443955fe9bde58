"""The access log's lines: whole, harmless, without bodies unless asked."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from ridgeline.gateway.accounting.row import LedgerRow
from ridgeline.gateway.observe import access_log
from ridgeline.gateway.observe.access_log import AccessLog
from ridgeline.gateway.observe.config import ObserveConfig
from ridgeline.options import OptionError


def row(**fields: Any) -> LedgerRow:
    return LedgerRow("req_1", 1_700_000_000_123, **fields)


def lines_of(config: ObserveConfig, *rows: LedgerRow, **bodies: bytes) -> list[str]:
    stream = io.BytesIO()
    log = AccessLog(config, stream)
    for each in rows:
        log.write(each, **bodies)  # type: ignore[arg-type]
    log.close()
    return stream.getvalue().decode().splitlines()


def test_a_line_is_json_with_what_the_row_knows_and_nothing_empty() -> None:
    [line] = lines_of(
        ObserveConfig(),
        row(
            endpoint="chat",
            status=200,
            model="small",
            tokens_out=5,
            cost_pusd=3_000_000,
            ttft_ms=1.23456,
            route='{"why":"rule"}',
        ),
    )
    event = json.loads(line)
    assert event["time"] == "2023-11-14T22:13:20.123Z"
    assert event["request_id"] == "req_1"
    assert (event["status"], event["tokens_out"], event["cost_usd"]) == (200, 5, 3e-6)
    assert event["ttft_ms"] == 1.235
    assert event["route"] == {"why": "rule"}
    assert "guard" not in event
    assert "queue_ms" not in event


def test_bodies_stand_there_only_if_the_operator_asked() -> None:
    bodies = {"request": b'{"secret": "hunter2"}', "answer": b"x" * 100}
    [without] = lines_of(ObserveConfig(), row(), **bodies)
    assert "hunter2" not in without
    [line] = lines_of(ObserveConfig(log_bodies=True, log_body_bytes=30), row(), **bodies)
    event = json.loads(line)
    assert event["request"] == '{"secret": "hunter2"}'
    assert event["answer"] == "x" * 30 + "… (100 bytes)"


@pytest.mark.parametrize("style", ["json", "text"])
def test_a_made_up_model_name_cannot_forge_a_line(style: str) -> None:
    evil = 'm"\n{"status": 200}\r\x1b[2J\u2028' + "x" * 10_000
    lines = lines_of(ObserveConfig(access_log_format=style), row(model_asked=evil))  # type: ignore[arg-type]
    assert len(lines) == 1
    assert lines[0].replace("…", "").isascii()
    assert lines[0].isprintable()
    assert len(lines[0]) < 1000


def test_text_lines_are_short_and_readable() -> None:
    [line] = lines_of(
        ObserveConfig(access_log_format="text"),
        row(endpoint="chat", status=200, model="small", total_ms=12.34, tokens_in=3),
    )
    assert line == "22:13:20.123 200 ok chat small 12.3 ms  request_id=req_1 tokens_in=3"


def test_a_file_is_appended_to(tmp_path: Path) -> None:
    place = tmp_path / "access.log"
    for _ in range(2):
        log = AccessLog(ObserveConfig(access_log=str(place)))
        log.write(row())
        log.close()
    assert len(place.read_text().splitlines()) == 2
    with pytest.raises(OptionError, match="access_log"):
        AccessLog(ObserveConfig(access_log=str(tmp_path / "none" / "access.log")))


def test_a_stream_that_takes_nothing_costs_lines_and_not_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_log, "MAX_WAITING", 2000)
    reader, writer = os.pipe()
    log = AccessLog(ObserveConfig(), os.fdopen(writer, "wb"))
    for _ in range(10_000):
        log.write(row(model="m" * 100))
    assert len(log._lines) <= 2000
    assert log.dropped >= 7000
    os.close(reader)  # the writing thread's last write fails, and it ends
    log.close()


def test_lines_of_several_writers_never_mix(tmp_path: Path) -> None:
    place = tmp_path / "access.log"
    logs = [AccessLog(ObserveConfig(access_log=str(place))) for _ in range(4)]
    for number in range(500):
        for writer, log in enumerate(logs):
            log.write(
                row(model=f"w{writer}", upstream=str(number), route=json.dumps("x" * (number * 7 % 900)))
            )
    for log in logs:
        log.close()
    events = [json.loads(line) for line in place.read_text().splitlines()]
    for writer in range(4):
        assert [e["upstream"] for e in events if e["model"] == f"w{writer}"] == [str(n) for n in range(500)]


def test_off_writes_nothing() -> None:
    log = AccessLog(ObserveConfig(access_log="off"))
    log.write(row())
    log.close()
    assert not log.wants_bodies
