"""The official openai SDK: a file of requests goes up, a batch answers them, a file of answers comes down."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import openai
import pytest

from tests.clients.cases import case
from tests.clients.conftest import MODEL
from tests.clients.either import each, settled
from tests.clients.openai_clients import CLIENTS, client_of
from tests.clients.questions import QUESTION
from tests.patience import PATIENCE_S

__all__ = ["CLIENTS", "client_of"]  # read by conftest


def line(custom_id: str, **changes: Any) -> str:
    body = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 4, **changes}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body})


@case("files and batches")
async def test_every_line_of_a_batch_is_answered_once(client: Any) -> None:
    content = "\n".join([line("a"), line("b", max_tokens=2), line("bad", temperature=-1)]).encode()
    upload = await settled(client.files.create(file=("requests.jsonl", content), purpose="batch"))
    assert (upload.filename, upload.bytes, upload.purpose) == ("requests.jsonl", len(content), "batch")
    batch = await settled(
        client.batches.create(
            input_file_id=upload.id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
            metadata={"a": "b"},
        )
    )
    deadline = time.monotonic() + PATIENCE_S
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        assert time.monotonic() < deadline, batch
        await asyncio.sleep(0.1)
        batch = await settled(client.batches.retrieve(batch.id))
    assert batch.status == "completed"
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (3, 2, 1)
    answers = await answers_of(client, batch.output_file_id)
    assert {name: answer["response"]["status_code"] for name, answer in answers.items()} == {
        "a": 200,
        "b": 200,
    }
    assert answers["b"]["response"]["body"]["usage"]["completion_tokens"] == 2
    refused = await answers_of(client, batch.error_file_id)
    assert refused["bad"]["response"]["status_code"] == 400

    listed = [each_batch.id async for each_batch in each(await settled(client.batches.list(limit=5)))]
    assert batch.id in listed
    await settled(client.files.delete(upload.id))
    with pytest.raises(openai.NotFoundError):
        await settled(client.files.retrieve(upload.id))


async def answers_of(client: Any, file_id: str) -> dict[str, Any]:
    content = await settled(client.files.content(file_id))
    lines = [json.loads(text) for text in content.text.splitlines()]
    answers = {answer["custom_id"]: answer for answer in lines}
    assert len(answers) == len(lines)
    return answers
