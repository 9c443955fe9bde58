"""Tokenizers of a Hugging Face directory: what each file beside tokenizer.json adds, as in transformers."""

from __future__ import annotations

import itertools
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from ridgeline.models.errors import BrokenModel, TemplateError
from ridgeline.models.text.tokenizer import Tokenizer
from tests.models.tokenizer_corpus import CORPUS

EOS = {"__type": "AddedToken", "content": "</s>", "lstrip": False, "rstrip": False, "normalized": False}
USER = [{"role": "user", "content": "hello"}]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A small byte-level tokenizer that adds BOS, with truncation and padding that must not be applied."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"], show_progress=False
    )
    backend.train_from_iterator(["hello world, hello there"] * 10, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.enable_truncation(max_length=4)
    backend.enable_padding(length=16)
    backend.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "tokenizer_config.json", {"bos_token": "<s>", "eos_token": EOS})
    return tmp_path


def write(directory: Path, name: str, content: Any) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    (directory / name).write_text(text, encoding="utf-8")


def configure(directory: Path, **fields: Any) -> None:
    path = directory / "tokenizer_config.json"
    write(directory, path.name, json.loads(path.read_text(encoding="utf-8")) | fields)


def transformers_tokenizer(directory: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(directory)


def test_a_prompt_is_never_cut_or_padded(directory: Path) -> None:
    text = "hello world, hello there " * 5
    tokenizer = Tokenizer.load(directory)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("hello")) < 16


def test_a_long_text_is_encoded_as_its_short_parts_are_while_other_threads_run(directory: Path) -> None:
    tokenizer = Tokenizer.load(directory)
    line = "a line that ends\n"
    once = tokenizer.encode(line, add_special=False)

    def standstill() -> float:
        """The longest pause of another thread, as a share of the time that encoding takes."""
        moments, encoded = [time.monotonic()], threading.Event()

        def tick() -> None:
            while not encoded.wait(0.001):
                moments.append(time.monotonic())

        ticking = threading.Thread(target=tick)
        ticking.start()
        began = time.monotonic()
        long = tokenizer.encode(line * 50_000, add_special=False)
        took_s = time.monotonic() - began
        encoded.set()
        ticking.join()
        assert long == once * 50_000
        pauses = itertools.pairwise([*moments, began + took_s])
        return max(later - earlier for earlier, later in pauses) / took_s

    # A busy machine may pause either thread; an encoder that holds the lock does so every time.
    assert any(standstill() < 0.5 for _ in range(10)), "the others stood still"


def test_the_corpus_survives_the_round_trip(directory: Path) -> None:
    tokenizer = Tokenizer.load(directory)
    for text in CORPUS:
        assert tokenizer.decode(tokenizer.encode(text, add_special=False), skip_special=False) == text


@pytest.mark.parametrize("fields", [{}, {"add_bos_token": False}, {"add_eos_token": True}])
def test_tokenizer_json_alone_decides_about_bos_and_eos(directory: Path, fields: dict[str, Any]) -> None:
    configure(directory, **fields)
    tokenizer = Tokenizer.load(directory)
    assert tokenizer.encode("hello") == transformers_tokenizer(directory).encode("hello")
    assert tokenizer.adds_bos
    assert tokenizer.encode("hello", add_special=False)[0] != tokenizer.bos_id


def test_tokens_only_the_configuration_names_are_added_as_transformers_adds_them(directory: Path) -> None:
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    configure(
        directory,
        added_tokens_decoder={
            "400": {"content": "<tool>", "special": False, **flags},
            "401": {"content": "<img>", "special": True, **flags},
        },
        additional_special_tokens=["<extra>"],
        pad_token="<pad>",
    )
    ours, theirs = Tokenizer.load(directory), transformers_tokenizer(directory)
    text = "<tool>hello<img></s><extra><pad>x"
    assert ours.encode(text) == theirs.encode(text)
    assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)
    assert ours.vocab_size == len(theirs)


def test_special_tokens_of_older_directories_are_read_from_their_own_file(directory: Path) -> None:
    write(directory, "tokenizer_config.json", {})
    write(directory, "special_tokens_map.json", {"bos_token": {"content": "<s>"}, "eos_token": "</s>"})
    tokenizer = Tokenizer.load(directory)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)


def test_the_template_sees_the_special_tokens_and_bos_is_not_doubled(directory: Path) -> None:
    configure(directory, chat_template="{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
    tokenizer = Tokenizer.load(directory)
    assert tokenizer.render_chat(USER) == "<s>hello</s>"
    ids = tokenizer.encode_chat(USER)
    assert ids[0] == tokenizer.bos_id
    assert ids.count(0) == 1


def test_template_variables_reach_the_template(directory: Path) -> None:
    configure(
        directory, chat_template="{{ enable_thinking }}/{{ add_generation_prompt }}/{{ tools | length }}"
    )
    tokenizer = Tokenizer.load(directory)
    text = tokenizer.render_chat(USER, tools=[{}], add_generation_prompt=False, enable_thinking="no")
    assert text == "no/False/1"


def test_a_template_file_wins_over_the_configuration(directory: Path) -> None:
    write(directory, "chat_template.json", {"chat_template": "json"})
    assert Tokenizer.load(directory).render_chat(USER) == "json"
    configure(directory, chat_template="configured")
    assert Tokenizer.load(directory).render_chat(USER) == "configured"
    write(directory, "chat_template.jinja", "file")
    assert Tokenizer.load(directory).render_chat(USER) == "file"
    (directory / "additional_chat_templates").mkdir()
    write(directory / "additional_chat_templates", "tool_use.jinja", "tools")
    assert Tokenizer.load(directory).render_chat(USER, tools=[{}]) == "tools"


def test_a_list_of_named_templates_is_read(directory: Path) -> None:
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    configure(directory, chat_template=named)
    tokenizer = Tokenizer.load(directory)
    assert (tokenizer.render_chat(USER), tokenizer.render_chat(USER, tools=[{}])) == ("a", "b")


def test_a_directory_without_a_template_says_what_to_do(directory: Path) -> None:
    tokenizer = Tokenizer.load(directory)
    assert tokenizer.chat_template is None
    with pytest.raises(TemplateError, match=r"chat_template\.jinja"):
        tokenizer.encode_chat(USER)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer.json", "{", "is not a tokenizer"),
        ("tokenizer_config.json", "{", "is not readable JSON"),
        ("tokenizer_config.json", "[]", "not a JSON object"),
        ("tokenizer_config.json", "[" * 100_000, "is not readable JSON"),
        ("tokenizer_config.json", {"added_tokens_decoder": ["x"]}, "its added tokens are invalid"),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"x": {"content": "y"}}},
            "its added tokens are invalid",
        ),
        ("tokenizer_config.json", {"added_tokens_decoder": {"7": {}}}, "its added tokens are invalid"),
        ("tokenizer_config.json", {"chat_template": 7}, "chat_template is 7; a string was expected"),
        ("tokenizer_config.json", {"chat_template": [{"name": "default"}]}, "template is missing"),
    ],
)
def test_a_missing_or_broken_file_is_refused_by_name(
    directory: Path, name: str, content: Any, message: str
) -> None:
    if content is None:
        (directory / name).unlink()
    else:
        write(directory, name, content)
    with pytest.raises(BrokenModel, match=message) as raised:
        Tokenizer.load(directory)
    assert str(directory) in str(raised.value)


def test_a_template_that_is_not_utf_8_is_refused_by_name(directory: Path) -> None:
    (directory / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(BrokenModel, match=r"chat_template\.jinja: is not UTF-8"):
        Tokenizer.load(directory)


def test_an_empty_special_token_is_none(directory: Path) -> None:
    configure(directory, eos_token="")
    assert Tokenizer.load(directory).eos_id is None


def test_half_a_surrogate_pair_is_refused_with_its_place(directory: Path) -> None:
    with pytest.raises(ValueError, match="surrogate at position 2"):
        Tokenizer.load(directory).encode("ab\ud83d")


def test_threads_share_one_tokenizer(directory: Path) -> None:
    tokenizer = Tokenizer.load(directory)
    texts = [f"hello </s> {i} wörld" for i in range(50)]
    expected = [(tokenizer.encode(t), tokenizer.encode(t, allow_special=False)) for t in texts]
    fresh = Tokenizer.load(directory)
    results: dict[int, list[Any]] = {}

    def work(worker: int) -> None:
        results[worker] = [(fresh.encode(t), fresh.encode(t, allow_special=False)) for t in texts]

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(results.values()) == [expected] * 8
