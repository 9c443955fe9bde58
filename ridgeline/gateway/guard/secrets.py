"""Detector of secrets in one zone of folded text: formats of providers, credentials in URLs, PEM blocks, and
values after a word like `password`.

A span is the secret alone, not the word before it nor the rest of a connection string.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator

from ridgeline.gateway.guard.zones import SECRET_WORDS

Span = tuple[int, int]

_FORMATS = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    + "|".join(
        (
            r"sk-[A-Za-z0-9_-]{16,}",  # OpenAI, Anthropic, and providers with the same prefix
            r"(?:AKIA|ASIA|ABIA|ACCA|AGPA|AIDA|AROA|ANPA)[A-Z0-9]{16}(?![A-Za-z0-9])",  # AWS
            r"AIza[A-Za-z0-9_-]{30,}|ya29\.[A-Za-z0-9_.-]{20,}|GOCSPX-[A-Za-z0-9_-]{20,}|1//0[A-Za-z0-9_-]{30,}",
            r"gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}|ghs_[A-Za-z0-9_.-]{20,}",
            r"gl(?:pat|dt|rt|cbt|ptt|ft|imt|agent|soat|ffct|oas)-[A-Za-z0-9_.=-]{16,}",
            r"xox[a-z]{1,2}-[A-Za-z0-9-]{10,}|xapp-[0-9]-[A-Za-z0-9-]{10,}|xwfp-[A-Za-z0-9-]{10,}",  # Slack
            r"(?:sk|rk|pk)_(?:live|test|prod)_[A-Za-z0-9]{10,}|whsec_[A-Za-z0-9+/=]{16,}",  # Stripe
            r"eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*){1,3}",  # JWT, JWE
            r"SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}|key-[0-9a-f]{32}(?![A-Za-z0-9])",
            r"(?:SK|AC)[0-9a-f]{32}(?![A-Za-z0-9])|[0-9]{8,10}:[A-Za-z0-9_-]{35}(?![A-Za-z0-9])",
            r"npm_[A-Za-z0-9]{30,}|pypi-[A-Za-z0-9_-]{40,}|hf_[A-Za-z0-9]{20,}|r8_[A-Za-z0-9]{30,}",
            r"(?:gsk|xai|pplx|fw|nvapi|tvly|csk)[_-][A-Za-z0-9_-]{30,}|dapi[0-9a-f]{32}",
            r"shp(?:at|ca|pa|ss)_[0-9A-Fa-f]{32}|do[opr]_v1_[0-9a-f]{40,}|hvs\.[A-Za-z0-9_-]{20,}",
            r"dp\.(?:pt|st|ct|sa)\.[A-Za-z0-9.]{30,}|lin_api_[A-Za-z0-9]{30,}|(?:ntn|secret)_[A-Za-z0-9]{36,}",
            r"sq0[a-z]{3}-[A-Za-z0-9_-]{20,}|AGE-SECRET-KEY-1[A-Z0-9]{50,}|glc_[A-Za-z0-9+/=]{30,}",
            r"[A-Za-z0-9_~.-]{3}[0-9]Q~[A-Za-z0-9_~.-]{31,34}",  # Azure AD client secrets
        )
    )
    + ")"
)
_SLACK_HOOK = re.compile(r"hooks\.slack\.com/(?:services|workflows)/([A-Za-z0-9_/]{20,})")
_URL_PASSWORD = re.compile(
    r"[A-Za-z][A-Za-z0-9+.-]{1,24}://[^\s:/?#@\"'<>]{0,128}:([^\s/\"'<>]{1,256})@[^\s@\"'<>]"
)
_URL_SIGNATURE = re.compile(
    r"[?&;](?:sig|signature|x-amz-signature|code|access_token|api_?key)=([A-Za-z0-9%+/_=-]{16,})", re.I
)
_AZURE_KEY = re.compile(
    r"(?:AccountKey|SharedAccessKey|PrimaryKey|SecondaryKey)=([A-Za-z0-9+/]{40,}={0,2})", re.I
)
_PEM = re.compile(
    r"-----BEGIN [A-Z0-9 ]{0,30}PRIVATE KEY[A-Z ]{0,10}-----[A-Za-z0-9+/=\s:,\\-]{16,}?"
    r"(?:-----END [A-Z0-9 ]{0,30}PRIVATE KEY[A-Z ]{0,10}-----|\Z)"
)

_SAYS = re.compile(r"[0-9:=]")
_WORD = re.compile(SECRET_WORDS)
# From the end of the word to its value: the rest of a name, quotes, a few words, and an `is` or `=`.
_VALUE = re.compile(
    r"(?P<name>[a-z0-9_.-]{0,32})[\"'`\])*]{0,3}"
    r"(?P<between>(?:\s+(?!is\b|was\b|ist\b|est\b|es\b|è\b|é\b)[^\s=:\"'`]{1,16}){0,2}?)"
    r"(?P<says>\s{0,3}(?:=>|:=|==|->|[=:])\s{0,3}|\s*[是为為は는은]\s*|\s+(?:is|was|ist|est|es|è|é|jest|lautet)(?:\s*:)?\s+|\s+)"
    r"(?P<value>\"[^\"\n]{1,256}\"|'[^'\n]{1,256}'|`[^`\n]{1,256}`|[^\s\"'`,;<>(){}\[\]]{1,512})",
    re.I,
)
_PASSWORD_WORDS = re.compile(
    r"passw|passphrase|passcode|pwd|pw|psw|pass|passe|kennwort|contrase|has[lł]o|wachtwoord|l[oö]senord|парол|密|口令"
    r"|パスワード|비밀번호|senha|clave"
)
_SCHEME = re.compile(r"(?:bearer|basic|token|apikey|digest)\s+([A-Za-z0-9+/_.~=-]{8,1024})", re.I)
_FILE = re.compile(r"file|path|dir", re.I)
_NOT_SECRET = re.compile(
    r"[$%@&]?[{<(\[].*|\$\w+|%\w+%|[*•x.#_-]+|(?:none|null|nil|true|false|undefined|str|string|int|bytes|bool|required"
    r"|optional|changeme|example|redacted|hidden|secret|password|token)[.;!?]*|.*(?:\.environ|getenv|process\.env|\(\)).*"
    r"|https?://.*|<?[A-Za-z]+_[0-9]+>?",
    re.I,
)
_LONG_WORD = re.compile(r"[A-Za-z0-9_-]{16}")
_LONG = re.compile(r"[A-Za-z0-9+/_.~=-]+")


def is_key(text: str) -> bool:
    """Whether a text as a whole is written like a provider's key."""
    return _FORMATS.fullmatch(text) is not None


def secrets(zone: str) -> Iterator[Span]:
    if _LONG_WORD.search(zone) or "Q~" in zone:
        for match in _FORMATS.finditer(zone):
            yield match.span()
        for pattern in (_SLACK_HOOK, _URL_SIGNATURE, _AZURE_KEY):
            for match in pattern.finditer(zone):
                yield match.span(1)
    if "://" in zone:
        for match in _URL_PASSWORD.finditer(zone):
            yield match.span(1)
    if "PRIVATE KEY" in zone:
        for match in _PEM.finditer(zone):
            yield match.span()
    yield from _named(zone)


def _named(zone: str) -> Iterator[Span]:
    """The value after a word like `password` or `api_key`, if it looks like a secret."""
    if not _SAYS.search(zone):
        return  # the scanner uses the same condition to search for the words
    lowered = zone.lower()
    if len(lowered) != len(zone):  # a letter whose lower case has another length
        lowered = "".join(character.lower()[:1] for character in zone)
    for word in _WORD.finditer(lowered):
        match = _VALUE.match(zone, word.end())
        if match is None:
            continue
        start, end = match.span("value")
        scheme = _SCHEME.match(zone, start)
        if scheme is not None:
            start, end = scheme.span(1)
        elif zone[end : end + 1] in ("(", "[") or _FILE.search(match["name"]):
            continue  # code: a call or an index is not the value itself; nor is the place where it is stored
        elif zone[start] in "\"'`":
            start, end = start + 1, end - 1
        value = zone[start:end]
        if zone[start - 1] not in "\"'`":
            value = value.rstrip(".!?*:|\\")
            end = start + len(value)
        if (scheme is not None and len(value) >= 16) or _is_secret(word.group(), match, value):
            yield start, end


def _is_secret(word: str, match: re.Match[str], value: str) -> bool:
    if len(value) < 4 or _NOT_SECRET.fullmatch(value):
        return False
    says = match["says"].strip().lower()
    assigned = says in ("=", ":=", "=>", "==", "->")
    if _PASSWORD_WORDS.match(word):
        if assigned or (match["value"][0] in "\"'`" and says):
            return True
        # Prose: `the password: see below` must not count, `my password is hunter2` must.
        return bool(says) and _mixed(value)
    if not says or (match["between"].strip() and not assigned):
        return len(value) >= 20 and _random(value)
    return (len(value) >= 12 and _random(value)) or (
        assigned and len(value) >= 8 and _mixed(value) and "secret" in word
    )


def _mixed(value: str) -> bool:
    letters = any(character.isalpha() for character in value)
    others = any(not character.isalpha() for character in value)
    return (letters and others and not value.replace("-", "").replace("'", "").isalpha()) or (
        value.isdigit() and len(value) >= 4
    )


def _random(value: str) -> bool:
    """Whether it looks random: long, with letters and digits of high entropy."""
    if not _LONG.fullmatch(value) or not any(map(str.isdigit, value)) or not any(map(str.isalpha, value)):
        return False
    counts = Counter(value)
    entropy = -sum(count / len(value) * math.log2(count / len(value)) for count in counts.values())
    return entropy >= 3.0
