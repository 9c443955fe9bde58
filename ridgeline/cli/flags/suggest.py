"""What a user may have meant by a flag or a verb that does not exist: by spelling, then by meaning."""

from __future__ import annotations

import argparse
import difflib
import math
import re
from collections.abc import Iterable, Sequence

SPELLING = 0.75  # share of equal characters from which a word is a misspelling
ALIAS_SPELLING = 0.92  # the same for flags of other tools: there are many, and some mean the opposite
CLOSE = 0.8  # a second flag with this share of the best score is named too
ENOUGH = 1.0  # least score: one word of the flag's meaning that few other flags share

# How users of other tools name what an option does. A flag's own words and its help count as well.
MEANINGS = {
    "max_context": "context ctx length len window model sequence position",
    "max_running": "batch size parallel concurrent concurrency sequences seqs slots users running",
    "step_tokens": "batched batch tokens chunk budget iteration",
    "prefill_chunk": "chunked chunk prefill",
    "max_waiting": "queue queued pending backlog",
    "memory_fraction": "gpu memory mem utilization vram ram fraction percent",
    "kv_tokens": "kv cache size tokens blocks",
    "kv_memory_gib": "kv cache memory space bytes size",
    "kv_dtype": "kv cache type precision quantization",
    "weights": "quantization quantize quant precision bits int8 int4 half fp16 bf16",
    "backend": "device cpu gpu cuda accelerator",
    "threads": "cpus cores cpu jobs",
    "cuda_graphs": "eager compile compilation capture graph",
    "prefix_cache": "prompt caching radix reuse",
    "overlap": "async asynchronous scheduling",
    "deterministic": "invariant reproducible determinism",
    "host": "bind listen address interface ip addr",
    "port": "listen",
    "api_keys": "auth authentication password secret key bearer",
    "ssl_certfile": "tls https certificate cert",
    "ssl_keyfile": "tls https private",
    "served_model_name": "model name id",
    "cors_origins": "cors origin allow",
    "log_level": "verbose verbosity debug quiet logging loglevel",
    "request_timeout_s": "timeout deadline",
    "drain_s": "graceful shutdown grace stop",
    "state_dir": "data directory folder storage",
    "max_body_bytes": "payload upload",
    "tool_parser": "tool function call",
    "reasoning_parser": "thinking think reasoning",
    "reasoning_budget": "thinking effort tokens limit",
    "otlp_endpoint": "tracing traces opentelemetry otel",
    "max_tokens": "predict length output generate new",
    "temperature": "temp randomness",
    "repetition_penalty": "repeat",
    "rate": "qps rps arrival request frequency",
    "requests": "prompts count total number samples",
    "input": "prompt length isl",
    "output": "completion length osl",
    "concurrency": "users parallel clients workers",
    "slo": "goodput targets sla",
    "duration_s": "time length minutes",
    "out": "output result results directory folder save",
}
_COMMON_TEXT = (
    "max min num number of the a an to in for and or no not is are as with by on at enable disable use set "
    "default value s n it its per most least"
)
_COMMON = frozenset(_COMMON_TEXT.split())


def flag_suggestion(flag: str, parser: argparse.ArgumentParser) -> str:
    """`; did you mean --port (port to listen on)?`, or nothing."""
    flags = {
        string: action
        for action in parser._actions
        for string in action.option_strings
        if string.startswith("--")
    }
    shown = {string: action for string, action in flags.items() if action.help is not argparse.SUPPRESS}
    if not flag.startswith("-"):
        return ""
    spelled = _by_spelling(flag, shown, SPELLING)
    aliases = _by_spelling(flag, flags.keys() - shown.keys(), ALIAS_SPELLING)
    spelled = sorted(spelled + aliases, key=lambda string: -_likeness(flag, string))[:1]
    meant = spelled or [_negated(flag, string, shown) for string in _by_meaning(flag, shown)]
    if not meant:
        return ""
    first = flags[meant[0]]
    help_text = "" if spelled or not first.help else f" ({_short(first.help)})"
    return f"; did you mean {' or '.join(meant)}{help_text if len(meant) == 1 else ''}?"


def verb_suggestion(word: str, verbs: Iterable[str], others: dict[str, str]) -> str:
    """others: words that users of other tools try, with the command here."""
    near = difflib.get_close_matches(word, list(verbs), n=1, cutoff=0.6)
    if word in others:
        return f"; did you mean `{others[word]}`?"
    return f"; did you mean `{near[0]}`?" if near else ""


def _by_spelling(flag: str, known: Iterable[str], cutoff: float) -> list[str]:
    """The flag with the nearest spelling, if it is near enough. The dashes do not count."""
    names = {string.lstrip("-"): string for string in sorted(known)}
    return [names[name] for name in difflib.get_close_matches(flag.lstrip("-"), names, n=1, cutoff=cutoff)]


def _likeness(flag: str, string: str) -> float:
    return difflib.SequenceMatcher(None, string.lstrip("-"), flag.lstrip("-")).ratio()


def _negated(flag: str, meant: str, shown: dict[str, argparse.Action]) -> str:
    negative = f"--no-{meant.removeprefix('--')}"
    return negative if flag.startswith(("--no-", "--disable-")) and negative in shown else meant


def _by_meaning(flag: str, shown: dict[str, argparse.Action]) -> list[str]:
    """The flags whose words share most with this one's; words that many flags have count less."""
    asked = [word for word in _words(flag) if word not in _COMMON]
    meanings = {
        string: _meaning(action) for string, action in shown.items() if not string.startswith("--no-")
    }
    scores = {}
    rarity = {word: _rarity(word, [meant | own for meant, own, _ in meanings.values()]) for word in asked}
    for string, (meant, own, helped) in meanings.items():
        weights = ((meant, 1.0), (own, 0.85), (helped, 0.25))
        scores[string] = sum(
            rarity[word] * next((weight for words, weight in weights if word in words), 0.0) for word in asked
        )
    best = max(scores.values(), default=0.0)
    if best < ENOUGH:
        return []
    ranked = sorted(scores, key=lambda string: -scores[string])
    return [string for string in ranked[:2] if scores[string] >= CLOSE * best]


def _meaning(action: argparse.Action) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """The words of its meaning, of its name, and of its help."""
    name = action.dest.rpartition(".")[2]
    texts = MEANINGS.get(name, ""), " ".join(action.option_strings), action.help or ""
    meant, own, helped = (frozenset(_words(text)) for text in texts)
    return meant, own, helped


def _rarity(word: str, meanings: Sequence[frozenset[str]]) -> float:
    having = sum(word in words for words in meanings)
    return math.log(1 + len(meanings) / having) if having else 0.0


def _words(text: str) -> list[str]:
    return [word[:-1] if len(word) > 3 and word.endswith("s") else word for word in _split(text)]


def _split(text: str) -> list[str]:
    return re.findall(r"[a-z][a-z0-9]*", text.lower())


def _short(help_text: str) -> str:
    """The first clause of a flag's help."""
    first = re.split(r"[;(]|\. ", help_text.replace("%%", "%"), maxsplit=1)[0].strip()
    return first if len(first) <= 80 else first[:77] + "…"
