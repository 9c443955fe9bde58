"""The stages of a first token, from a real server's step records, and what is printed of them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from ridgeline.lab.errors import BadInput, LabError
from ridgeline.lab.profile.first_token import STAGES, first_token_lines, profile_first_tokens

PLAN_S, LAUNCH_S, STEP_S = 0.002, 0.001, 0.005


class Server(BaseHTTPRequestHandler):
    """Serves what the profile asks for; a step is a record, and lies within its request."""

    protocol_version = "HTTP/1.1"
    steps: ClassVar[list[dict[str, Any]]] = []
    has_steps, limits = True, {"decode_tokens_per_s": 250.0, "prefill_tokens_per_s": 64_000.0}

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._json({"data": [{"id": "m", "limits": self.limits}]})
        elif self.path == "/debug/steps":
            lines = [json.dumps(step) for step in self.steps] if self.has_steps else []
            self._body("\n".join(lines).encode())
        else:
            self._json({})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/tokenize":
            self._json({"tokens": body["prompt"].split()})
        elif self.path == "/detokenize":
            self._json({"prompt": " ".join(body["tokens"])})
        else:
            self._answer(body)

    def _answer(self, body: dict[str, Any]) -> None:
        start = time.monotonic()
        while time.monotonic() < start + PLAN_S + STEP_S:
            pass
        self.steps.append(
            {
                "step_id": len(self.steps),
                "start": start,
                "prefill_tokens": len(body["prompt"].split()),
                "prefill_rows": 1,
                "prefill_context_product": 1,
                "decode_batch": 0,
                "decode_context": 0,
                "wall_s": STEP_S,
                "schedule_s": PLAN_S,
                "launch_s": LAUNCH_S,
            }
        )
        self._body(b'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n')

    def _json(self, value: Any) -> None:
        self._body(json.dumps(value).encode())

    def _body(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def serving(**settings: Any) -> Iterator[str]:
    handler = type("Handler", (Server,), {"steps": [], **settings})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_stages_are_those_of_the_step_record_and_add_up_to_the_first_token() -> None:
    with serving() as url:
        found = profile_first_tokens(url, prompt_tokens=40, requests=3)
    assert found.prompt_tokens == 40
    assert list(found.stages) == list(STAGES)
    assert found.stages["planning"] == pytest.approx([PLAN_S] * 3)
    assert found.stages["launching the step"] == pytest.approx([LAUNCH_S] * 3)
    assert found.stages[STAGES[5]] == pytest.approx([STEP_S - LAUNCH_S] * 3)
    for place, ttft_s in enumerate(found.ttft_s):
        assert sum(values[place] for values in found.stages.values()) == pytest.approx(ttft_s)
        assert all(values[place] >= 0 for values in found.stages.values())
    assert found.steps == [1, 1, 1]
    assert found.limit_s == pytest.approx(1 / 250)  # the weights: 4 ms; 40 tokens of arithmetic: 0.6
    lines = list(first_token_lines(found))
    assert lines[0].startswith("first token of 40 tokens: ")
    assert all(any(name in line for line in lines) for name in STAGES)
    assert lines[-1].startswith("limit 4.00 ms (the weights are read once)")


def test_long_prompts_are_limited_by_their_arithmetic_and_unknown_limits_are_told() -> None:
    with serving() as url:
        found = profile_first_tokens(url, prompt_tokens=640, requests=1)
    assert (found.limit_s, found.limit_words) == (pytest.approx(0.01), "the arithmetic of 640 tokens")
    with serving(limits=None) as url:
        found = profile_first_tokens(url, prompt_tokens=8, requests=1)
    assert list(first_token_lines(found))[-1] == "limit unknown: the server does not tell its limits"


def test_what_cannot_be_profiled_is_refused_with_the_reason() -> None:
    with serving(has_steps=False) as url, pytest.raises(LabError, match="must run on the server's machine"):
        profile_first_tokens(url, 8, 1)
    with pytest.raises(LabError, match="did not answer"):
        profile_first_tokens(url, 8, 1)
    with pytest.raises(BadInput, match="needs an address such as"):
        profile_first_tokens("ftp://nowhere", 8, 1)
    with pytest.raises(BadInput, match="must be at least 1"):
        profile_first_tokens(url, 0, 1)
