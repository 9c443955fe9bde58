"""Thinking budgets: the counter on its own, on a fake device, and on real engines."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.engine.client.thinking_tags import thinking_tags
from ridgeline.engine.errors import InvalidRequest
from ridgeline.engine.schedule.request import SamplingParams
from ridgeline.engine.schedule.thinking import ThinkingBudget, ThinkingCount
from tests.engine.lettered import LETTERS, budget, lettered_tags
from tests.engine.overlapped import Overlapped
from tests.engine.simulated_engine import limits, request

# ── the counter ──────────────────────────────────────────────────────────────────────────────────────────


def after(count: ThinkingCount, text: str) -> ThinkingCount:
    for token in LETTERS.encode(text):
        count.advance(token)
    return count


def forced(count: ThinkingCount) -> str | None:
    token = count.forced
    return None if token is None else chr(65 + token)


@pytest.mark.parametrize(
    ("text", "thinking", "next_token"),
    [
        ("", 0, None),
        ("XYZ", 3, None),
        ("XYZX", 4, "C"),  # used up
        ("XYZXC", 4, "D"),
        ("XYZXCD", 4, None),
        ("XYZXCDXYZXYZ", 4, None),  # the answer is free
        ("XCD", 1, None),  # ended by the model
        ("XCDXXXXXXXX", 1, None),
        ("XYZC", 3, "D"),  # the model has begun the tag itself: the rest of it follows
        ("XCXY", 4, "C"),  # one that was begun and left
        ("XYCC", 3, "D"),
    ],
)
def test_tokens_are_counted_to_the_budget_and_then_the_closing_tag_is_forced(text, thinking, next_token):
    count = after(ThinkingCount.of(budget(4)), text)
    assert (count.tokens, forced(count)) == (thinking, next_token)


def test_a_budget_of_0_closes_at_once():
    assert forced(ThinkingCount.of(budget(0))) == "C"
    count = ThinkingCount.of(budget(0, inside=False))
    assert forced(count) is None
    assert forced(after(count, "B")) == "C"
    assert forced(after(count, "CDXBXX")) is None


def test_an_opening_tag_is_one_only_at_the_start_of_an_answer():
    count = after(ThinkingCount.of(budget(2, inside=False)), "XBXXXXXX")
    assert (count.tokens, forced(count)) == (0, None)
    count = after(ThinkingCount.of(budget(2, opener="BAB", inside=False)), "BABXX")
    assert (count.tokens, forced(count)) == (2, "C")
    count = after(ThinkingCount.of(budget(2, opener="BAB", inside=False)), "BAXBABXXX")
    assert (count.tokens, forced(count)) == (0, None)


def test_sections_share_one_budget_where_there_may_be_several():
    count = after(ThinkingCount.of(budget(3, leads=False, inside=False)), "XXBXYCDXXBX")
    assert (count.tokens, forced(count)) == (3, "C")
    assert forced(after(count, "CDXXB")) == "C"


def test_an_answer_that_ends_in_half_a_tag_has_thought_it():
    count = after(ThinkingCount(lettered_tags(), True), "XYC")
    assert (count.tokens, count.tokens_at_end()) == (2, 3)
    count = after(count, "D")
    assert (count.tokens, count.tokens_at_end()) == (2, 2)


def test_a_budget_must_make_sense():
    with pytest.raises(InvalidRequest, match="negative"):
        budget(-1)


@given(
    st.text("ABCDE", max_size=12),
    st.integers(1, 3),
    st.integers(0, 4),
    st.booleans(),
    st.booleans(),
)
def test_what_may_be_forced_is_known_before_the_last_tokens_are(text, unread, tokens, inside, leads):
    """Else a step would be sampled without the mask that it needs."""
    known = after(ThinkingCount.of(budget(tokens, inside=inside, leads=leads)), text[:-unread])
    pending = len(text) - len(text[:-unread])
    told = known.may_force(pending)
    if after(known, text[len(text) - pending :]).forced is not None and pending:
        assert told


class Pieces:
    """A tokenizer whose tokens are these texts; `encode` takes the fewest bytes at a time."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self.vocab_size = len(texts)

    def token_bytes(self, token: int) -> bytes:
        return self.texts[token].encode()

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        return [self.texts.index(letter) for letter in text]


@given(
    st.randoms(use_true_random=False),
    st.sampled_from(["a<t></t>b", "  <t>a</</t>\n", "a</t", "<t><t></t></t>"]),
)
def test_a_tag_is_found_however_it_is_divided_into_tokens(rng: random.Random, text: str):
    """The same as reading the text does: white space, the opener, everything up to the first closer."""
    opener = (text.index("<t>") + 3) % len(text) if "<t>" in text else 0  # no token holds it and more
    cuts = sorted({0, opener, len(text), *(rng.randrange(len(text)) for _ in range(rng.randrange(8)))})
    pieces = [text[begin:end] for begin, end in itertools.pairwise(cuts)]
    tokenizer = Pieces(*sorted({*pieces, *"</t>"}))
    for inside in (True, False):
        count = ThinkingCount(thinking_tags(tokenizer, "<t>", "</t>", True), inside)
        read = ""
        for piece in pieces:
            count.advance(tokenizer.texts.index(piece))
            read += piece
            opened = inside or read.lstrip().startswith("<t>")
            start = 0 if inside else read.index("<t>") + 3 if opened else 0
            assert count.inside is (opened and "</t>" not in read[start:]), (pieces, read)


def test_channels_open_anywhere_and_need_several_tokens():
    """As gpt-oss writes them: a step that is launched ahead waits only where the tag may be complete."""
    tokenizer = Pieces("<|channel|>", "analysis", "<|message|>", "<|end|>", "final", "x", *"<>|acdeghilmnsy")
    tags = thinking_tags(tokenizer, "<|channel|>analysis<|message|>", "<|end|>", False)
    assert tags.closer.ids == tuple(tokenizer.texts.index(letter) for letter in "<|end|>")
    count = ThinkingCount(tags, False, 0)
    waits = []
    for text in ("<|channel|>", "final", "<|message|>", "x", "<|channel|>", "analysis", "<|message|>"):
        waits.append(count.may_force(1))
        assert count.forced is None
        count.advance(tokenizer.texts.index(text))
    assert waits == [False, False, False, False, False, False, True]
    assert count.forced == tags.closer.ids[0]
    count.advance(tokenizer.texts.index("<|end|>"))
    assert (count.inside, count.tokens) == (False, 0)


# ── steps launched ahead ─────────────────────────────────────────────────────────────────────────────────


def test_on_a_device_only_the_end_of_a_budget_waits_for_the_token_before():
    engine = Overlapped(limits(), request("a", 4, max_tokens=10, thinking=budget(4, closer="LK"))).run()
    engine.check_answers()
    assert engine.output["a", 0][4:6] == LETTERS.encode("LK")
    completed = [entry for entry in engine.device.log if "complete" in entry]
    assert completed == ["complete 4", "complete 5", "complete 6"]


# ── real engines ─────────────────────────────────────────────────────────────────────────────────────────

BACKENDS = {"native": {"deterministic": True}, "torch": {"backend": "torch", "threads": 1}}
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=3, max_tokens=24, ignore_eos=True, logprobs=2)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module", params=BACKENDS)
def llm(request, smollm2_path):
    from ridgeline import LLM

    return LLM(str(smollm2_path), kv_tokens=4096, **BACKENDS[request.param])


@pytest.fixture
def prompt(llm) -> list[int]:
    return llm.tokenizer.encode(
        "A whale lives in the sea and breathes air. Is it a fish? Think first.\n<think>\n"
    )


def limited(llm, tokens: int, params: SamplingParams = SEEDED) -> SamplingParams:
    tags = thinking_tags(llm.tokenizer, "<think>", "</think>", True)
    return replace(params, thinking=ThinkingBudget(tokens, tags, True))


@pytest.mark.parametrize("params", [SEEDED, GREEDY], ids=["seeded", "greedy"])
def test_thinking_closes_exactly_at_the_budget_and_the_answer_goes_on(llm, driver, prompt, params):
    closer = llm.tokenizer.encode("</think>", add_special=False)
    assert len(closer) > 1
    free = driver().one(prompt, params)
    for tokens in (0, 1, 7):
        held = driver().one(prompt, limited(llm, tokens, params))
        assert held.tokens[:tokens] == free.tokens[:tokens]
        assert held.tokens[tokens : tokens + len(closer)] == closer
        assert len(held.tokens) == 24
        assert held.tokens[tokens + len(closer) :].count(closer[0]) == 0
        for place, token in enumerate(held.logprobs):
            assert token.token == held.tokens[place]
            assert token.logprob < 0.0
    # After the tag comes the same text as in a prompt.
    rest = [*prompt, *held.tokens[: 7 + len(closer)]]
    if params is GREEDY:
        again = driver().one(rest, replace(params, max_tokens=24 - 7 - len(closer)))
        assert again.tokens == held.tokens[7 + len(closer) :]


@pytest.mark.parametrize("llm", ["native", pytest.param("torch", marks=pytest.mark.slow)], indirect=True)
def test_limited_answers_are_the_same_alone_and_together_cached_preempted_and_as_samples(llm, driver, prompt):
    asked = [limited(llm, tokens, replace(SEEDED, seed=tokens)) for tokens in (0, 2, 5, 11)]
    alone = [driver().one(prompt, params).tokens for params in asked]
    assert len({tuple(tokens) for tokens in alone}) == 4
    together = driver(prefill_chunk=5)
    free = [(prompt, SEEDED), (prompt[:5], GREEDY)]
    found = together.run([*free, *((prompt, params) for params in asked)])[2:]
    assert [outcome.tokens for (outcome,) in found] == alone
    again = together.one(prompt, asked[3])
    assert again.timing.cached_tokens > 0
    assert again.tokens == alone[3]
    tight = driver(num_blocks=8, prefix_cache=False)
    for _ in range(64):
        tight.core.scheduler.output_lengths.record(1)  # so that it admits more than will fit
    found = tight.run([(prompt, params) for params in asked])
    assert tight.core.stats().preemptions > 0
    assert [outcome.tokens for (outcome,) in found] == alone
    closer = llm.tokenizer.encode("</think>", add_special=False)
    (samples,) = driver().run([(prompt, replace(asked[2], n=2))])
    assert samples[0].tokens != samples[1].tokens
    assert all(sample.tokens[5 : 5 + len(closer)] == closer for sample in samples)


def test_penalties_bias_and_min_tokens_do_not_keep_a_tag_from_being_forced(llm, driver, prompt):
    closer = llm.tokenizer.encode("</think>", add_special=False)
    against = replace(
        SEEDED,
        frequency_penalty=2.0,
        logit_bias=dict.fromkeys(closer, -100.0),
        stop_token_ids=(closer[0],),
        min_tokens=20,
    )
    held = driver().one(prompt, limited(llm, 6, against))
    assert held.tokens[6 : 6 + len(closer)] == closer
