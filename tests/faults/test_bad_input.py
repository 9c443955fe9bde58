"""Bad input at a live server: a 4xx that names the field, the engine never sees it, and others are served."""

from __future__ import annotations

import json

import httpx
import pytest

from tests.faults.conftest import metric
from tests.patience import PATIENCE_S

CHAT, TOKENIZE = "/v1/chat/completions", "/tokenize"
GOOD = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


def body(**changes: object) -> bytes:
    return json.dumps(GOOD | changes).encode()


# what is wrong → (path, raw body, status, the field the message names; None: the body as a whole)
BAD: dict[str, tuple[str, bytes, int, str | None]] = {
    "too long": (CHAT, body(messages=[{"role": "user", "content": "word " * 20_000}]), 400, "messages"),
    "no messages": (CHAT, body(messages=[]), 400, "messages"),
    "empty prompt": ("/v1/completions", b'{"prompt": ""}', 400, "prompt"),
    "wrong type": (CHAT, body(temperature="hot"), 400, "temperature"),
    "unknown field": (CHAT, body(temprature=1.0), 400, "temprature"),
    "NaN temperature": (
        CHAT,
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
        400,
        None,
    ),
    "infinite temperature": (CHAT, body(temperature=1e30), 400, "temperature"),
    "unknown model": (CHAT, body(model="gpt-9"), 404, "model"),
    "broken JSON": (CHAT, b'{"messages": [', 400, None),
    "not an object": (CHAT, b"[1, 2, 3]", 400, None),
    "bad UTF-8": (CHAT, b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}', 400, None),
    "half a surrogate pair": (CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400, None),
    "huge body": (CHAT, b" " * (9 << 20), 413, None),
    "token id outside the vocabulary": ("/v1/completions", b'{"prompt": [999999]}', 400, "prompt"),
    "bias outside the vocabulary": (CHAT, body(logit_bias={"999999": 1.0}), 400, "logit_bias"),
    "nothing to tokenize": (TOKENIZE, b"{}", 400, "prompt"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_a_4xx_by_name_and_never_reaches_the_engine(live_server, what):
    path, raw, status, field = BAD[what]
    steps_before = metric(live_server, "ridgeline:engine_steps_total")
    answer = httpx.post(
        f"{live_server.base_url}{path}",
        content=raw,
        headers={"content-type": "application/json"},
        timeout=PATIENCE_S,
    )
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["message"]
    if field is not None:
        assert (error["param"] or "").split(".")[0].split("[")[0] == field
    assert metric(live_server, "ridgeline:engine_steps_total") == steps_before


def test_a_server_that_saw_all_of_it_still_answers(live_server):
    answer = httpx.post(f"{live_server.base_url}{CHAT}", json=GOOD, timeout=PATIENCE_S)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 1
