"""Request ids: the client's own if it is sane, else one of ours; in the header, the body and the engine."""

from __future__ import annotations

import pytest

from tests.server.stage import CHAT, HELLO, Stage


async def test_a_sane_id_is_kept_and_is_the_basis_of_the_answer_id(stage: Stage) -> None:
    response = await stage.post(CHAT, HELLO, headers={"x-request-id": "trace-7.a:b_c"})
    assert response.headers["x-request-id"] == "trace-7.a:b_c"
    assert response.json()["id"] == "chatcmpl-trace-7.a:b_c"


@pytest.mark.parametrize("asked", ["", "x" * 129, "two words", "naïve", 'a"b', "a/b"])
async def test_any_other_id_is_replaced(stage: Stage, asked: str) -> None:
    response = await stage.post(CHAT, HELLO, headers={"x-request-id": asked.encode()})
    given = response.headers["x-request-id"]
    assert given != asked
    assert len(given) == 32
    assert response.json()["id"] == f"chatcmpl-{given}"


async def test_the_engine_is_told_the_id_for_its_log(stage: Stage) -> None:
    await stage.post(CHAT, HELLO, headers={"x-request-id": "mine"})
    assert stage.client.asked[0]["request_id"] == "mine"


async def test_errors_carry_the_id_too(stage: Stage) -> None:
    response = await stage.post(CHAT, {"bad": 1}, headers={"x-request-id": "mine"})
    assert (response.status_code, response.headers["x-request-id"]) == (400, "mine")
