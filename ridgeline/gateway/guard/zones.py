"""Where a text may be cut so that no finding crosses the cut, decided by the text to the left alone.

Detectors read one zone at a time, so a text in pieces has the same findings as the whole text: a cut stays a
cut, whatever follows. Zones end at spaces, and continue where a number, an account or the value of a
password may continue: a few words, or a PEM block. Used by `scanner.py` only.
"""

from __future__ import annotations

import re

WINDOW = 96  # characters to the left that decide about a cut
LONGEST = 16_384  # a longer zone is cut, `OVERLAP` before its end
OVERLAP = 1_024
LONGEST_PEM = 12_288

# Words whose value may follow within a few words. Terms of two words are known by the last one. Short ones
# must begin a word: `monkey` is not a key.
SECRET_WORDS = (
    r"(?:passw\w{0,12}|passphrase|passcode|passkey|pwd|secret|token|apikey|credential|kennwort|contrase[nñ]a"
    r"|has[lł]o|wachtwoord|l[oö]senord|парол\w{0,3}|密码|密碼|口令|パスワード|비밀번호"
    r"|(?<![^\W_])(?:pass|passe|pw|psw|keys?|key_?id|senha|clave|auth|authorization|bearer|basic|salt|hmac)(?![^\W\d_]))"
)
PHONE_WORDS = (
    r"(?:phone|telephon|telefon|teléfono|téléphone|telefoon|telefone|mobil|handy|whatsapp|viber|hotline|cellular"
    r"|телефон|电话|電話|手机|手機|전화|フォン|móvil|celular|portable|rufnummer|durchwahl"
    r"|(?<![^\W_])(?:tel|tél|fon|fono|cell|call|calls|fax|sms|dial|ring|text|gsm|mob|tlf|appel\w{0,3}|anruf\w{0,2}"
    r"|llam\w{1,4}|ligue|chiama\w{0,3})(?![^\W\d_]))"
)
_SEPARATOR = re.compile("[\\s\u3000-\u9fff\uac00-\ud7af]")
_WORDS = re.compile(f"{SECRET_WORDS}|{PHONE_WORDS}")
_WORDS_AFTER = 4

_NUMBER = re.compile(r"(?:[0-9][)\].,/]{0,2}|[0-9][)]? ?[-/.]|[(+]|\(\+?[0-9]{1,4}\))\Z")
_ACCOUNT = re.compile(r"(?<![A-Za-z0-9])[A-Za-z]{2}[0-9]{2}(?:[ .-]{0,2}[A-Za-z0-9]){0,29}\Z")
_PEM = re.compile(r"-----BEGIN [A-Z0-9 ]{0,30}PRIVATE KEY[A-Z ]{0,10}-----[A-Za-z0-9+/=\s:,\\-]*\Z")
_BEGUN = re.compile(r"[电電手密口パフ전비]\Z|パス(?:ワー?)?\Z|フォ\Z|비밀번?\Z")  # a word above, begun
_PEM_HEAD = re.compile(r"-----BEGIN [A-Z0-9 ]{0,44}\Z")
_PEM_END = re.compile(r"-----END [A-Z0-9 ]{0,30}PRIVATE KEY[A-Z ]{0,10}-----")


def separates(character: str) -> bool:
    """White space, and characters of scripts without spaces: neither is part of a finding's word."""
    return character.isspace() or "\u3000" <= character <= "\u9fff" or "\uac00" <= character <= "\ud7af"


def is_cut(text: str, at: int) -> bool:
    """Whether no finding can extend from the end of `text[:at]` into the text after it (folded text)."""
    if not separates(text[at - 1]):
        return False
    tail = text[max(at - WINDOW, 0) : at]
    body = tail.rstrip(" \t")
    gap = len(tail) - len(body)
    if 0 < gap <= 2 and body and (_NUMBER.search(body[-8:]) or _ACCOUNT.search(body[-48:])):
        return False
    return not _awaits_value(tail) and not _BEGUN.search(tail) and not _in_pem(text, at)


def last_cut(text: str, start: int, stop: int) -> int | None:
    """The last cut in (start, stop], if any."""
    for at in range(stop, start, -1):
        if separates(text[at - 1]) and is_cut(text, at):
            return at
    return None


def first_cut(text: str, start: int, stop: int) -> int | None:
    """The first cut in (start, stop], if any."""
    for separator in _SEPARATOR.finditer(text, start, stop):
        if is_cut(text, separator.end()):
            return separator.end()
    return None


def _awaits_value(tail: str) -> bool:
    words = tail.lower().split()[-_WORDS_AFTER - 1 :]
    return _WORDS.search(" ".join(words)) is not None and not tail.endswith("\n\n")


def _in_pem(text: str, at: int) -> bool:
    begin = text.rfind("-----BEGIN ", max(at - LONGEST_PEM, 0), at)
    if begin < 0:
        return False
    block = text[begin:at]
    if _PEM_HEAD.match(block):
        return True
    return _PEM_END.search(block) is None and _PEM.match(block) is not None
