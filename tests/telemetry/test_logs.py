"""Log lines: parseable, one per event, with a request's figures and none of its text."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

from ridgeline.telemetry import logs
from ridgeline.telemetry.timing import TimingRecord


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    loggers = [logging.getLogger(), logging.getLogger("ridgeline")]
    before = [(logger.handlers[:], logger.level) for logger in loggers]
    yield
    for logger, (handlers, level) in zip(loggers, before, strict=True):
        logger.handlers[:], logger.level = handlers, level


def finished() -> TimingRecord:
    return TimingRecord(
        arrival=10.0,
        admitted=10.1,
        token_times=[10.5, 10.6, 10.7],
        end=10.7,
        sent=10.75,
        prompt_tokens=300,
        cached_tokens=288,
        preemptions=1,
    )


def test_a_request_is_one_json_line_with_all_its_figures() -> None:
    out = io.StringIO()
    logs.setup("info", "json", out)
    logs.log_request("r1", "/v1/chat/completions", 200, finished(), "stop")
    (line,) = out.getvalue().splitlines()
    event = json.loads(line)
    assert event["request_id"] == "r1"
    assert event["endpoint"] == "/v1/chat/completions"
    assert event["finish_reason"] == "stop"
    assert (event["status"], event["level"]) == (200, "info")
    assert event["queue_ms"] == pytest.approx(100, abs=0.01)
    assert event["ttft_ms"] == pytest.approx(500, abs=0.01)
    assert event["tpot_ms"] == pytest.approx(100, abs=0.01)
    assert event["inference_ms"] == pytest.approx(600, abs=0.01)
    assert event["e2e_ms"] == pytest.approx(750, abs=0.01)
    assert (event["prompt_tokens"], event["cached_tokens"], event["output_tokens"]) == (300, 288, 3)
    assert event["preemptions"] == 1


def test_figures_that_do_not_exist_are_left_out_and_not_zero() -> None:
    out = io.StringIO()
    logs.setup("info", "json", out)
    logs.log_request("r2", "/v1/completions", 499, TimingRecord(arrival=1.0, end=2.0), "abort")
    event = json.loads(out.getvalue())
    assert "ttft_ms" not in event
    assert "queue_ms" not in event
    assert event["e2e_ms"] == pytest.approx(1000)


def test_auto_is_text_on_a_terminal_and_json_elsewhere() -> None:
    terminal, file = Terminal(), io.StringIO()
    logs.setup("info", "auto", terminal)
    logs.log_request("r3", "/x", 200)
    assert "request  request_id=r3 endpoint=/x status=200" in terminal.getvalue()
    logs.setup("info", "auto", file)
    logs.log_request("r3", "/x", 200)
    assert json.loads(file.getvalue())["request_id"] == "r3"


def test_a_second_setup_replaces_the_first_and_doubles_no_line() -> None:
    first, second = io.StringIO(), io.StringIO()
    logs.setup("info", "json", first)
    logs.setup("info", "json", second)
    logging.getLogger("ridgeline.engine").warning("hello")
    assert first.getvalue() == ""
    assert len(second.getvalue().splitlines()) == 1


@pytest.mark.parametrize("format", ["text", "json"])
@pytest.mark.parametrize(
    "end", ["\n", "\r", "\x85", "\u2028", "\x1b[2J", "\x9b2J", "\u202e", "\ud800"], ids=ascii
)
def test_a_path_with_line_ends_or_terminal_codes_cannot_forge_or_hide_a_line(format: str, end: str) -> None:
    out = io.StringIO()
    logs.setup("info", format, out)
    logs.log_request("r4", f"/x{end}12:00:00.000 INFO forged", 400, error="bad = value")
    (line,) = out.getvalue().splitlines()
    assert line.isprintable()
    assert line.isascii()


def test_an_exception_stays_inside_its_json_line() -> None:
    out = io.StringIO()
    logs.setup("info", "json", out)
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        logging.getLogger("ridgeline.engine").exception("a step failed")
    (line,) = out.getvalue().splitlines()
    assert "RuntimeError: broken" in json.loads(line)["exception"]


def test_the_level_holds_and_an_unknown_one_is_refused_with_the_known_ones() -> None:
    out = io.StringIO()
    logs.setup("warning", "json", out)
    logs.log_request("r5", "/x", 200)
    assert out.getvalue() == ""
    logs.log_request("r6", "/x", 503, error="the engine died")
    assert json.loads(out.getvalue())["level"] == "error"
    with pytest.raises(ValueError, match=r"loud.*debug, info, warning, error"):
        logs.setup("loud")


SPEAKING = """
import asyncio, logging, threading, warnings
from ridgeline.telemetry import logs
logs.setup("info", "json")
logs.say("a banner", "serving", url="http://127.0.0.1:1")
logging.getLogger("uvicorn.error").error("Exception in ASGI application\\n", exc_info=ValueError("theirs"))
logging.getLogger("httpx").info("a request")
warnings.warn("old")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
async def main():
    asyncio.get_running_loop().call_soon(lambda: {}["no key"])
    await asyncio.sleep(0)
    await asyncio.sleep(0)
asyncio.run(main())
raise RuntimeError("the end")
"""


def test_json_logs_hold_only_json_whatever_prints() -> None:
    done = subprocess.run([sys.executable, "-c", SPEAKING], capture_output=True, text=True, check=False)
    events = [json.loads(line) for line in (done.stdout + done.stderr).splitlines()]
    shown = [(event["logger"], event["message"].split("\n")[0].split(": ")[-1]) for event in events]
    assert shown == [
        ("ridgeline", "serving"),
        ("uvicorn.error", "Exception in ASGI application"),
        ("py.warnings", "old"),
        ("ridgeline", "uncaught exception"),
        ("asyncio", "Exception in callback main.<locals>.<lambda>() at <string>:13"),
        ("ridgeline", "uncaught exception"),
    ]
    assert events[0]["url"] == "http://127.0.0.1:1"
    assert "RuntimeError: the end" in events[-1]["exception"]
