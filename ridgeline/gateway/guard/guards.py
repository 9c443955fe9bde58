"""Guards: the policies of gateway.toml. Every guarded request and answer passes through here.

The pipeline calls `guards.policy(key.guard)` and awaits `guard.request(kind, fields)` before it forwards
anything; the result holds the restorer for the answer. Any failure here fails the request with 500
guard_failed: nothing unchecked is forwarded, and no text of it appears in an error or a log.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec

from ridgeline.gateway.body import Fields
from ridgeline.gateway.errors import BadRequest, GatewayError
from ridgeline.gateway.guard.answers import Restorer
from ridgeline.gateway.guard.config import KINDS, GuardConfig
from ridgeline.gateway.guard.errors import Blocked, GuardFailed, Unreadable
from ridgeline.gateway.guard.json_text import JsonText
from ridgeline.gateway.guard.ner import NameFinder
from ridgeline.gateway.guard.patterns import compiled
from ridgeline.gateway.guard.phones import PhoneDetector
from ridgeline.gateway.guard.placeholders import Vault
from ridgeline.gateway.guard.scanner import (
    Budget,
    Finding,
    OutOfTime,
    ScannedText,
    Scanner,
    built_in,
    context_of,
)
from ridgeline.gateway.guard.walk import Walk
from ridgeline.options import OptionError

Action = Literal["pass", "redacted", "blocked"]

# A body is checked in this process up to this many bytes and this many characters that detectors look at
# closely. Detectors take up to 50 µs per character of the worst text; larger bodies go to another process.
_AT_ONCE = 2_048
_FEW_SIGNS = 64
_SIGNS = b"0123456789@%:()+"
_NONE = object()

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class GuardedRequest:
    fields: Fields  # forwarded in place of the client's
    findings: dict[str, int]  # number of findings by kind
    action: Action
    restorer: Restorer | None  # None: the answer is passed on unchanged


class Offload(Protocol):
    """Where large bodies are checked: `ridgeline.gateway.offload.offload`."""

    async def run(self, tenant: str, job: str, *arguments: Any) -> Any: ...


@dataclass(slots=True)
class Guarded:
    """A check's result as another process returns it."""

    fields: dict[str, bytes] | None  # None: unchanged
    findings: dict[str, int]
    action: Action
    vault: list[bytes]  # in pieces; empty: nothing was replaced


class Guards:
    """All policies by name. `close` stops the NER processes."""

    def __init__(self, configs: Iterable[GuardConfig], offload: Offload | None = None) -> None:
        self._guards: dict[str, Guard] = {}
        for config in configs:
            if config.name in self._guards:
                raise OptionError(f"[[guards]] two policies are named {config.name!r}; rename one")
            self._guards[config.name] = Guard(config, offload)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._guards)

    def policy(self, name: str) -> Guard | None:
        """The policy of this name; for an empty name the one named default, if it exists."""
        guard = self._guards.get(name or "default")
        if guard is None and name:
            # A key whose policy is missing from the config must not go unguarded.
            raise GuardFailed("the key's guard policy is not configured")
        return guard

    async def start(self) -> None:
        """Start the NER processes of policies that need them, and wait until they can answer."""

        async def start(guard: Guard) -> None:
            try:
                await guard.start()
            except GuardFailed as error:
                raise OptionError(f"[[guards]] {guard.config.name}: {error}") from None

        await asyncio.gather(*map(start, self._guards.values()))

    @property
    def are_ready(self) -> bool:
        """Whether every policy can be applied now: at least one of its NER processes runs."""
        return all(guard.is_ready for guard in self._guards.values())

    async def close(self) -> None:
        for guard in self._guards.values():
            await guard.close()


class Guard:
    def __init__(self, config: GuardConfig, offload: Offload | None = None) -> None:
        """offload: None in the process that does the work itself."""
        self.config = config
        self._offload = offload
        patterns = compiled(config.patterns, known=KINDS)
        requests = (*config.redact, *config.block, *config.log)
        answers = (*config.answers_redact, *config.answers_block, *config.answers_log)
        phone = None
        if "phone" in requests or "phone" in answers:
            phone = PhoneDetector(config.phone_regions, config.phone_bare)
        allow = _allowed(config.allow)

        def scanner(kinds: Iterable[str]) -> Scanner:
            wanted = set(kinds)
            lines = {kind: pattern for kind, pattern in patterns.items() if kind in wanted}
            return Scanner(built_in(wanted, phone), lines, allow)

        self._scanner = scanner(requests)
        self._answer_scanner = scanner(answers) if answers else None
        self._names = NameFinder(config) if config.ner else None

    async def request(self, kind: str, fields: Fields, tenant: str = "") -> GuardedRequest:
        """The fields to forward in place of these. Raises Blocked, Unreadable or GuardFailed."""
        with _failing_closed():
            if self._offload is not None and not _is_light(fields):
                return await self._request_elsewhere(self._offload, kind, fields, tenant)
            names = await self._found_names(self.texts(fields)) if self._names is not None else {}
            changed, check = self._checked(kind, fields, names)
            return self._guarded(kind, changed, check.found, check.vault)

    def check(self, kind: str, fields: Fields, names: dict[str, list[Finding]]) -> Guarded:
        """The same without NER; called in another process."""
        with _failing_closed():
            changed, check = self._checked(kind, fields, names)
            plain = None if changed is fields else {name: bytes(value) for name, value in changed.items()}
            vault = check.vault.pieces() if check.vault else []
            return Guarded(plain, check.found, "redacted" if check.vault else "pass", vault)

    def refuse_unreadable(self, kind: str) -> None:
        """For bodies that are not JSON: raises if the policy refuses them."""
        if self.config.unreadable == "refuse":
            raise Unreadable(f"{kind}: this key's policy allows only bodies that are JSON text")

    async def start(self) -> None:
        """Start NER. Raises GuardFailed if its model cannot be loaded."""
        if self._names is not None:
            await self._names.start()

    @property
    def is_ready(self) -> bool:
        return self._names is None or self._names.is_ready

    async def close(self) -> None:
        if self._names is not None:
            await self._names.close()

    async def _request_elsewhere(
        self, offload: Offload, kind: str, fields: Fields, tenant: str
    ) -> GuardedRequest:
        plain = {name: bytes(value) for name, value in fields.items()}
        names = {}
        if self._names is not None:
            names = await self._found_names(await offload.run(tenant, "texts", self.config.name, plain))
        guarded: Guarded = await offload.run(tenant, "guard", self.config.name, kind, plain, names)
        if guarded.fields is not None:
            fields = {name: msgspec.Raw(value) for name, value in guarded.fields.items()}
        vault = await Vault.of_pieces(guarded.vault) if guarded.vault else Vault()
        request = self._guarded(kind, fields, guarded.findings, vault)
        if request.restorer is not None:
            request.restorer.pieces = guarded.vault
        return request

    def restored(self, kind: str, body: bytes, pieces: list[bytes]) -> tuple[bytes, dict[str, int]]:
        """A large answer, and the findings in it; called in another process."""
        vault = Vault.whole(pieces) if pieces else None
        restorer = Restorer(self.config, kind, vault, self._answer_scanner)
        return restorer.answer(kind, body), restorer.findings

    def _guarded(self, kind: str, fields: Fields, findings: dict[str, int], vault: Vault) -> GuardedRequest:
        kept = vault if self.config.restore and vault else None
        restorer = None
        if kept is not None or self._answer_scanner is not None:
            restorer = Restorer(self.config, kind, kept, self._answer_scanner)
        return GuardedRequest(fields, findings, "redacted" if vault else "pass", restorer)

    def _checked(self, kind: str, fields: Fields, names: dict[str, list[Finding]]) -> tuple[Fields, _Check]:
        values = _values(fields)
        check = _Check(self, Budget(self.config.timeout_ms / 1000), names)
        check.vault.start_behind(_earlier(values))
        if self.config.restore and any(b"<" in raw or b"&lt;" in raw for raw in map(bytes, fields.values())):
            check.avoid(values)
        changed = {}
        for name, value in values.items():
            check.param = name
            changed[check.walk.name(name)] = check.walk.value(value, name)
        if check.blocked:
            raise Blocked("the request", check.blocked, param=check.blocked_param)
        # Encode again even if nothing changed: the upstream then reads a duplicate field name as it was
        # read here.
        if self.config.redact or self.config.block:
            fields = {
                name: fields[name]
                if _is_same(value, values.get(name, _NONE))
                else msgspec.Raw(_encode(value))
                for name, value in changed.items()
            }
        return fields, check

    def texts(self, fields: Fields) -> list[str]:
        """Every text that is checked, for NER."""
        texts: dict[str, None] = {}

        def note(text: str, name: str = "") -> str:
            texts[text] = None
            return text

        def json_text(text: str) -> str:
            channel = JsonText(lambda key: _Noted(note), None)
            return channel.feed(text) + channel.finish()

        walk = Walk(note, json_text, note)
        for name, value in _values(fields).items():
            walk.value(value, name)
        return list(texts)

    async def _found_names(self, texts: list[str]) -> dict[str, list[Finding]]:
        """Findings of NER by text."""
        assert self._names is not None
        return await self._names.find(texts)


class _Check:
    """The check of one request: replaces findings in each text and counts them."""

    def __init__(self, guard: Guard, budget: Budget, names: dict[str, list[Finding]]) -> None:
        config = guard.config
        self.found: dict[str, int] = {}
        self.blocked: dict[str, int] = {}
        self.blocked_param: str | None = None
        self.param = ""
        self.vault = Vault()
        self._block, self._redact = frozenset(config.block), frozenset(config.redact)
        self._scanner = guard._scanner
        self._budget = budget
        self._names = names
        self._refuse = guard.config.unreadable == "refuse"
        self.walk = Walk(self._text, self._json_text, self._text, self._tokens)

    def avoid(self, values: dict[str, Any]) -> None:
        """Reserve placeholders that the client wrote itself; those in thinking are the gateway's."""

        def look(text: str, name: str = "") -> str:
            self.vault.avoid(text)
            return text

        walk = Walk(look, look, lambda text: text)
        for name, value in values.items():
            walk.value(value, name)

    def _text(self, text: str, name: str = "") -> str:
        self._budget.check()
        if self._names.get(text):
            text = self._without_names(text)
        context = context_of(name)
        return self._scanner.replaced(text, self._replace, context, self._budget)

    def _without_names(self, text: str) -> str:
        out, at = [], 0
        for start, end, kind in self._names[text]:
            out += [text[at:start], self._replace(kind, text[start:end])]
            at = end
        return "".join([*out, text[at:]])

    def _json_text(self, text: str) -> str:
        channel = JsonText(self._inside, self._outside)
        return channel.feed(text) + channel.finish()

    def _inside(self, key: str) -> Any:
        if self._names:
            return _Noted(lambda text: self._text(text, key))
        return ScannedText(self._scanner, self._replace, context_of(key), self._budget)

    def _outside(self, key: str) -> ScannedText:
        replace = self._replace
        return ScannedText(self._scanner, _quoted(replace), context_of(key), self._budget)

    def _tokens(self, name: str) -> None:
        if self._refuse:
            raise Unreadable(f"{name}: this key's policy needs text, not token ids", param=self.param)

    def _replace(self, kind: str, value: str) -> str:
        self.found[kind] = self.found.get(kind, 0) + 1
        if kind in self._block:
            self.blocked[kind] = self.blocked.get(kind, 0) + 1
            self.blocked_param = self.blocked_param or self.param
            return value
        return self.vault.placeholder(kind, value) if kind in self._redact else value


class _Noted:
    """A channel that passes a whole text to a function."""

    holds = False

    def __init__(self, whole: Callable[[str], str]) -> None:
        self._whole = whole
        self._text = ""

    def feed(self, piece: str) -> str:
        self._text += piece
        return ""

    def finish(self) -> str:
        return self._whole(self._text)


@contextlib.contextmanager
def _failing_closed() -> Iterator[None]:
    try:
        yield
    except GatewayError:
        raise
    except OutOfTime:
        message = (
            "the guard could not check this text within its time limit (timeout_ms); nothing was forwarded"
        )
        raise BadRequest(message, code="guard_text_too_long") from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply", code="invalid_json") from None
    except Exception as error:
        # The message may hold text of the request: give only the name of the class.
        raise GuardFailed(f"the guard failed ({type(error).__name__}); nothing was forwarded") from None


def _is_light(fields: Fields) -> bool:
    """Whether the check is short for any text of this size."""
    if sum(memoryview(value).nbytes for value in fields.values()) > _AT_ONCE:
        return False
    text = b"".join(map(bytes, fields.values()))
    return len(text) - len(text.translate(None, _SIGNS)) <= _FEW_SIGNS


def _quoted(replace: Callable[[str, str], str]) -> Callable[[str, str], str]:
    """For unquoted JSON values: a placeholder must be a string there."""

    def quoted(kind: str, value: str) -> str:
        replaced = replace(kind, value)
        return value if replaced == value else f'"{replaced}"'

    return quoted


def _earlier(values: dict[str, Any]) -> str:
    """The id of the conversation that the upstream stores, whose placeholders are not known here."""
    earlier = values.get("previous_response_id") or values.get("conversation") or ""
    return earlier if isinstance(earlier, str) else _encode(earlier).decode()


def _is_same(value: Any, original: Any) -> bool:
    return not isinstance(value, (dict, list)) and value is original


def _values(fields: Fields) -> dict[str, Any]:
    try:
        return {name: _decode(raw) for name, raw in fields.items()}
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise BadRequest("the body is not valid JSON", code="invalid_json") from None


def _allowed(values: tuple[str, ...]) -> Callable[[str], bool]:
    if not values:
        return lambda value: False
    whole = {value.casefold() for value in values if not value.startswith("*")}
    endings = tuple(value[1:].casefold() for value in values if value.startswith("*"))

    def allowed(value: str) -> bool:
        plain = value.casefold()
        return plain in whole or (bool(endings) and plain.endswith(endings))

    return allowed
