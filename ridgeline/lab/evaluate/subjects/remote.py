"""RemoteSubject: any OpenAI-compatible server. Its abilities are tried once, before the first item.

Scoring needs the log-probabilities of given text, in one of two forms: `prompt_logprobs` with token ids and
/tokenize (ours, vLLM), or `echo` with `logprobs` (older completions servers). Without both, only generative
tasks run. Chat-only servers get prompts as one user message.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ridgeline.lab.errors import BadInput, LabError
from ridgeline.lab.evaluate.scoring.generated import cut_at_stops
from ridgeline.lab.evaluate.scoring.likelihood import Pair
from ridgeline.lab.evaluate.subjects.answers import echoed, prompt_entries
from ridgeline.lab.evaluate.subjects.local import prefix_of, scored
from ridgeline.lab.evaluate.subjects.subject import Completion, Prompt, Scored, SubjectSpec
from ridgeline.lab.evaluate.subjects.tokens import token_pair
from ridgeline.lab.evaluate.verdicts import ServedFormat
from ridgeline.proxy.blocking_client import BlockingClient
from ridgeline.proxy.errors import ProxyError

if TYPE_CHECKING:
    from ridgeline.models.text.tokenizer import Tokenizer

TIMEOUT_S = 600.0
MOST_TOP = 20  # what our server and vLLM's default allow
MOST_STOPS = 4  # OpenAI's limit; a server with more is not asked for more
ATTEMPTS = 3
NO_SUCH_ENDPOINT = (400, 404, 405, 422, 501)
TRIED_AGAIN = (429, 500, 502, 503, 504)
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

In = TypeVar("In")
Out = TypeVar("Out")


class RemoteSubject:
    served: ServedFormat | None = None  # a server does not tell its format

    def __init__(self, spec: SubjectSpec, api_key: str = "") -> None:
        unknown = set(spec.settings) - {"model", "tokenizer"}
        if unknown:
            raise BadInput(
                f"{spec.text!r}: {sorted(unknown)[0]} is not for a URL; known are model and tokenizer"
            )
        self.name = spec.text
        self._client = BlockingClient(spec.name, timeout_s=TIMEOUT_S, api_key=api_key)
        tokenizer = _local_tokenizer(spec.settings.get("tokenizer"))
        self._encode_locally = None if tokenizer is None else _encoder(tokenizer)
        self._encoded: dict[tuple[str, bool], list[int]] = {}
        self._lock = threading.Lock()
        card = self._card(spec.settings.get("model"))
        self._model = str(card["id"])
        self._longest = int(card.get("max_model_len") or 1 << 20) - 1
        self.chat_only = not self._accepts({"prompt": "1", "max_tokens": 1})
        if self.chat_only and not self._accepts(_as_chat("1", 1), CHAT):
            raise LabError(f"{spec.name} answers neither {COMPLETIONS} nor {CHAT} for model {self._model!r}")
        self.prefix: int | None = None
        self._way = "" if self.chat_only else self._find_way()
        if self._way == "ids":
            self.prefix = next(iter(self._ids("", True)), None) if tokenizer is None else prefix_of(tokenizer)
        self.most_top = MOST_TOP if self._way == "ids" else 0
        self.facts: dict[str, Any] = {
            "url": spec.name,
            "model": self._model,
            "endpoint": CHAT if self.chat_only else COMPLETIONS,
            "scoring": {"ids": "prompt_logprobs", "echo": "echo with logprobs"}.get(self._way, "none"),
        }
        self.facts["identity"] = ", ".join(self.facts[name] for name in ("model", "endpoint", "scoring"))
        if self._way and self.prefix is None:
            self.facts["first_word"] = "of a text is not scored: the token before a text is not known"

    def refuse_scoring(self) -> str | None:
        if self._way:
            return None
        return (
            f"{self._client.url} gives no log-probabilities of a prompt: it supports neither "
            "`prompt_logprobs` (with /tokenize) nor `echo` with `logprobs`. Generative tasks work: gsm8k, "
            f"{'' if self.chat_only else 'humaneval, '}files with prompt/answer"
        )

    def score(self, pairs: Sequence[Pair], top: int, concurrency: int) -> list[Scored]:
        refusal = self.refuse_scoring()
        if refusal:
            raise LabError(refusal)
        return self._map(lambda pair: self._score(pair, top), pairs, concurrency)

    def complete(self, prompts: Sequence[Prompt], concurrency: int) -> list[Completion]:
        return self._map(self._complete, prompts, concurrency)

    def close(self) -> None:
        pass

    # ---- requests ----

    def _score(self, pair: Pair, top: int) -> Scored:
        if self._way == "echo":
            pair = pair.split_at_word() if pair.context else pair
            text = pair.context + pair.continuation
            body = {"prompt": text, "max_tokens": 1, "echo": True, "logprobs": 1}
            return echoed(self._ask(body), len(pair.context), len(text))
        cut = token_pair(pair, self._ids, self.prefix, self._longest)
        answer = self._ask({"prompt": cut.ids, "max_tokens": 1, "prompt_logprobs": max(top, 1)})
        return scored(cut, prompt_entries(answer, cut.ids), top, self.prefix)

    def _complete(self, prompt: Prompt) -> Completion:
        stops = list(prompt.stops[:MOST_STOPS])
        extra: dict[str, Any] = {"stop": stops} if stops else {}
        if self.chat_only:
            answer = self._ask({**_as_chat(prompt.text, prompt.max_tokens), **extra}, CHAT)
            text = str(answer["choices"][0]["message"].get("content") or "")
        else:
            answer = self._ask({"prompt": prompt.text, "max_tokens": prompt.max_tokens, **extra})
            text = str(answer["choices"][0]["text"])
        usage = answer.get("usage") or {}
        return Completion(cut_at_stops(text, prompt.stops), int(usage.get("completion_tokens") or 0))

    def _ids(self, text: str, special: bool) -> list[int]:
        if self._encode_locally is not None:
            return self._encode_locally(text, special)
        key = (text, special)
        with self._lock:
            if key in self._encoded:
                return self._encoded[key]
        status, answer = self._post(
            "/tokenize", {"model": self._model, "prompt": text, "add_special_tokens": special}
        )
        ids = answer.get("tokens")
        if status != 200 or not isinstance(ids, list):
            raise LabError(f"{self._client.url}/tokenize answered {status}: {_reason(answer)}")
        with self._lock:
            if len(self._encoded) > 4096:
                self._encoded.clear()
            self._encoded[key] = ids
        return ids

    def _ask(self, body: dict[str, Any], path: str = COMPLETIONS) -> dict[str, Any]:
        status, answer = self._post(path, {"model": self._model, "temperature": 0, **body})
        if status != 200:
            raise LabError(f"{self._client.url}{path} answered {status}: {_reason(answer)}")
        if not answer.get("choices"):
            raise LabError(f"{self._client.url}{path}: an answer without choices")
        return answer

    def _accepts(self, body: dict[str, Any], path: str = COMPLETIONS) -> bool:
        """False if the server has no such endpoint for the model; LabError if it fails otherwise."""
        status, answer = self._post(path, {"model": self._model, "temperature": 0, **body})
        if status != 200 and status not in NO_SUCH_ENDPOINT:
            raise LabError(f"{self._client.url}{path} answered {status}: {_reason(answer)}")
        return status == 200

    def _find_way(self) -> str:
        """ "ids", "echo", or "" if the server scores no given text."""
        try:
            ids = self._ids("one two three", True)
            if len(ids) > 1:
                prompt_entries(self._ask({"prompt": ids, "max_tokens": 1, "prompt_logprobs": 1}), ids)
                return "ids"
        except LabError:
            pass
        try:
            text = "one two three"
            echoed(self._ask({"prompt": text, "max_tokens": 1, "echo": True, "logprobs": 1}), 4, len(text))
        except LabError:
            return ""
        return "echo"

    def _card(self, wanted: str | None) -> dict[str, Any]:
        status, answer = self._post("/v1/models", None)
        cards = answer.get("data") if status == 200 else None
        cards = [card for card in cards or () if isinstance(card, dict) and card.get("id")]
        if wanted is not None:
            return next((card for card in cards if card["id"] == wanted), {"id": wanted})
        if not cards:
            raise LabError(f"{self._client.url}/v1/models lists no model ({status}); name it: URL,model=NAME")
        first: dict[str, Any] = cards[0]
        return first

    def _post(self, path: str, body: dict[str, Any] | None) -> tuple[int, dict[str, Any]]:
        """Status and JSON object. Overload and server errors are tried again."""
        status, found = 0, {}
        for attempt in range(ATTEMPTS):
            try:
                raw = None if body is None else msgspec.json.encode(body)
                answer = self._client.ask("GET" if raw is None else "POST", path, raw)
            except ProxyError as error:
                if attempt + 1 == ATTEMPTS:
                    raise LabError(f"{self._client.url}{path}: {error}") from error
                threading.Event().wait(2.0**attempt)
                continue
            status = answer.status
            try:
                decoded = msgspec.json.decode(answer.body)
            except (msgspec.DecodeError, UnicodeDecodeError):
                decoded = {}
            found = decoded if isinstance(decoded, dict) else {}
            if status not in TRIED_AGAIN:
                break
            if attempt + 1 < ATTEMPTS:
                threading.Event().wait(2.0**attempt)
        return status, found

    def _map(self, ask: Callable[[In], Out], work: Sequence[In], concurrency: int) -> list[Out]:
        with ThreadPoolExecutor(max_workers=concurrency) as pool:
            return list(pool.map(ask, work))


def _as_chat(text: str, max_tokens: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens}


def _encoder(tokenizer: Tokenizer) -> Callable[[str, bool], list[int]]:
    return lambda text, special: tokenizer.encode(text, add_special=special, allow_special=False)


def _local_tokenizer(model: str | None) -> Tokenizer | None:
    if model is None:
        return None
    from ridgeline.engine.client.launch import load_tokenizer
    from ridgeline.models.files.pull import ensure

    return load_tokenizer(ensure(model).path)


def _reason(answer: dict[str, Any]) -> str:
    error = answer.get("error")
    if isinstance(error, dict):
        return str(error.get("message") or error)
    return str(error or answer.get("message") or answer.get("detail") or "no reason given")
