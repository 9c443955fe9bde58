"""GuardConfig: one [[guards]] policy of gateway.toml: the kinds it detects and what it does with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ridgeline.options import OptionError, check_range, option

# Kinds of the built-in detectors. Patterns of the config and NER's entities add more.
KINDS = ("email", "phone", "card", "iban", "ip", "ssn", "secret")
DEFAULT_REGIONS = (
    "US", "CA", "GB", "IE", "DE", "AT", "CH", "FR", "BE", "NL", "ES", "PT", "IT", "PL", "CZ", "SE", "FI",
    "GR", "TR", "IL", "IN", "CN", "JP", "KR", "AU", "NZ", "ZA", "BR", "MX", "AR",
)  # fmt: skip


@dataclass(frozen=True)
class GuardConfig:
    name: str = option("default", "the policy's name; keys without a guard use the policy named default")
    redact: tuple[str, ...] = option(KINDS, "kinds replaced by placeholders before a request leaves")
    block: tuple[str, ...] = option(
        (), "kinds for which a request is refused (400 content_blocked); takes precedence over redact"
    )
    log: tuple[str, ...] = option(
        (), "kinds only counted in the ledger row; redact and block take precedence"
    )
    restore: bool = option(True, "put the values back where an answer holds their placeholders")
    answers_redact: tuple[str, ...] = option(
        (), "kinds replaced in answers and not restored; values of the request itself are kept"
    )
    answers_block: tuple[str, ...] = option((), "kinds that end an answer with an error")
    answers_log: tuple[str, ...] = option((), "kinds that are counted in answers")
    allow: tuple[str, ...] = option(
        (), "values that are never touched: whole values, or *@example.com; case is ignored"
    )
    patterns: tuple[str, ...] = option((), "custom kinds, each name=regex; matched within a line")
    phone_regions: tuple[str, ...] = option(
        DEFAULT_REGIONS, "countries whose national phone numbers are detected"
    )
    phone_bare: bool = option(
        False, "also detect digits without +, separators or a word like phone before them"
    )
    unreadable: Literal["refuse", "pass"] = option(
        "refuse", "what to do with bodies that are not JSON text: uploads, token ids"
    )
    timeout_ms: int = option(
        2000, "CPU time for the check of a request or an answer; a longer check refuses it"
    )
    ner: bool = option(
        False, "also detect names and places, with Presidio in separate processes (extra guard)"
    )
    ner_model: str = option("en_core_web_sm", "the spaCy model, by name or path; must be installed")
    ner_language: str = option("en", "the language of the spaCy model")
    ner_kinds: tuple[str, ...] = option(
        ("person", "location"), "Presidio's entities to detect, in lower case"
    )
    ner_processes: int = option(1, "processes for NER, each with the model in memory")
    ner_timeout_ms: int = option(
        1000, "time limit for NER of a request, waiting included; a longer one fails it"
    )
    ner_max_chars: int = option(
        100_000, "most characters of text in a request with NER; longer requests are refused with 400"
    )

    def __post_init__(self) -> None:
        if not self.name:
            raise OptionError("[[guards]] name must not be empty")
        own = tuple(pattern.partition("=")[0].strip() for pattern in self.patterns)
        known = (*KINDS, *own, *(self.ner_kinds if self.ner else ()))
        for field in ("redact", "block", "log", "answers_redact", "answers_block", "answers_log"):
            for kind in getattr(self, field):
                if kind not in known:
                    raise OptionError(
                        f"[[guards]] {self.name}: {field}: unknown kind {kind!r}; known: {', '.join(known)}"
                    )
        for field in ("answers_redact", "answers_block", "answers_log"):
            if self.ner and set(getattr(self, field)) & set(self.ner_kinds):
                raise OptionError(
                    f"[[guards]] {self.name}: {field}: names and places are found in requests only"
                )
        check_range(self, f"[[guards]] {self.name}:", 1, 600_000, "timeout_ms", "ner_timeout_ms")
        check_range(self, f"[[guards]] {self.name}:", 1, 64, "ner_processes")
        check_range(self, f"[[guards]] {self.name}:", 1, 100_000_000, "ner_max_chars")
