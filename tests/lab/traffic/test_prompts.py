"""Prompts of exact lengths, with the real tokenizer; shared blocks; vocabularies found at a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ridgeline.lab.bench.client.conversation import Conversations, form_of
from ridgeline.lab.errors import BadInput
from ridgeline.lab.traffic.prompts import Form, Prompt, PromptMaker
from ridgeline.lab.traffic.request import PlannedRequest, Traffic
from ridgeline.lab.traffic.vocabulary import Vocabulary
from ridgeline.models.text.tokenizer import Tokenizer
from tests.models.tokenizer_corpus import published_tokenizer


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return Tokenizer.load(smollm2_path)


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary.from_tokenizer(tokenizer)


def ids_of(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """As a server would have them."""
    if "messages" in prompt.fields:
        return tokenizer.encode_chat(prompt.fields["messages"])
    given = prompt.fields["prompt"]
    return given if isinstance(given, list) else tokenizer.encode(given)


@pytest.mark.parametrize("form", ["ids", "text", "chat"])
def test_prompts_have_exactly_the_planned_tokens(
    tokenizer: Tokenizer, vocabulary: Vocabulary, form: Form
) -> None:
    maker = PromptMaker(vocabulary, form=form, seed=1, block_tokens=64)
    for index, tokens in enumerate([31, 32, 33, 64, 127, 200, 999, 2000, 4000]):
        for prefix in ((), (5,), (5, 6, 7)):
            prompt = maker.prompt(index, PlannedRequest(0, tokens, 1, prefix))
            assert len(ids_of(tokenizer, prompt)) == tokens == prompt.tokens


@pytest.mark.parametrize("name", ["gemma3", "llama3_2"])
async def test_other_models_prompts_are_exact_too(name: str) -> None:
    other = Tokenizer.load(published_tokenizer(name))
    server = Server(other, {"/tokenize", CHAT, PLAIN})
    for found in (Vocabulary.from_tokenizer(other), await Vocabulary.from_server(server.post, "m")):
        for form in ("ids", "text", "chat"):
            maker = PromptMaker(found, form=form)
            for index in range(20):
                prompt = maker.prompt(index, PlannedRequest(0, 60 + index, 1))
                assert len(ids_of(other, prompt)) == 60 + index == prompt.tokens


def test_a_plan_below_the_template_says_what_it_became(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    prompt = PromptMaker(vocabulary, form="chat").prompt(0, PlannedRequest(0, 3, 1))
    assert prompt.tokens == len(ids_of(tokenizer, prompt)) > 3


@pytest.mark.parametrize("form", ["ids", "text", "chat"])
def test_equal_blocks_are_equal_tokens_and_nothing_else_is(
    tokenizer: Tokenizer, vocabulary: Vocabulary, form: Form
) -> None:
    maker = PromptMaker(vocabulary, form=form, seed=1, block_tokens=64)
    alone = Vocabulary(vocabulary.words, vocabulary.ids, "tokenizer", chat_overhead=vocabulary.chat_overhead)
    lead = common(
        [
            ids_of(tokenizer, PromptMaker(alone, form=form, salt=s).prompt(0, PlannedRequest(0, 300, 1)))
            for s in "ab"
        ]
    )
    plans = [(1, 2), (1, 2), (1, 3), (4, 2), ()]
    made = [ids_of(tokenizer, maker.prompt(i, PlannedRequest(0, 300, 1, p))) for i, p in enumerate(plans)]
    assert common(made[:2]) - lead in range(128, 131)  # a chance word or two may agree behind the blocks
    assert common([made[0], made[2]]) - lead in range(64, 67)
    for other in made[3:]:
        assert common([made[0], other]) - lead in range(3)


def common(prompts: list[list[int]]) -> int:
    count = 0
    for tokens in zip(*prompts, strict=False):
        if len(set(tokens)) > 1:
            break
        count += 1
    return count


def test_words_depend_on_seed_salt_and_place_not_on_the_order_of_making(vocabulary: Vocabulary) -> None:
    plan = [PlannedRequest(0, 50, 1, (1,)) for _ in range(3)]
    forwards, backwards, salted, seeded = (
        PromptMaker(vocabulary, form="ids", seed=seed, salt=salt, block_tokens=16)
        for seed, salt in ((1, ""), (1, ""), (1, "run 2"), (2, ""))
    )
    first = [forwards.prompt(i, plan[i]) for i in (0, 1, 2)]
    again = [backwards.prompt(i, plan[i]) for i in (2, 1, 0)]
    assert first == again[::-1]
    assert common([salted.prompt(0, plan[0]).fields["prompt"], first[0].fields["prompt"]]) < 3
    assert common([seeded.prompt(0, plan[0]).fields["prompt"], first[0].fields["prompt"]]) < 3


def test_a_fully_shared_prompt_is_the_same_prompt(vocabulary: Vocabulary) -> None:
    maker = PromptMaker(vocabulary, form="ids", block_tokens=512)
    one, two = (maker.prompt(i, PlannedRequest(0, 700, 1, (8, 9))) for i in (3, 4))
    assert one == two


# ── at a server ──────────────────────────────────────────────────────────────────────────────────────────


class Server:
    """Counts as a server with this tokenizer would; `paths` are those it has."""

    def __init__(self, tokenizer: Tokenizer, paths: set[str], llama_server: bool = False) -> None:
        self.tokenizer, self.paths, self.llama_server = tokenizer, paths, llama_server

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        if path not in self.paths:
            return None
        if path == "/tokenize":
            text = body.get("content" if self.llama_server else "prompt")
            return None if text is None else {"tokens": self.tokenizer.encode(text, add_special=False)}
        ids = (
            self.tokenizer.encode_chat(body["messages"])
            if "messages" in body
            else self.tokenizer.encode(body["prompt"])
        )
        return {"usage": {"prompt_tokens": len(ids)}}


CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"


@pytest.mark.parametrize("llama_server", [False, True])
async def test_words_are_found_with_the_servers_tokenize(
    tokenizer: Tokenizer, vocabulary: Vocabulary, llama_server: bool
) -> None:
    server = Server(tokenizer, {"/tokenize", CHAT, PLAIN}, llama_server)
    found = await Vocabulary.from_server(server.post, "m")
    assert found.counted_by == "/tokenize"
    assert (found.text_overhead, found.chat_overhead, found.turn_overhead) == (
        vocabulary.text_overhead,
        vocabulary.chat_overhead,
        vocabulary.turn_overhead,
    )
    assert [tokenizer.decode([id]) for id in found.ids] == [f" {word}" for word in found.words]


async def test_without_tokenize_the_usage_is_believed(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    found = await Vocabulary.from_server(Server(tokenizer, {CHAT}).post, "m")
    assert (found.counted_by, found.chat_overhead, found.ids) == ("usage", vocabulary.chat_overhead, ())
    prompt = PromptMaker(found, form="chat").prompt(0, PlannedRequest(0, 500, 1))
    assert len(ids_of(tokenizer, prompt)) == 500
    with pytest.raises(BadInput, match="token ids"):
        PromptMaker(found, form="ids")


async def test_of_a_server_that_counts_nothing_words_are_assumed_to_be_tokens(tokenizer: Tokenizer) -> None:
    found = await Vocabulary.from_server(Server(tokenizer, set()).post, "m")
    assert found.counted_by == "assumption"
    prompt = PromptMaker(found, form="chat").prompt(0, PlannedRequest(0, 40, 1))
    assert len(prompt.fields["messages"][0]["content"].split()) == 40


async def test_words_that_a_server_splits_are_left_out(tokenizer: Tokenizer) -> None:
    class Splitting(Server):
        async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
            # as if "first" were two tokens
            text = str(body.get("prompt") or body.get("messages"))
            answer = await super().post(path, body)
            extra = text.count("first")
            if answer is not None and "tokens" in answer:
                answer["tokens"] += [0] * extra
            elif answer is not None:
                answer["usage"]["prompt_tokens"] += extra
            return answer

    found = await Vocabulary.from_server(Splitting(tokenizer, {"/tokenize", CHAT, PLAIN}).post, "m")
    assert "first" not in found.words
    assert len(found.words) > 100


# ── conversations ────────────────────────────────────────────────────────────────────────────────────────

TALK = Traffic(
    "talk",
    (
        PlannedRequest(0.0, 100, 20, (), 0, 0),
        PlannedRequest(0.5, 60, 5),
        PlannedRequest(0.0, 160, 20, (), 0, 1, 2.5),
        PlannedRequest(0.0, 230, 20, (), 0, 2, 1.5),
    ),
)


@pytest.mark.parametrize("form", ["text", "chat"])
def test_a_turn_follows_its_answer_with_the_real_history(
    tokenizer: Tokenizer, vocabulary: Vocabulary, form: Form
) -> None:
    talks = Conversations(TALK, PromptMaker(vocabulary, form=form))
    assert talks.openers() == [0, 1]
    answer = " river" * 20 if form == "text" else " ".join(["river"] * 20)
    first = talks.prompt(0)
    assert talks.answered(1, "alone") is None
    follow = talks.answered(0, answer, n_in=first.tokens, n_out=20)
    assert follow is not None
    assert (follow.index, follow.think_s) == (2, 2.5)
    second = talks.prompt(2)
    assert len(ids_of(tokenizer, second)) == second.tokens == 160
    follow = talks.answered(2, answer, n_in=160, n_out=20)
    assert follow is not None
    third = talks.prompt(follow.index)
    assert len(ids_of(tokenizer, third)) == third.tokens == 230
    history = str(third.fields)
    assert str(first.fields)[:-4] in history or form == "chat"
    assert history.count("river river") >= 2
    assert talks.answered(3, answer) is None
    if form == "chat":
        assert [m["role"] for m in third.fields["messages"]] == ["user", "assistant"] * 2 + ["user"]
        assert third.fields["messages"][:1] == first.fields["messages"]


def test_an_answer_that_fails_ends_its_conversation(vocabulary: Vocabulary) -> None:
    talks = Conversations(TALK, PromptMaker(vocabulary, form="chat"))
    talks.prompt(0)
    assert talks.failed(0) == [2, 3]
    assert talks.failed(1) == []


def test_histories_are_never_sent_as_token_ids(vocabulary: Vocabulary) -> None:
    assert form_of(TALK, "completions", vocabulary) == "text"
    assert form_of(TALK, "chat", vocabulary) == "chat"
    assert form_of(Traffic("one", TALK.requests[1:2]), "completions", vocabulary) == "ids"
    with pytest.raises(BadInput, match="sent as text"):
        Conversations(TALK, PromptMaker(vocabulary, form="ids"))
