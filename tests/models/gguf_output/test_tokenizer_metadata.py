"""Tokenizers written as GGUF metadata: the name of their rules is found, and they encode as before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from ridgeline.models.errors import UnsupportedModel
from ridgeline.models.gguf_output.tokenizer_metadata import describe_tokenizer
from ridgeline.models.text.gguf_pretokenizers import PRE_TOKENIZATIONS
from ridgeline.models.text.gguf_tokenizer import read_gguf_tokenizer
from ridgeline.models.text.tokenizer import Tokenizer
from tests.models import tiny_sentencepiece
from tests.models.tokenizer_corpus import CORPUS, published_tokenizer, random_texts

TEXTS = CORPUS + random_texts(100, seed=9)


@pytest.mark.parametrize(
    ("name", "pre"),
    [
        ("llama3_2", "llama-bpe"),
        *(
            pytest.param(name, pre, marks=pytest.mark.slow)
            for name, pre in (("qwen3", "qwen2"), ("deepseek_v3", "deepseek-v3"), ("mistral_nemo", "tekken"))
        ),
    ],
)
def test_a_published_tokenizer_keeps_its_tokens_and_its_template(name: str, pre: str) -> None:
    directory = published_tokenizer(name)
    original = Tokenizer.load(directory)
    size = original.vocab_size + 64
    metadata = describe_tokenizer(directory, size)
    assert metadata["tokenizer.ggml.pre"] == pre
    rebuilt = Tokenizer(read_gguf_tokenizer(metadata, name))
    assert rebuilt.vocab_size == size  # as many as the embedding has rows
    assert (rebuilt.bos_id, rebuilt.eos_id, rebuilt.adds_bos) == (
        original.bos_id,
        original.eos_id,
        original.adds_bos,
    )
    for text in TEXTS:
        assert rebuilt.encode(text) == original.encode(text), repr(text)
    chat = [{"role": "user", "content": "Hi"}]
    assert rebuilt.encode_chat(chat) == original.encode_chat(chat)


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "olmo", "command-r", "dbrx", "gpt-4o", "qwen2", "qwen35"])
def test_the_name_of_the_rules_is_found_by_encoding(pre: str, tmp_path: Path) -> None:
    """A vocabulary that merges everything within a word shows every split."""
    way = PRE_TOKENIZATIONS[pre]
    backend = merging_backend()
    backend.pre_tokenizer = way.pre_tokenizer()
    if (normalizer := way.normalizer()) is not None:
        backend.normalizer = normalizer
    backend.save(str(tmp_path / "tokenizer.json"))
    found = describe_tokenizer(tmp_path, backend.get_vocab_size())["tokenizer.ggml.pre"]
    assert PRE_TOKENIZATIONS[str(found)] == way


def test_rules_that_no_name_has_are_refused(tmp_path: Path) -> None:
    backend = merging_backend()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,2}|\P{N}+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UnsupportedModel, match="splits text in a way that no known"):
        describe_tokenizer(tmp_path, backend.get_vocab_size())


def merging_backend() -> Backend:
    """Every pair of letters within a word is a token, so that each end of a word shows."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(left, right) for left in alphabet for right in alphabet]
    vocabulary = {letter: index for index, letter in enumerate(alphabet)}
    for left, right in pairs:
        vocabulary[left + right] = len(vocabulary)
    backend = Backend(models.BPE(vocabulary, pairs))
    backend.decoder = decoders.ByteLevel()
    return backend


@pytest.mark.parametrize("prefix_space", [True, False])
def test_a_sentencepiece_vocabulary_keeps_its_tokens(prefix_space: bool, tmp_path: Path) -> None:
    real = tiny_sentencepiece.train(prefix_space, [])
    rebuilt = read_gguf_tokenizer(tiny_sentencepiece.gguf_metadata(real, prefix_space, []), "tiny")
    rebuilt.backend.save(str(tmp_path / "tokenizer.json"))
    settings = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    metadata = describe_tokenizer(tmp_path, real.vocab_size())
    assert metadata["tokenizer.ggml.model"] == "llama"
    assert metadata["tokenizer.ggml.add_space_prefix"] == prefix_space
    written = Tokenizer(read_gguf_tokenizer(metadata, "tiny"))
    for text in tiny_sentencepiece.words(seed=3)[:100] + [text for text in CORPUS if "<s>" not in text]:
        assert written.encode(text, add_special=False) == real.encode(text), repr(text)


def test_a_unigram_tokenizer_is_refused(tmp_path: Path) -> None:
    backend = Backend(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0))
    backend.normalizer = normalizers.NFC()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UnsupportedModel, match="tokenizers of type Unigram"):
        describe_tokenizer(tmp_path, 2)
