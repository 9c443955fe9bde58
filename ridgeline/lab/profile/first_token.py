"""Where the milliseconds of a first token go: a server's stages of single requests, beside the physical
limit.

For `ridgeline profile --ttft`. The client runs on the server's machine: the engine's step records and the
client share the monotonic clock. One request at a time, each with a prompt that no cache holds. What the
server does before the step is split with two other requests: one that does nothing, and one that only
tokenizes.
"""

from __future__ import annotations

import http.client
import json
import random
import statistics
import time
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ridgeline.lab.errors import BadInput, LabError
from ridgeline.lab.profile.host import read_steps
from ridgeline.telemetry.stats import StepRecord

ANSWER_S = 120.0
WARM_UP = 3  # requests that are not counted
KEPT_S = 3.0  # an idle connection is replaced: the server may be about to close it
STAGES = (
    "HTTP: the way there and back, and an empty request",
    "tokenization",
    "reading the request, hand-over to the engine",
    "planning",
    "launching the step",
    "the device, or the forward pass",
    "the token's way to the client",
)
_WORDS = ("the", "of", "to", "and", "in", "that", "it", "was", "for", "on", "with", "as", "by", "at", "from")


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """Seconds. stages: by their names, one entry per request; steps: that computed the prompt, per
    request."""

    prompt_tokens: int
    ttft_s: list[float]
    stages: dict[str, list[float]]
    steps: list[int]
    limit_s: float | None  # the weights read once, or the prompt's arithmetic, whichever is more
    limit_words: str


class _Client:
    """One connection, read as it comes."""

    def __init__(self, url: str) -> None:
        parts = urllib.parse.urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme != "http" or not parts.hostname:
            raise BadInput(f"--ttft needs an address such as http://127.0.0.1:8000, got {url!r}")
        self._address = parts.hostname, parts.port or 80
        self._connection: http.client.HTTPConnection | None = None
        self._used = 0.0

    def ask(self, method: str, path: str, body: Any = None) -> Iterator[bytes]:
        """The pieces of the answer's body, as they come."""
        connection = self._connection
        if connection is None or time.monotonic() > self._used + KEPT_S:
            if connection is not None:
                connection.close()
            connection = self._connection = http.client.HTTPConnection(*self._address, timeout=ANSWER_S)
        try:
            headers = {"content-type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise LabError(
                    f"{method} {path} answered {answer.status}: {answer.read(500).decode(errors='replace')}"
                )
            while piece := answer.read1():
                yield piece
            answer.close()
        except (OSError, http.client.HTTPException) as error:
            self._connection = None
            host, port = self._address
            raise LabError(f"http://{host}:{port}{path} did not answer: {error}") from error
        self._used = time.monotonic()

    def whole(self, method: str, path: str, body: Any = None) -> Any:
        return json.loads(b"".join(self.ask(method, path, body)))


def profile_first_tokens(url: str, prompt_tokens: int, requests: int, seed: int = 0) -> FirstTokens:
    """Send `requests` requests, one after the other, to the first model of the server at this address."""
    if requests < 1 or prompt_tokens < 1:
        raise BadInput("--requests and --prompt-tokens must be at least 1")
    client, rng = _Client(url), random.Random(seed)
    models = client.whole("GET", "/v1/models")["data"]
    if not models:
        raise LabError(f"{url} serves no model")
    model, limits = models[0]["id"], models[0].get("limits") or {}
    prompts = [_prompt(rng, client, model, prompt_tokens) for _ in range(WARM_UP + requests)]
    found = [_one(client, url, model, prompt) for prompt in prompts][WARM_UP:]
    ttfts, rows, steps = [each[0] for each in found], [each[1] for each in found], [each[2] for each in found]
    stages = {name: [row[name] for row in rows] for name in STAGES if name in rows[0]}
    return FirstTokens(prompt_tokens, ttfts, stages, steps, *_limit(limits, prompt_tokens))


def _prompt(rng: random.Random, client: _Client, model: str, tokens: int) -> str:
    """A text of about that many tokens, unlike any other."""
    words = [rng.choice(_WORDS) if place else f"{rng.random():.6f}" for place in range(2 * tokens)]
    text = " ".join(words)
    ids = client.whole("POST", "/tokenize", {"model": model, "prompt": text})["tokens"]
    if len(ids) <= tokens:
        return text
    return str(client.whole("POST", "/detokenize", {"model": model, "tokens": ids[:tokens]})["prompt"])


def _one(client: _Client, url: str, model: str, prompt: str) -> tuple[float, dict[str, float], int]:
    """Seconds to the first token, the stages, and how many steps it took."""
    started = time.monotonic()
    client.whole("GET", "/health")
    empty_s = time.monotonic() - started
    started = time.monotonic()
    client.whole("POST", "/tokenize", {"model": model, "prompt": prompt})
    tokenize_s = max(0.0, time.monotonic() - started - empty_s)

    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": 2,
        "temperature": 0.0,
        "stream": True,
        "ignore_eos": True,
    }
    asked, first, said = time.monotonic(), 0.0, b""
    for piece in client.ask("POST", "/v1/completions", body):
        said += piece
        if not first and b'"text":' in said:
            first = time.monotonic()
    if not first:
        raise LabError(f"the answer held no token: {said[:300].decode(errors='replace')}")
    records = [
        record for record in read_steps(url) if record.prefill_tokens and asked <= record.start <= first
    ]
    if not records:
        raise LabError(
            "the server's step records have no step of the request: --ttft must run on the server's machine, "
            "with no other request on the server"
        )
    return first - asked, _stages(asked, first, empty_s, tokenize_s, records), len(records)


def _stages(
    asked: float, first: float, empty_s: float, tokenize_s: float, records: list[StepRecord]
) -> dict[str, float]:
    before = records[0].start - asked
    # Half of an empty request's time is on the way back.
    there = min(empty_s / 2, before)
    tokenization = min(tokenize_s, before - there)
    planning, launching = sum(r.schedule_s for r in records), sum(r.launch_s for r in records)
    computed = records[-1].start + records[-1].schedule_s + records[-1].wall_s
    waiting = max(0.0, computed - records[0].start - planning - launching)
    return dict(
        zip(
            STAGES,
            (
                there,
                tokenization,
                before - there - tokenization,
                planning,
                launching,
                waiting,
                first - computed,
            ),
            strict=True,
        )
    )


def _limit(limits: dict[str, float], tokens: int) -> tuple[float | None, str]:
    """limits: as the server measured them at its start."""
    decode, prefill = limits.get("decode_tokens_per_s"), limits.get("prefill_tokens_per_s")
    if not decode or not prefill:
        return None, "the server does not tell its limits"
    weights_s, flops_s = 1 / decode, tokens / prefill
    if weights_s >= flops_s:
        return weights_s, "the weights are read once"
    return flops_s, f"the arithmetic of {tokens} tokens"


def first_token_lines(found: FirstTokens) -> Iterator[str]:
    ttft = sorted(1e3 * each for each in found.ttft_s)
    median = statistics.median(ttft)
    yield (
        f"first token of {found.prompt_tokens} tokens: {median:.2f} ms (median of {len(ttft)}, "
        f"{ttft[0]:.2f} to {ttft[-1]:.2f})"
    )
    if max(found.steps) > 1:
        yield f"the prompt took up to {max(found.steps)} steps"
    yield f"  {'stage':<52} {'median ms':>9} {'p90':>8}  of the median"
    for name, values in found.stages.items():
        ordered = sorted(1e3 * value for value in values)
        middle, late = statistics.median(ordered), ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]
        yield f"  {name:<52} {middle:>9.2f} {late:>8.2f}  {middle / median:>6.1%}"
    if found.limit_s is None:
        yield f"limit unknown: {found.limit_words}"
        return
    limit = 1e3 * found.limit_s
    device = 1e3 * statistics.median(found.stages[STAGES[5]])
    alone = limit / max(device, 1e-6)
    yield (
        f"limit {limit:.2f} ms ({found.limit_words}): the first token reaches {limit / median:.0%} of it, "
        f"its forward pass alone {alone:.0%}"
    )
