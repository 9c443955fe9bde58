"""Whatever an adversary sends to whichever endpoint: a 4xx that names the field, soon, while another client's
stream goes on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from ridgeline.server.app import ENDPOINTS
from ridgeline.server.http.endpoint import Endpoint
from tests.conftest import LiveServer
from tests.faults.adversary import ATTACKED, Attack, attacks
from tests.faults.conftest import chat_body
from tests.faults.listener import Listener
from tests.patience import PATIENCE_S

HANGS_S = PATIENCE_S  # what is measured is printed
LONGEST_GAP_S = 20.0
COMPACT = "/v1/responses/compact"  # what passes there writes a summary of 1,024 tokens
OVERFLOW = "prompt is too long"  # Anthropic's words, which name no field


@pytest.fixture(scope="module")
def listener(live_server: LiveServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listener]:
    with Listener(live_server.base_url, tmp_path_factory.mktemp("listener") / "tokens") as listening:
        yield listening


def _name(endpoint: Endpoint) -> str:
    return f"{endpoint.method} {endpoint.path}"


@pytest.mark.parametrize("endpoint", ATTACKED, ids=_name)
def test_an_attack_is_a_4xx_that_names_the_field(
    live_server: LiveServer, listener: Listener, endpoint: Endpoint
) -> None:
    began = time.monotonic()
    wrong: list[str] = []
    timed: list[tuple[float, str]] = []
    with httpx.Client(base_url=live_server.base_url, timeout=HANGS_S) as http:
        for attack in attacks(endpoint):
            if attack.may_pass and endpoint.path == COMPACT:
                continue
            asked = time.monotonic()
            answer = http.request(endpoint.method, endpoint.path, content=attack.body, headers=attack.headers)
            timed.append((time.monotonic() - asked, attack.what))
            complaint = _complaint(attack, answer)
            if complaint:
                wrong.append(f"{attack.what}: {complaint}")
    gap_s = listener.longest_gap_s(began)
    slowest = ", ".join(f"{what} {s * 1000:.0f} ms" for s, what in sorted(timed, reverse=True)[:4])
    gap = f"longest gap of the other stream {gap_s * 1000:.0f} ms"
    print(f"\n{_name(endpoint)}: {len(timed)} attacks, {gap}; {slowest}")
    assert wrong == []
    assert gap_s < LONGEST_GAP_S, f"another client's stream stood still for {gap_s:.1f} s"


WEIRD_NAMES = [
    "%00",
    "..%2f..%2fetc%2fpasswd",
    "a" * 8000,
    "%ff%fe",
    "'%3bDROP%20TABLE%20files--",
    "%F0%9F%92%A9",
    "{x}",
]


@pytest.mark.parametrize("endpoint", [one for one in ENDPOINTS if "{" in one.path], ids=_name)
def test_a_name_that_nobody_has_is_a_4xx(live_server: LiveServer, endpoint: Endpoint) -> None:
    before, _, rest = endpoint.path.partition("{")
    after = rest.partition("}")[2]
    for weird in WEIRD_NAMES:
        answer = httpx.request(
            endpoint.method, f"{live_server.base_url}{before}{weird}{after}", timeout=HANGS_S
        )
        assert 400 <= answer.status_code < 500, (weird, answer.status_code, answer.text[:200])
        assert len(answer.content) < 10_000


def test_after_all_of_it_the_server_answers_as_before(live_server: LiveServer) -> None:
    answer = httpx.post(
        f"{live_server.base_url}/v1/chat/completions",
        json=chat_body(stream=False, max_tokens=1),
        timeout=PATIENCE_S,
    )
    assert answer.json()["usage"]["completion_tokens"] == 1
    log = live_server.log.read_text()
    assert "unexpected error" not in log


def _complaint(attack: Attack, answer: httpx.Response) -> str | None:
    """What is wrong with the answer; None if nothing is."""
    allowed = answer.status_code == 200 if attack.may_pass else False
    if allowed:
        return None
    if not 400 <= answer.status_code < 500:
        return f"{answer.status_code} {answer.text[:200]}"
    if len(answer.content) > 10_000:
        return f"an error of {len(answer.content)} bytes"
    error: dict[str, Any] | str = json.loads(answer.content)["error"]  # a text in Ollama's API
    said = error if isinstance(error, str) else f"{error.get('param')} {error['message']}"
    named = attack.names is None or attack.names in said or OVERFLOW in said
    return None if named else f"{attack.names} is not named: {said[:200]}"
