"""AsyncClient.start: an engine process of the caller's own, streaming, and gone with the client."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from ridgeline import AsyncClient, SamplingParams
from ridgeline.engine.client.launch import EngineCannotStart, load_tokenizer
from ridgeline.engine.errors import InvalidRequest
from ridgeline.engine.link.transport import EngineSocket
from ridgeline.engine.run.engine_loop import EngineLoop
from ridgeline.models.errors import BrokenModel, UnsupportedModel
from tests.patience import PATIENCE_S


async def test_a_program_streams_from_an_engine_of_its_own(smollm2_path, llm):
    params = SamplingParams(temperature=0.0, max_tokens=8)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    defaults = '{"temperature": 0, "max_new_tokens": 8}'  # of an answer that is asked for without any
    async with await AsyncClient.start(
        str(smollm2_path), kv_tokens=2048, deterministic=True, override_generation_config=defaults
    ) as client:
        assert client.get_default_sampling_params() == params
        engine = Path(f"/proc/{client.hello.pid}")
        assert engine.exists()
        chunks = [chunk async for chunk in client.chat(messages)]
    assert "".join(chunk.text for chunk in chunks) == llm.chat(messages, params).text
    assert len(chunks) > 3
    assert not engine.exists()


async def test_a_decoder_refuses_to_embed_and_goes_on(llm, tmp_path):
    path = tmp_path / "engine.sock"
    loop = EngineLoop(llm.engine, EngineSocket(path), "smollm2-135m", os.getppid())
    running = asyncio.create_task(asyncio.to_thread(loop.run))
    async with await AsyncClient.connect(path, llm.tokenizer) as client:
        try:
            with pytest.raises(InvalidRequest, match="smollm2-135m generates text and cannot"):
                await asyncio.wait_for(client.embed([[1, 2, 3]]), PATIENCE_S)
            assert client.open_requests == 0
            chunks = [chunk async for chunk in client.generate([5], SamplingParams(max_tokens=2))]
            assert chunks[-1].finish_reason is not None
        finally:
            client.stop_engine()
            await asyncio.wait_for(running, PATIENCE_S)


async def test_an_engine_that_cannot_start_says_why(smollm2_path, capfd):
    with pytest.raises(EngineCannotStart):
        await AsyncClient.start(str(smollm2_path), kv_tokens=10**8)
    assert "--kv-tokens" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("model_type", "error", "reason"),
    [
        ("llama", BrokenModel, "has no tokenizer.json"),
        ("deepseek_v3", UnsupportedModel, "the family 'deepseek_v3' is not supported"),
        ("bert", BrokenModel, "has no tokenizer.json"),
        ("deberta", UnsupportedModel, "deberta"),
    ],
)
def test_an_unsupported_model_is_a_better_reason_than_its_missing_tokenizer(
    model_type: str, error: type[Exception], reason: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(error, match=reason):
        load_tokenizer(tmp_path)
