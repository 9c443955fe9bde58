"""The real server with the real model behind the translation: what the SDKs get is what it says directly."""

from __future__ import annotations

from typing import Any

from ridgeline.gateway.body import raw
from ridgeline.gateway.dialects import StreamTranslator, UsageReader, usage_of
from tests.conftest import LiveServer
from tests.gateway.dialects.bridge import Bridge, anthropic_over, openai_over, server_at
from tests.gateway.dialects.test_translated_answers import plain_chat, plain_message

ASK: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Count to five."}]


def said(answer: dict[str, Any]) -> dict[str, Any]:
    """Without what depends on which request came first: how much of the prompt was cached."""
    return {name: value for name, value in answer.items() if name not in ("cached", "usage")}


async def test_a_chat_client_hears_the_same_through_messages(live_server: LiveServer) -> None:
    server = server_at(live_server.base_url)
    fields: dict[str, Any] = {"model": "smollm2-135m", "messages": ASK, "max_tokens": 24, "temperature": 0}
    direct = plain_chat(await openai_over(Bridge(server)).chat.completions.create(**fields))
    async with openai_over(Bridge(server, "anthropic")) as client:
        whole = plain_chat(await client.chat.completions.create(**fields))
        texts = [
            chunk.choices[0].delta.content or ""
            async for chunk in await client.chat.completions.create(**fields, stream=True)
        ]
    assert direct["content"]
    assert said(whole) == said(direct)
    assert whole["usage"] == direct["usage"]
    assert "".join(texts) == direct["content"]


async def test_a_messages_client_hears_the_same_through_chat(live_server: LiveServer) -> None:
    server = server_at(live_server.base_url)
    fields: dict[str, Any] = {
        "model": "smollm2-135m",
        "system": "Be brief.",
        "messages": ASK[1:],
        "max_tokens": 24,
        "extra_body": {"temperature": 0},  # which the SDK no longer knows
    }
    direct = plain_message(await anthropic_over(Bridge(server)).messages.create(**fields))
    async with anthropic_over(Bridge(server, "openai")) as client:
        whole = plain_message(await client.messages.create(**fields))
        async with client.messages.stream(**fields) as stream:
            streamed = plain_message(await stream.get_final_message())
    assert direct["content"]
    assert said(whole) == said(direct)
    assert said(streamed) == said(direct)
    prompt = ("input_tokens", "cache_read_input_tokens")
    for answer in (whole, streamed):
        assert sum(answer["usage"][name] for name in prompt) == sum(direct["usage"][n] for n in prompt)
        assert answer["usage"]["output_tokens"] == direct["usage"]["output_tokens"]


async def test_usage_read_before_the_translation_is_what_the_client_is_told(live_server: LiveServer) -> None:
    body = b'{"model":"smollm2-135m","max_tokens":16,"messages":[{"role":"user","content":"hi"}]%b}'
    _, _, whole = await server_at(live_server.base_url)("/v1/messages", body % b"")
    _, _, stream = await server_at(live_server.base_url)("/v1/messages", body % b',"stream":true')
    upstream, client = UsageReader("chat", "anthropic"), UsageReader("chat", "openai")
    translator = StreamTranslator("chat", "anthropic", {"stream_options": raw({"include_usage": True})})
    client.feed(translator.feed(upstream.feed(stream)))
    expected = usage_of("chat", "anthropic", whole)
    assert upstream.usage is not None
    assert expected is not None
    assert upstream.usage == client.usage
    assert (upstream.usage.tokens_in, upstream.done, client.done) == (expected.tokens_in, True, True)
