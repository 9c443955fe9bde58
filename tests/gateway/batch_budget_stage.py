"""Batches that tests submit, and what the gateway books of them."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.gateway.object_stage import batch_line
from tests.gateway.stage import CHAT, Staged, asking
from tests.patience import PATIENCE_S

DOLLAR = 10**12

DOLLAR = 10**12


def lines(count: int, **body: Any) -> str:
    return "\n".join(batch_line(number, body=body) for number in range(count))


async def chat(stage: Staged, max_tokens: int = 1) -> int:
    answer = await stage.http.post(CHAT, json=asking("public", max_tokens=max_tokens))
    return answer.status_code


async def booked(stage: Staged, batch_id: str) -> dict[str, Any]:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            await stage.batches.look_after_all()
            rows = [row for row in stage.written_rows() if row["request_id"] == batch_id]
            if rows:
                (row,) = rows
                return row
            await asyncio.sleep(0.02)


async def completed(stage: Staged, batch_id: str, count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            batch = (await stage.http.get(f"/v1/batches/{batch_id}")).json()
            if batch["request_counts"]["completed"] >= count:
                return
            await asyncio.sleep(0.01)
