"""Target: the server under test: its address, model, supported fields and limits.

`find_target` sends the server a few small requests before a run. Fields it refuses are left out of every body
and listed in the run's settings. Nothing here is timed.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import ssl
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import msgspec

from ridgeline.lab.bench.client.client import Address
from ridgeline.lab.bench.client.plain_http import ask
from ridgeline.lab.bench.client.streamed_answer import body_message
from ridgeline.lab.bench.config import Api, BenchConfig
from ridgeline.lab.errors import BadInput, LabError
from ridgeline.proxy.errors import ProxyError

PATHS: dict[Api, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
TRIAL_TIMEOUT_S = 120.0  # the first request of a server that compiles or loads on demand

# `owned_by` of /v1/models, and the fields beyond OpenAI's that such a server is known to take.
_IGNORE_EOS = {"ignore_eos": True}
_RUNNING_USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
KINDS: dict[str, dict[str, Any]] = {
    "ridgeline": {**_IGNORE_EOS, "include_timing": True},
    "vllm": {**_IGNORE_EOS, **_RUNNING_USAGE},
    "sglang": {**_IGNORE_EOS, **_RUNNING_USAGE},
    "llamacpp": {**_IGNORE_EOS},
}
SALTED = ("ridgeline", "vllm")


class _Card(msgspec.Struct):
    id: str
    owned_by: str | None = None
    max_model_len: int | None = None
    limits: dict[str, float] | None = None  # ours


class _Models(msgspec.Struct):
    data: list[_Card]


@dataclass(frozen=True, slots=True)
class Target:
    """fields: of every body besides prompt and length. refused: fields that the server did not accept.
    limits: the machine's limits by name (`decode_tokens_per_s`, …); {}: unknown.
    """

    address: Address
    base: str
    model: str
    kind: str
    path: str
    fields: dict[str, Any]
    length_field: str = "max_tokens"
    refused: tuple[str, ...] = ()
    max_context: int | None = None
    limits: dict[str, float] = field(default_factory=dict)
    headers: str = ""
    cache_salt: str = ""

    def request(self, prompt: dict[str, Any], output_tokens: int) -> bytes:
        """The whole HTTP request."""
        body = msgspec.json.encode({**self.fields, **prompt, self.length_field: output_tokens})
        head = (
            f"POST {self.base}{self.path} HTTP/1.1\r\nhost: {self.address.authority}\r\n"
            "content-type: application/json\r\naccept: text/event-stream\r\n"
            f"content-length: {len(body)}\r\n{self.headers}\r\n"
        )
        return head.encode() + body

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """A request outside the load: the answer's JSON, or None if the server refuses."""
        try:
            status, answer = await ask(
                self.address, "POST", self.base + path, body, self.headers, TRIAL_TIMEOUT_S
            )
        except ProxyError as error:
            raise LabError(f"no answer to {path} before the run: {error}") from error
        if status != 200:
            return None
        try:
            found = msgspec.json.decode(answer)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        return found if isinstance(found, dict) else None


async def find_target(config: BenchConfig) -> Target:
    """Probe the server. Raises LabError if it cannot be reached or refuses every form of a request."""
    address, base = await _locate(config.url, config.deadlines.connect_s)
    headers = f"authorization: Bearer {config.api_key}\r\n" if config.api_key else ""
    if any(mark in config.api_key for mark in "\r\n"):
        raise BadInput("the API key has a line break in it")
    card = await _card(address, base, headers, config)
    kind = card.owned_by if card.owned_by in KINDS else "other"
    salt = secrets.token_hex(8) if kind in SALTED and config.cache != "as_is" else ""
    target = Target(
        address,
        base,
        card.id,
        kind,
        PATHS[config.api],
        _fields(config, card.id, kind, salt),
        max_context=card.max_model_len,
        limits=card.limits or {},
        headers=headers,
        cache_salt=salt,
    )
    return await _tried(target, config)


async def reach(url: str, connect_s: float) -> None:
    """Raises LabError or BadInput if the server does not accept connections; called before anything slow."""
    await _locate(url, connect_s)


async def _locate(url: str, connect_s: float) -> tuple[Address, str]:
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
    except ValueError:  # e.g. half an IPv6 address
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BadInput(f"{url!r} is not a server's address: write http://HOST:PORT")
    if parts.username is not None or parts.password is not None:
        raise BadInput(
            "the address contains a user name or password, which would be stored with the run: use --api-key"
        )
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        raise BadInput(f"{url!r}: the port is not a number from 1 to 65535") from None
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(connect_s):
            found = await loop.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # a host name with an empty or too long label cannot be encoded
        words = str(error) or "no answer in time"
        raise LabError(f"{parts.hostname} cannot be resolved: {words}") from error
    failure: OSError = ConnectionRefusedError("no address")
    for *_, place in found:
        address = Address(parts.hostname, str(place[0]), port, tls)
        try:
            async with asyncio.timeout(connect_s):
                _, writer = await asyncio.open_connection(
                    address.ip, port, ssl=tls, server_hostname=parts.hostname if tls else None
                )
            writer.close()
            return address, parts.path.rstrip("/").removesuffix("/v1")
        except OSError as error:
            failure = error
    words = str(failure) or "no answer in time"
    raise LabError(f"cannot reach {url}: {words}; is a server running there?")


async def _card(address: Address, base: str, headers: str, config: BenchConfig) -> _Card:
    try:
        status, body = await ask(address, "GET", f"{base}/v1/models", None, headers)
    except ProxyError as error:
        raise LabError(f"{config.url} accepts connections but does not answer: {error}") from error
    if status in (401, 403):
        raise LabError(f"{config.url} answered {status}: {body_message(body)}; give --api-key")
    cards: list[_Card] = []
    if status == 200:
        try:
            cards = msgspec.json.decode(body, type=_Models).data
        except (msgspec.DecodeError, UnicodeDecodeError):
            cards = []
    if config.model:
        return next((card for card in cards if card.id == config.model), _Card(config.model))
    if not cards:
        raise LabError(f"{config.url} does not list its models (HTTP {status}): name one with --model")
    return cards[0]


def _fields(config: BenchConfig, model: str, kind: str, salt: str) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        **KINDS.get(kind, _IGNORE_EOS),
    }
    if not config.ignore_eos:
        fields.pop("ignore_eos", None)
    if not config.include_timing:
        fields.pop("include_timing", None)
    if config.temperature is not None:
        fields["temperature"] = config.temperature
    if salt:
        fields["cache_salt"] = salt
    return fields | config.extra


# Fields to drop, in this order, when a server refuses a request.
_OPTIONAL = ("include_timing", "cache_salt", "ignore_eos", "temperature", "stream_options")


async def _tried(target: Target, config: BenchConfig) -> Target:
    """Send one small request like those of the run; leave out fields that the server refuses."""
    word: dict[str, Any] = {"prompt": "the"}
    if config.api == "chat":
        word = {"messages": [{"role": "user", "content": "the"}]}
    fields, refused, length = dict(target.fields), [], "max_tokens"
    left = [name for name in _OPTIONAL if name in fields and name not in config.extra]
    while True:
        body = {**fields, **word, length: 2}
        body |= {"stream": False}
        body.pop("stream_options", None)
        if "stream_options" in fields:
            body |= {"stream": True, "stream_options": fields["stream_options"]}
        try:
            status, answer = await ask(
                target.address, "POST", target.base + target.path, body, target.headers, TRIAL_TIMEOUT_S
            )
        except ProxyError as error:
            raise LabError(f"{config.url} did not answer a first small request: {error}") from error
        if status == 200:
            break
        words = body_message(answer)
        if status in (400, 422) and length == "max_tokens" and "max_completion_tokens" in words:
            length = "max_completion_tokens"
        elif status in (400, 422) and fields.get("stream_options", {}).get("continuous_usage_stats"):
            fields["stream_options"] = {"include_usage": True}  # keep the final usage
            refused.append("continuous_usage_stats")
        elif status in (400, 422) and left:
            named = next((name for name in left if name in words), left[0])
            left.remove(named)
            refused.append(named)
            del fields[named]
        else:
            raise LabError(f"{config.url} refuses a first small request: HTTP {status}: {words}")
    return Target(
        target.address,
        target.base,
        target.model,
        target.kind,
        target.path,
        fields,
        length,
        tuple(refused),
        target.max_context,
        target.limits,
        target.headers,
        "" if "cache_salt" in refused else target.cache_salt,
    )
