"""AsyncClient.start: an engine process of the caller's own, streaming, and gone with the client."""

from pathlib import Path

import pytest

from ridgeline import AsyncClient, SamplingParams
from ridgeline.engine.launch import EngineCannotStart


async def test_a_program_streams_from_an_engine_of_its_own(smollm2_path, llm):
    params = SamplingParams(temperature=0.0, max_tokens=8)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    async with await AsyncClient.start(str(smollm2_path), kv_tokens=2048, deterministic=True) as client:
        engine = Path(f"/proc/{client.hello.pid}")
        assert engine.exists()
        chunks = [chunk async for chunk in client.chat(messages, params)]
    assert "".join(chunk.text for chunk in chunks) == llm.chat(messages, params).text
    assert len(chunks) > 3
    assert not engine.exists()


async def test_an_engine_that_cannot_start_says_why(smollm2_path, capfd):
    with pytest.raises(EngineCannotStart):
        await AsyncClient.start(str(smollm2_path), kv_tokens=10**8)
    assert "--kv-tokens" in capfd.readouterr().err
