"""How text is split into words before BPE merges, by the name in a GGUF file (`tokenizer.ggml.pre`).

A wrong split gives wrong tokens without an error, so an unknown name is rejected. The patterns come from the
families' own tokenizer.json files.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")


@dataclass(frozen=True, slots=True)
class PreTokenization:
    """One family's rules: patterns applied in order, each within the pieces of the previous one."""

    patterns: tuple[str, ...] = ()
    gpt2_words: bool = False  # then GPT-2's own pattern
    composed: bool = False  # text is normalized to NFC first
    whole_words_first: bool = False  # a word that is a token is used as it is, regardless of the merges
    adds_bos: bool = False  # the family's default if the file does not say

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.composed else None

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.gpt2_words)
        return pre_tokenizers.Sequence([*splits, byte_level])


_LLAMA3_WAY = PreTokenization((_LLAMA3,), whole_words_first=True, adds_bos=True)
_GPT4_WAY = PreTokenization((_LLAMA3,))
_DIGITS_WAY = PreTokenization((r"\p{N}",), gpt2_words=True)

PRE_TOKENIZATIONS: dict[str, PreTokenization] = {
    "gpt-2": PreTokenization(gpt2_words=True),
    "phi-2": PreTokenization(gpt2_words=True),
    "olmo": PreTokenization(gpt2_words=True, composed=True),  # GPT-NeoX's
    "smollm": _DIGITS_WAY,
    "starcoder": _DIGITS_WAY,
    "refact": _DIGITS_WAY,  # Granite
    "command-r": PreTokenization((r"\p{N}",), gpt2_words=True, composed=True),
    "dbrx": _GPT4_WAY,  # Phi-4, OLMo 2
    "smaug-bpe": _GPT4_WAY,  # SmolLM3
    "chatglm-bpe": _GPT4_WAY,
    "glm4": _GPT4_WAY,
    "gpt-4o": PreTokenization((_GPT4O,)),  # Phi-4-mini, gpt-oss
    "llama4": PreTokenization((_GPT4O,)),
    "llama-bpe": _LLAMA3_WAY,
    "llama-v3": _LLAMA3_WAY,
    "llama3": _LLAMA3_WAY,
    "falcon3": _LLAMA3_WAY,
    "lfm2": _LLAMA3_WAY,
    "qwen2": PreTokenization((_QWEN2,), composed=True),
    "qwen35": PreTokenization((_QWEN35,), composed=True),
    "deepseek-r1-qwen": PreTokenization((_QWEN2,)),
    "deepseek-coder": PreTokenization(_DEEPSEEK_CODER),
    "deepseek-v3": PreTokenization(_DEEPSEEK_V3),
    "tekken": PreTokenization((_TEKKEN,), whole_words_first=True, adds_bos=True),
}
