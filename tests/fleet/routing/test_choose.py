"""choose(): which replica gets a request, by each policy."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.fleet.routing.book import LoadBook
from ridgeline.fleet.routing.choose import Choice, choose
from ridgeline.fleet.routing.policy import POLICIES, Policy
from ridgeline.fleet.routing.prefixes import PrefixMap
from ridgeline.fleet.routing.prompt import PromptView
from ridgeline.replica.messages import Load
from tests.clock import Clock
from tests.fleet.routing.fleets import book_of, entry, load, started, table

PROMPT = PromptView("m", list(range(100, 110)), 640)
EMPTY = PrefixMap()


def chosen(
    book: LoadBook,
    prompt: PromptView = PROMPT,
    policy: str = "default",
    seed: int = 1,
    prefixes: PrefixMap = EMPTY,
) -> Choice | None:
    return choose(book, prefixes, prompt, Policy(policy), Random(seed), book.clock())  # type: ignore[arg-type]


def name_of(choice: Choice | None) -> str:
    assert choice is not None
    return choice.replica_id


def test_a_replica_with_the_prefix_is_chosen_among_equals() -> None:
    for policy in ("default", "prefix"):
        book, prefixes = book_of(*map(entry, range(4))), PrefixMap()
        prefixes.snapshot("m-2", 0, PROMPT.blocks)
        choice = chosen(book, policy=policy, prefixes=prefixes)
        assert choice is not None
        assert (choice.replica_id, choice.matched_blocks, choice.reason) == ("m-2", 10, "prefix")


def test_the_longer_of_two_matches_is_chosen() -> None:
    book, prefixes = book_of(*map(entry, range(4))), PrefixMap()
    prefixes.snapshot("m-1", 0, PROMPT.blocks[:3])
    prefixes.snapshot("m-2", 0, PROMPT.blocks[:7])
    prefixes.snapshot("m-3", 0, PROMPT.blocks[4:])  # without the beginning: no match
    choice = chosen(book, prefixes=prefixes)
    assert choice is not None
    assert (choice.replica_id, choice.matched_blocks) == ("m-2", 7)


def test_a_queue_longer_than_what_the_prefix_saves_outweighs_it() -> None:
    book, prefixes = book_of(*map(entry, range(2))), PrefixMap()
    prefixes.snapshot("m-0", 0, PROMPT.blocks)
    book.hear("m-0", load(waiting=1, queued_tokens=3000))
    assert name_of(chosen(book, prefixes=prefixes)) == "m-1"
    assert name_of(chosen(book, policy="prefix", prefixes=prefixes)) == "m-0"


def test_a_busy_replicas_prefix_counts_less_unless_prompts_wait_everywhere() -> None:
    book, prefixes = book_of(*map(entry, range(2))), PrefixMap()
    prompt = PromptView("m", list(range(40)), 2560)
    prefixes.snapshot("m-0", 0, prompt.blocks)
    book.hear("m-0", load(running=8))  # they cost as much as 1,024 tokens: less than the prefix saves
    assert name_of(chosen(book, prompt, prefixes=prefixes)) == "m-1"
    for number, running in ((0, 8), (1, 0)):
        book.hear(f"m-{number}", load(running=running, queued_tokens=20_000))
    assert name_of(chosen(book, prompt, prefixes=prefixes)) == "m-0"


def test_a_prefix_outweighs_a_queue_that_is_shorter_than_it() -> None:
    book, prefixes = book_of(*map(entry, range(2))), PrefixMap()
    prompt = PromptView("m", list(range(10)), 640)
    prefixes.snapshot("m-0", 0, prompt.blocks)
    book.hear("m-0", load(queued_tokens=400))
    assert name_of(chosen(book, prompt, prefixes=prefixes)) == "m-0"
    book.hear("m-0", load(queued_tokens=1600))  # more than twice the prompt: the half of it waits on average
    assert name_of(chosen(book, prompt, prefixes=prefixes)) == "m-1"


def test_a_predicted_wait_counts_the_tokens_before_and_those_of_the_prompt() -> None:
    book = book_of(entry(0))
    book.hear("m-0", load(queued_tokens=1360))
    choice = chosen(book)
    assert choice is not None
    assert choice.predicted_wait_s == pytest.approx((1360 + 640) / 2000)  # the speed assumed at first


def test_equal_replicas_are_chosen_about_equally_often() -> None:
    book, rng = book_of(*map(entry, range(8))), Random(3)
    policy = Policy()
    counts = Counter(name_of(choose(book, EMPTY, PROMPT, policy, rng, 100.0)) for _ in range(800))
    assert len(counts) == 8
    assert max(counts.values()) < 160


def test_round_robin_takes_turns() -> None:
    book, order = book_of(*map(entry, range(3))), []
    for _ in range(9):
        order.append(name_of(chosen(book, policy="round-robin")))
        book.discharge(book.charge(order[-1], PROMPT))
    assert sorted(order[:3]) == ["m-0", "m-1", "m-2"]
    assert order == order[:3] * 3


def test_least_loaded_counts_tokens_and_kv_blocks_and_not_requests_alone() -> None:
    book = book_of(*map(entry, range(3)))
    book.hear("m-0", load(running=2, kv_blocks_held=600))  # two requests of long context
    book.hear("m-1", load(running=2, queued_tokens=9000))
    book.hear("m-2", load(running=3, kv_blocks_held=30))
    assert name_of(chosen(book, policy="least-loaded")) == "m-2"


def test_an_adapter_that_is_loaded_attracts_its_requests() -> None:
    prompt = PromptView("ada", PROMPT.blocks, 640, adapter="ada")
    for policy in ("lora", "default"):
        book = book_of(*map(entry, range(4)))
        book.hear("m-3", load(adapters=("ada",), running=1))
        choice = chosen(book, prompt, policy)
        assert choice is not None
        assert (choice.replica_id, choice.reason) == ("m-3", "adapter")
    book.hear("m-3", load(adapters=("ada",), running=7, queued_tokens=20_000))
    assert name_of(chosen(book, prompt)) != "m-3"
    book.charge("m-1", prompt)  # it will load the adapter
    assert name_of(chosen(book, prompt, "lora")) in ("m-1", "m-3")


def test_a_session_stays_at_its_replica_and_moves_alone_when_that_is_lost() -> None:
    book = book_of(*map(entry, range(8)))
    sessions = [PromptView("m", (), 100, session=f"s{number}") for number in range(200)]
    before = {one.session: name_of(chosen(book, one, "sticky", seed)) for seed, one in enumerate(sessions)}
    assert len(set(before.values())) == 8
    other_router = book_of(*map(entry, range(8)))
    assert before == {one.session: name_of(chosen(other_router, one, "sticky", 99)) for one in sessions}
    book.lost("m-5")
    after = {one.session: name_of(chosen(book, one, "sticky")) for one in sessions}
    assert {before[name] for name in before if before[name] != after[name]} == {"m-5"}


def test_the_default_gives_an_idle_session_its_own_replica() -> None:
    book = book_of(*map(entry, range(8)))
    prompt = PromptView("m", (), 1000, session="s")
    assert len({name_of(chosen(book, prompt, seed=seed)) for seed in range(20)}) == 1


def test_a_replica_in_the_clients_region_is_preferred_until_it_is_busy() -> None:
    book = book_of(entry(0, region="us"), entry(1, region="eu"), entry(2, region="us"))
    prompt = PromptView("m", (), 640, region="eu")
    assert name_of(chosen(book, prompt)) == "m-1"
    book.hear("m-1", load(queued_tokens=4000))
    assert name_of(chosen(book, prompt)) in ("m-0", "m-2")
    stays = PromptView("m", (), 640, region="eu", residency=(("eu",),))
    assert name_of(chosen(book, stays)) == "m-1"
    assert chosen(book, PromptView("m", (), 640, residency=(("asia",),))) is None


def test_a_canary_gets_its_share() -> None:
    for policy in POLICIES:
        book, rng = book_of(*map(entry, range(3)), entry(3, version="v2", weight=0.2)), Random(5)
        asked = (choose(book, EMPTY, PROMPT, Policy(policy), rng, 100.0) for _ in range(3000))
        share = sum(name_of(one) == "m-3" for one in asked) / 3000
        assert 0.04 < share < 0.09, policy  # 0.2 of 3.2: 0.0625


def test_a_session_keeps_its_version() -> None:
    book = book_of(entry(0), entry(1, version="v2", weight=0.5))
    for number in range(50):
        prompt = PromptView("m", (), 100, session=f"s{number}")
        assert len({name_of(chosen(book, prompt, seed=seed)) for seed in range(5)}) == 1


def test_a_saturated_canary_leaves_its_share_to_the_others() -> None:
    book = book_of(entry(0), entry(1, version="v2", weight=0.5))
    book.hear("m-1", load(running=8, waiting=1))
    assert {name_of(chosen(book, seed=seed)) for seed in range(20)} == {"m-0"}


def test_a_silent_replica_is_less_preferred_then_excluded_unless_all_are() -> None:
    clock = Clock()
    book = book_of(entry(0), entry(1), clock=clock)
    clock.now += 3
    book.hear("m-1", load(running=1))
    assert name_of(chosen(book)) == "m-1"
    book.hear("m-1", load(running=8, waiting=1))
    assert name_of(chosen(book)) == "m-0"  # stale, and the only one with room
    clock.now += 8
    book.hear("m-1", load(running=8, waiting=1))
    assert chosen(book) is None  # silent for longer than silent_s: not counted on
    clock.now += 100
    book.hear("m-1", load(state="draining"))
    assert name_of(chosen(book)) == "m-0"  # all that are left are silent


def test_requests_are_held_when_slots_kv_or_time_are_used_up() -> None:
    for full in (load(running=8, waiting=1), load(running=2, kv_blocks_held=960)):
        book = book_of(entry(0))
        book.hear("m-0", full)
        assert chosen(book) is None
        assert book.candidates("m") == 1
    assert chosen(book_of(entry(0, "starting"))) is None


def test_a_replica_with_seconds_of_prompts_to_compute_is_saturated_once_its_speed_is_known() -> None:
    clock = Clock()
    book = book_of(entry(0), clock=clock)

    def line(steps: int, queued_tokens: int) -> Load:
        done = {"steps": steps, "busy_s": 0.25 * steps, "prefill_tokens": 250 * steps}
        return load(running=2, queued_tokens=queued_tokens, **done)

    for number in range(1, 40):
        clock.now += 0.25
        book.hear("m-0", line(number, 1000))
    assert chosen(book) is not None
    book.hear("m-0", line(40, 8000))
    assert chosen(book) is None  # 8 s at 1,000 tokens/s


def test_excluded_replicas_are_not_chosen() -> None:
    book = book_of(entry(0), entry(1))
    choice = choose(book, EMPTY, PROMPT, Policy(), Random(1), 100.0, exclude=("m-0", "gone"))
    assert name_of(choice) == "m-1"
    assert choose(book, EMPTY, PROMPT, Policy(), Random(1), 100.0, exclude=("m-0", "m-1")) is None


def test_an_unknown_policy_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'fastest'.*round-robin"):
        Policy("fastest")  # type: ignore[arg-type]


STATES = st.sampled_from(["starting", "ramping", "ready", "draining", "lost"])


@settings(max_examples=60, deadline=None)
@given(
    states=st.lists(st.tuples(STATES, st.booleans(), st.integers(0, 12), st.integers(0, 1000)), max_size=8),
    policy=st.sampled_from(POLICIES),
    seed=st.integers(0, 1000),
)
def test_only_replicas_in_service_with_room_are_chosen(states, policy, seed) -> None:  # type: ignore[no-untyped-def]
    book = LoadBook(Clock())
    entries = [entry(number, state) for number, (state, *_) in enumerate(states)]
    book.set_table(table(*entries))
    for one, (_, lost, running, kv) in zip(entries, states, strict=True):
        book.hear(one.id, started())
        book.hear(one.id, load(running=running, kv_blocks_held=kv, ended=100))
        if lost:
            book.lost(one.id)
    usable = {
        one.id
        for one, (state, lost, running, kv) in zip(entries, states, strict=True)
        if state in ("ready", "ramping") and not lost and running < 9 and kv < 950
    }
    choice = chosen(book, PromptView("alias", (1, 2), 100, session="s"), policy, seed)
    assert (choice.replica_id in usable) if choice is not None else not usable
