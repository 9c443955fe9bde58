"""Restorer: redacts an answer, then puts the request's own values back in place of their placeholders.

Works on whole and on streamed answers, in the client's dialect. Made by `guards.py` for one request; the
pipeline calls `answer` or `stream`.
"""

from __future__ import annotations

import msgspec

from ridgeline.gateway.errors import GatewayError
from ridgeline.gateway.guard.config import GuardConfig
from ridgeline.gateway.guard.errors import Blocked, GuardFailed
from ridgeline.gateway.guard.json_text import JsonText, TextChannel
from ridgeline.gateway.guard.placeholders import RestoredText, Vault
from ridgeline.gateway.guard.scanner import Budget, OutOfTime, ScannedText, Scanner, context_of
from ridgeline.gateway.guard.stream import GuardedStream, Texts
from ridgeline.gateway.guard.walk import Walk

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode
_TAG_BYTES = (b"<", b"&", b"\\")  # an escape may stand for one of the others


class Restorer:
    """`findings`: kinds found in the answer so far, and how often."""

    def __init__(self, config: GuardConfig, kind: str, vault: Vault | None, scanner: Scanner | None) -> None:
        self.findings: dict[str, int] = {}
        self.policy = config.name
        self.pieces: list[bytes] = []  # of the vault, if another process has already encoded them
        self._kind = kind
        self._vault = vault
        self._scanner = scanner
        self._redact, self._block = frozenset(config.answers_redact), frozenset(config.answers_block)
        self._budget = Budget(config.timeout_ms / 1000)
        self._lets_unreadable = config.unreadable == "pass"
        # Skip the deltas of a text: the text itself is checked.
        dropped = frozenset(("logprobs",)) if self._redact or self._block else frozenset()
        self._walk = Walk(
            lambda text, name: _through(self._channel(name), text),
            lambda text: _through(self._arguments(), text),
            lambda text: _through(self._thinking(), text),
            dropped=dropped,
        )

    def answer(self, kind: str, body: bytes) -> bytes:
        """A whole answer. Raises Blocked or GuardFailed, and then nothing of it may be passed on."""
        try:
            return self._answer(body)
        except Exception as error:
            raise _failure(error) from None

    def vault_pieces(self) -> list[bytes]:
        return self.pieces or (self._vault.pieces() if self._vault is not None else [])

    def stream(self, kind: str) -> AnswerStream:
        """An object with feed(bytes) -> bytes and finish() -> bytes, for one streamed answer."""
        return AnswerStream(self)

    def _answer(self, body: bytes) -> bytes:
        self._budget.restart()
        if self._untouched(body):
            return body
        try:
            value = _decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            if self._scanner is None or self._lets_unreadable:
                return body
            raise GuardFailed(
                "the answer is not valid JSON; this key's policy withholds answers it cannot check"
            ) from None
        changed = self._walk.value(value, "")
        return body if changed == value else _encode(changed)

    def _untouched(self, data: bytes) -> bool:
        return self._scanner is None and not any(sign in data for sign in _TAG_BYTES)

    # ---- channels ----

    def _texts(self) -> Texts:
        return Texts(
            text=self._channel,
            arguments=self._arguments,
            thinking=self._thinking,
            whole=lambda value: self._walk.value(value, ""),
            untouched=self._untouched,
            restart=self._budget.restart,
        )

    def _channel(self, name: str = "") -> TextChannel:
        return _Chain(self._scanned(name), RestoredText(self._vault) if self._vault else None)

    def _thinking(self) -> TextChannel:
        """Keeps its placeholders: a changed text would no longer match its signature in the next request."""
        return _Chain(self._scanned(""), None)

    def _arguments(self) -> TextChannel:
        return JsonText(self._channel, self._outside if self._scanner is not None else None)

    def _outside(self, name: str) -> TextChannel:
        return _Chain(self._scanned(name, quoted=True), None)

    def _scanned(self, name: str, quoted: bool = False) -> ScannedText | None:
        if self._scanner is None:
            return None
        replace = self._quoted if quoted else self._replace
        return ScannedText(self._scanner, replace, context_of(name), self._budget)

    def _replace(self, kind: str, value: str) -> str:
        self.findings[kind] = self.findings.get(kind, 0) + 1
        if kind in self._block:
            raise Blocked("the answer", {kind: 1})
        return f"<{kind.upper()}>" if kind in self._redact else value

    def _quoted(self, kind: str, value: str) -> str:
        replaced = self._replace(kind, value)
        return value if replaced == value else f'"{replaced}"'


class AnswerStream:
    """GuardedStream that fails closed: after an error it returns no more bytes."""

    def __init__(self, restorer: Restorer) -> None:
        self._stream: GuardedStream | None = GuardedStream(restorer._texts())

    def feed(self, data: bytes) -> bytes:
        return self._done(data)

    def finish(self) -> bytes:
        return self._done(None)

    def _done(self, data: bytes | None) -> bytes:
        stream, self._stream = self._stream, None
        if stream is None:
            raise GuardFailed("the answer was withheld")
        try:
            out = stream.finish() if data is None else stream.feed(data)
        except Exception as error:
            raise _failure(error) from None
        self._stream = stream
        return out


def _failure(error: Exception) -> GatewayError:
    """The client's error. Leaves out the cause's own message, which may hold text of the answer."""
    if isinstance(error, GatewayError):
        return error
    if isinstance(error, OutOfTime):
        return GuardFailed("the guard exceeded its time limit (timeout_ms); the answer is withheld")
    return GuardFailed(f"the guard failed ({type(error).__name__}); the answer is withheld")


class _Chain:
    """Redaction, then restoring; either may be absent."""

    def __init__(self, first: ScannedText | None, second: RestoredText | None) -> None:
        self._first = first
        self._second = second

    @property
    def holds(self) -> bool:
        first, second = self._first, self._second
        return (first is not None and first.holds) or (second is not None and second.holds)

    def feed(self, piece: str) -> str:
        if self._first is not None:
            piece = self._first.feed(piece)
        return piece if self._second is None else self._second.feed(piece)

    def finish(self) -> str:
        rest = self._first.finish() if self._first is not None else ""
        if self._second is None:
            return rest
        return self._second.feed(rest) + self._second.finish()


def _through(channel: TextChannel, text: str) -> str:
    return channel.feed(text) + channel.finish()
