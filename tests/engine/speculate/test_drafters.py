"""What the drafters find: against a plain search, within their bounds, and never from another namespace."""

from __future__ import annotations

import random

import pytest

from ridgeline.engine.schedule.intake import make_sequences
from ridgeline.engine.schedule.request import SeqState, Sequence
from ridgeline.engine.speculate import suffix
from ridgeline.engine.speculate.drafter import MOST_DRAFTS, Draft, Drafter
from ridgeline.engine.speculate.ngram import INDEXED_AT_ONCE, NgramDrafter, OwnText
from ridgeline.engine.speculate.suffix import SuffixDrafter
from ridgeline.engine.speculate.text_index import MOST_CANDIDATES, MOST_MATCH, SURE_MATCH, TextIndex
from tests.engine.simulated_engine import limits, request


def sequence(tokens: list[int], output: int = 1, **outer: object) -> Sequence:
    (made,) = make_sequences(request("r", tokens[:-output], **outer), limits(max_context=10**6), 0, lambda: 1)
    made.tokens += tokens[-output:]
    return made


def propose(drafter: Drafter, seq: Sequence) -> Draft | None:
    (draft,) = drafter.propose([seq], MOST_DRAFTS)
    return draft


def longest_by_search(text: list[int], end: int, tail: list[int]) -> int:
    """The longest match of the end of `tail` at the newest candidates of `text` before `end`."""
    places = [p for p in range(1, end) if text[p - 1 : p + 1] == tail[-2:]][-MOST_CANDIDATES:]
    best = 0
    for place in places:
        length = 0
        while length < min(MOST_MATCH, place + 1, len(tail)) and text[place - length] == tail[-1 - length]:
            length += 1
        best = max(best, length)
    return best


@pytest.mark.parametrize("seed", range(20))
def test_the_index_finds_what_a_search_finds(seed):
    rng = random.Random(seed)
    text = [rng.randrange(3) for _ in range(200)]
    index = TextIndex(text)
    indexed = 0
    while indexed < 198:  # extended in pieces of any size
        indexed = min(198, indexed + rng.randrange(1, 60))
        index.extend(indexed)
        tail = text[: rng.randrange(2, 200)]
        length, after = index.longest(tail)
        assert length == longest_by_search(text, indexed, tail)
        if length:
            assert text[after - length : after] == tail[-length:]
            assert after <= indexed


@pytest.mark.parametrize("seed", range(20))
def test_a_growing_text_is_followed_as_a_search_would(seed):
    rng = random.Random(seed)
    text = [rng.randrange(4) for _ in range(5)]
    own = OwnText(text)
    for _ in range(150):
        length, after = own.update(), own.after
        assert length >= min(SURE_MATCH, longest_by_search(text, len(text) - 1, text))
        assert text[after - length : after] == text[len(text) - length :]
        assert length == 0 or after < len(text)
        # As steps do: one token, or several that were guessed, or anything.
        gained = own.draft(MOST_DRAFTS).tokens[: rng.randrange(1, 6)] if length and rng.random() < 0.7 else []
        text += gained or [rng.randrange(4) for _ in range(rng.choice([1, 1, 1, 3]))]


def test_a_text_that_is_copied_is_neither_searched_nor_indexed_again():
    """What a step costs does not grow with the text: counted, since times depend on the machine."""
    prompt = list(range(3000))
    own = OwnText([*prompt, *range(SURE_MATCH)])
    own.update()
    searches, indexed = own.index.searches, len(own.index)
    for token in range(SURE_MATCH, 1000):
        own.tokens.append(token)
        assert own.update() >= SURE_MATCH
        assert own.draft(3).tokens == [token + 1, token + 2, token + 3]
    assert (own.index.searches, len(own.index)) == (searches, indexed)
    own.tokens.append(9999)
    own.update()  # what was not indexed is indexed now, once
    assert len(own.index) == len(own.tokens) - 1


def test_a_step_adds_one_position_to_the_index_and_compares_few():
    rng = random.Random(0)
    own = OwnText([rng.randrange(50) for _ in range(8192)])
    while len(own.index) < len(own.tokens) - 1:
        own.update()
    for _ in range(200):
        before, searches = len(own.index), own.index.searches
        own.tokens.append(rng.randrange(50))
        own.update()
        assert len(own.index) <= before + 1
        assert own.index.searches <= searches + MOST_CANDIDATES


def test_what_followed_before_is_proposed_again():
    seq = sequence([1, 2, 3, 4, 5, 6, 9, 9, 1, 2, 3])
    assert propose(NgramDrafter(), seq).tokens[:5] == [4, 5, 6, 9, 9]
    assert propose(SuffixDrafter(), seq).match == 3


def test_an_ngram_needs_three_tokens_and_a_suffix_two():
    seq = sequence([1, 2, 3, 4, 8, 2, 3])
    assert propose(NgramDrafter(), seq) is None
    assert propose(SuffixDrafter(), seq).tokens[0] == 4
    assert propose(SuffixDrafter(), sequence([1, 2, 3, 4, 5])) is None


def test_the_longest_match_wins_over_the_newest():
    seq = sequence([5, 1, 2, 3, 7, 8, 2, 3, 9, 9, 5, 1, 2, 3])
    draft = propose(SuffixDrafter(), seq)
    assert (draft.match, draft.tokens[0]) == (4, 7)


def test_a_loop_is_followed_beyond_its_end():
    draft = propose(NgramDrafter(), sequence([7, 8, 9] * 4))
    assert draft.tokens == ([7, 8, 9] * 5)[:MOST_DRAFTS]
    assert len(draft.tokens) == MOST_DRAFTS


def test_a_long_prompt_is_indexed_over_several_steps():
    drafter = NgramDrafter()
    text = [i % 50_000 for i in range(3 * INDEXED_AT_ONCE)]
    seq = sequence([*text, *text[-900:-890]])
    assert propose(drafter, seq) is None  # the place it repeats is not indexed yet
    seq.tokens += text[-890:-888]
    propose(drafter, seq)
    seq.tokens += text[-888:-886]
    assert propose(drafter, seq).tokens[0] == text[-886]


def finished(drafter: SuffixDrafter, tokens: list[int], output: int, **outer: object) -> None:
    seq = sequence(tokens, output, **outer)
    propose(drafter, seq)
    seq.state = SeqState.FINISHED
    drafter.forget(seq)


def test_past_answers_are_found_in_their_namespace_alone():
    drafter = SuffixDrafter()
    finished(drafter, [1, 2, 11, 12, 13, 14, 15, 16], 6, cache_namespace="a")
    ours = sequence([3, 3, 11, 12, 13, 14], 4, cache_namespace="a")
    assert propose(drafter, ours).tokens == [15, 16]  # to the end of that answer
    for other in ({"cache_namespace": "b"}, {}, {"cache_namespace": "a", "adapter": "x"}):
        assert propose(drafter, sequence([3, 3, 11, 12, 13, 14], 4, **other)) is None


def test_prompts_are_not_remembered():
    drafter = SuffixDrafter()
    finished(drafter, [11, 12, 13, 14, 15, 16, 1, 2, 3, 4], 4)
    assert propose(drafter, sequence([7, 11, 12, 13, 14], 2)) is None


def test_its_own_text_precedes_past_answers_that_match_no_further():
    drafter = SuffixDrafter()
    finished(drafter, [1, 1, 21, 22, 23, 24, 30], 5)
    own = sequence([20, 21, 22, 23, 24, 40, 20, 21, 22, 23, 24], 2)
    assert propose(drafter, own).tokens[0] == 40


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(suffix, "GENERATION_TOKENS", 200)
    drafter = SuffixDrafter()
    rng = random.Random(0)
    for number in range(100):
        answer = [rng.randrange(1000) for _ in range(rng.randrange(4, 150))]
        finished(drafter, [1, *answer], len(answer), cache_namespace=str(number % 11))
    assert drafter.num_past_tokens <= suffix.MOST_NAMESPACES * 2 * 200
    assert len(drafter) == 0


def test_preempted_ones_are_forgotten_and_not_learned():
    drafter = SuffixDrafter()
    seq = sequence([1, 2, 11, 12, 13, 14, 15, 16], 6)
    propose(drafter, seq)
    drafter.forget(seq)
    assert (len(drafter), drafter.num_past_tokens) == (0, 0)
