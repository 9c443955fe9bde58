"""Killed at any moment and started again, a server finishes its batches: every line once."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.conftest import LiveServer
from tests.faults.conftest import engine_pid
from tests.patience import PATIENCE_S

LINES = 60
CHAT = "/v1/chat/completions"


def content() -> bytes:
    """Answers of very different lengths, a few lines that can only fail, and long ids."""
    lines = []
    for i in range(LINES):
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": f"Count to {i}."}],
            "max_tokens": 2 + 5 * (i % 4),
            "ignore_eos": True,
        }
        if i % 20 == 7:
            body["model"] = "nobody"
        lines.append(
            json.dumps({"custom_id": f"line-{i}-" + "x" * 99, "method": "POST", "url": CHAT, "body": body})
        )
    return "\n".join(lines).encode()


def create(server: LiveServer) -> str:
    with httpx.Client(base_url=f"{server.base_url}/v1", timeout=PATIENCE_S) as http:
        file = http.post("/files", files={"file": ("in.jsonl", content())}, data={"purpose": "batch"}).json()
        body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
        batch_id: str = http.post("/batches", json=body).json()["id"]
        return batch_id


def show(server: LiveServer, batch_id: str) -> dict[str, Any]:
    answer = httpx.get(f"{server.base_url}/v1/batches/{batch_id}", timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def done(batch: dict[str, Any]) -> int:
    return int(batch["request_counts"]["completed"] + batch["request_counts"]["failed"])


def await_done(server: LiveServer, batch_id: str, count: float, limit_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + limit_s
    while done(show(server, batch_id)) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def await_end(server: LiveServer, batch_id: str, limit_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + limit_s
    while show(server, batch_id)["status"] != "completed":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def custom_ids(server: LiveServer, file_id: str) -> list[str]:
    text = httpx.get(f"{server.base_url}/v1/files/{file_id}/content").text
    return [json.loads(line)["custom_id"] for line in text.splitlines()]


def test_killed_again_and_again_every_line_is_answered_exactly_once(
    serve: Callable[..., LiveServer], tmp_path: Path
) -> None:
    dice = random.Random(time.time_ns())
    flags = ("--state-dir", str(tmp_path / "state"), "--max-running", "8", "--drain-s", "60")
    server = serve(*flags)
    batch_id = create(server)
    seen = 0
    for share in (0.0, 0.4):
        await_done(server, batch_id, share * LINES)
        time.sleep(dice.uniform(0.0, 0.1))
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
        server = serve(*flags)
        assert done(show(server, batch_id)) >= seen, "answers that were kept are gone"
        seen = done(show(server, batch_id))
    await_done(server, batch_id, 0.7 * LINES)
    os.kill(engine_pid(server), signal.SIGKILL)  # an engine alone costs a batch nothing either
    await_end(server, batch_id)
    batch = show(server, batch_id)
    assert batch["request_counts"] == {"total": LINES, "completed": LINES - 3, "failed": 3}
    answered, failed = custom_ids(server, batch["output_file_id"]), custom_ids(server, batch["error_file_id"])
    assert len(answered) == LINES - 3
    assert sorted(answered + failed) == sorted(
        json.loads(line)["custom_id"] for line in content().splitlines()
    )
    assert sorted(path.name for path in (tmp_path / "state" / "files").iterdir()) == sorted(
        [batch["input_file_id"], batch["output_file_id"], batch["error_file_id"]]
    )
    told_to_stop_it_does_not_wait_for_its_batches(server)


def told_to_stop_it_does_not_wait_for_its_batches(server: LiveServer) -> None:
    await_done(server, create(server), 1)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(PATIENCE_S) == 0, server.log.read_text()
    assert "draining" not in server.log.read_text()
