"""Guesses the language of a text from its script and its most common words. Cheap, for rules and features.

Returns a two-letter code, or "" if there is too little text. Only a hint.
"""

from __future__ import annotations

import re

SAMPLE_CHARS = 600  # characters that are read
_WORDS = re.compile(r"[^\W\d_]+")
_SCRIPTS = (  # first and last character, language
    ("\u3040", "\u30ff", "ja"),  # kana: before Han, which Japanese uses too
    ("\uac00", "\ud7a3", "ko"),
    ("\u4e00", "\u9fff", "zh"),
    ("\u0600", "\u06ff", "ar"),
    ("\u0590", "\u05ff", "he"),
    ("\u0900", "\u097f", "hi"),
    ("\u0e00", "\u0e7f", "th"),
    ("\u0370", "\u03ff", "el"),
)
_UKRAINIAN = frozenset("іїєґ")
_COMMON = {
    "en": "the of and to in is that it for was on are with as at be this have from or by what how which you",
    "de": "der die das und ist nicht ein eine zu den mit von auf für im dem des wie was ich sie wir auch",
    "fr": "le la les et est une des du que pour dans qui sur pas avec au ce il elle nous vous je comment",
    "es": "el la los las y es una que de en por para con del se su al como lo qué cuál está son pero más",
    "it": "il lo la gli e è una che di per con del della non sono come si più nel questo quale anche ma",
    "pt": "o os as e é uma que de para com do da em não se por mais dos como foi ao qual são você isso",
    "nl": "de het een en van is dat niet op te zijn voor met die er aan ook als bij wat hoe ik je wij naar",
    "pl": "i w nie na jest się że z do to jak co dla ale czy przez jego tak od po ten która które",
    "sv": "och att det som en är på för av med den inte om ett har jag till vad hur kan men från",
    "tr": "ve bir bu için ile da de ne nasıl olarak daha çok gibi var mi olan en değil ama",
}
_WORD_SETS = {language: frozenset(words.split()) for language, words in _COMMON.items()}


def language_of(text: str) -> str:
    sample = text[:SAMPLE_CHARS].lower()
    if not sample.isascii():
        script = _by_script(sample)
        if script:
            return script
    words = _WORDS.findall(sample)
    counts = {language: sum(word in known for word in words) for language, known in _WORD_SETS.items()}
    best = max(counts, key=counts.__getitem__)
    # One common word in a long text is chance; in a short question it is the only evidence.
    return best if counts[best] >= max(1, len(words) // 12) else ""


def _by_script(sample: str) -> str:
    letters = [character for character in sample if character.isalpha()]
    least = max(1, len(letters) // 5)
    for first, last, language in _SCRIPTS:
        if sum(first <= character <= last for character in letters) >= least:
            return language
    cyrillic = [character for character in letters if "\u0400" <= character <= "\u04ff"]
    if len(cyrillic) >= least:
        return "uk" if not _UKRAINIAN.isdisjoint(cyrillic) else "ru"
    return ""
