"""LoadBook: charged at dispatch, reconciled with each Load line, and back to zero."""

from __future__ import annotations

from collections import Counter
from random import Random

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.fleet.messages import ModelEntry, Table
from ridgeline.fleet.routing.book import LoadBook
from ridgeline.fleet.routing.choose import choose
from ridgeline.fleet.routing.columns import Field
from ridgeline.fleet.routing.policy import POLICIES, Policy
from ridgeline.fleet.routing.prefixes import PrefixMap
from ridgeline.fleet.routing.prompt import PromptView
from tests.clock import Clock
from tests.fleet.routing.fleets import book_of, entry, load, started, table

PROMPT = PromptView("m", (), 640)


def value(book: LoadBook, field: Field, number: int = 0) -> float:
    columns = book.columns("m")
    assert columns is not None
    return float(columns.field(field)[columns.names.index(f"m-{number}")])


def test_a_charge_counts_at_once_and_its_discharge_leaves_zero() -> None:
    book = book_of(entry(0))
    ticket = book.charge("m-0", PROMPT)
    assert (value(book, Field.REQUESTS), value(book, Field.TOKENS), book.in_flight()) == (1, 640, 1)
    book.discharge(ticket)
    book.discharge(ticket)
    assert (value(book, Field.REQUESTS), value(book, Field.TOKENS), book.in_flight()) == (0, 0, 0)


def test_a_load_line_that_counts_a_request_replaces_its_charge() -> None:
    clock = Clock()
    book = book_of(entry(0), clock=clock)
    ticket = book.charge("m-0", PROMPT)
    clock.now += 0.01
    book.hear("m-0", load())  # written before the request came
    assert (value(book, Field.REQUESTS), value(book, Field.TOKENS)) == (1, 640)
    clock.now += 0.25
    book.hear("m-0", load(accepted=1, running=1, queued_tokens=200))
    assert (value(book, Field.REQUESTS), value(book, Field.TOKENS)) == (1, 200)
    book.first_token(ticket)
    assert value(book, Field.TOKENS) == 0
    book.discharge(ticket)  # the last line still counts it
    assert value(book, Field.REQUESTS) == 0


def test_a_request_that_the_replica_has_not_accepted_stays_charged() -> None:
    clock = Clock()
    book = book_of(entry(0), clock=clock)
    for _ in range(3):
        book.charge("m-0", PROMPT)
    clock.now += 0.25
    book.hear("m-0", load(accepted=1, running=1, queued_tokens=100))
    assert (value(book, Field.REQUESTS), value(book, Field.TOKENS)) == (3, 100 + 2 * 640)
    clock.now += 0.25
    book.hear("m-0", load(accepted=3, running=3))
    assert (value(book, Field.REQUESTS), value(book, Field.TOKENS)) == (3, 0)


def test_a_new_process_has_none_of_the_requests_of_the_last_one() -> None:
    book = book_of(entry(0))
    ticket = book.charge("m-0", PROMPT)
    book.hear("m-0", started("e2"))
    assert book.candidates("m") == 0  # the table does not know it yet
    book.set_table(table(entry(0, epoch="e2"), generation=2))
    assert (book.candidates("m"), value(book, Field.REQUESTS)) == (1, 0)
    assert book.in_flight() == 1
    book.discharge(ticket)
    assert (book.in_flight(), value(book, Field.REQUESTS)) == (0, 0)


def test_a_lost_replica_returns_with_its_feed() -> None:
    book = book_of(entry(0))
    book.lost("m-0")
    book.lost("unknown")
    assert book.candidates("m") == 0
    book.hear("m-0", started())
    assert book.candidates("m") == 1


def test_an_older_table_is_ignored_and_aliases_name_the_model() -> None:
    book = book_of(entry(0), entry(1))
    assert not book.set_table(table(entry(0), generation=0))
    assert (book.candidates("m"), book.candidates("alias"), book.candidates("ada")) == (2, 2, 2)
    assert book.candidates("other") == 0


def test_a_model_s_own_name_is_not_taken_by_another_model_s_adapter() -> None:
    models = (ModelEntry("m", ("alias",)), ModelEntry("n", (), ("m", "alias", "ada")))
    for order in (models, models[::-1]):
        book = LoadBook(lambda: 0.0)
        book.set_table(Table(1, order, ()))
        assert {name: one.name for name, one in book.models.items()} == {
            "m": "m",
            "alias": "m",
            "n": "n",
            "ada": "n",
        }


def test_a_request_at_a_replica_that_left_the_table_is_still_in_flight() -> None:
    book = book_of(entry(0), entry(1))
    ticket = book.charge("m-0", PROMPT)
    book.set_table(table(entry(1), generation=2))
    assert (book.in_flight(), book.in_flight(replica_id="m-1")) == (1, 0)
    book.hear("m-0", load())
    book.discharge(ticket)
    assert (book.in_flight(), value(book, Field.REQUESTS, 1)) == (0, 0)


def test_speed_is_learned_from_load_lines() -> None:
    """A step of a slow replica is longer than the time between two lines: most of them count no step."""
    clock, rng = Clock(), Random(2)
    book = book_of(entry(0), clock=clock)
    token_s, running_s, step_s = 1 / 1000, 1 / 200, 0.01
    steps = made = computed = 0
    busy_s = 0.0
    for _ in range(300):
        running, chunk = rng.randrange(1, 9), rng.choice((0, 0, 0, 512))
        took = step_s + running_s * running + token_s * chunk
        for _ in range(int(took / 0.25) + 1):
            clock.now += 0.25
            line = load(
                running=running, steps=steps, output_tokens=made, prefill_tokens=computed, busy_s=busy_s
            )
            book.hear("m-0", line)
        steps, made, computed, busy_s = steps + 1, made + running, computed + chunk, busy_s + took
    cost = book.rows["m-0"].cost
    assert cost.learned
    assert 0.8 < cost.token_s / token_s < 1.25
    assert 0.7 < cost.running_s / running_s < 1.4


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["send", "end", "hear", "wait", "lost"]), st.integers(0, 99)), max_size=120
)


@settings(max_examples=60, deadline=None)
@given(actions=ACTIONS, policy=st.sampled_from(POLICIES))
def test_no_replica_is_above_its_limit_and_the_end_is_zero(actions, policy) -> None:  # type: ignore[no-untyped-def]
    clock, rng = Clock(), Random(1)
    book = book_of(*map(entry, range(3)), clock=clock, max_running=4)
    open_tickets, accepted = [], Counter()  # type: ignore[var-annotated]

    def tell(name: str) -> None:
        running = sum(one.replica_id == name for one in open_tickets)
        tokens = sum(one.tokens for one in open_tickets if one.replica_id == name)
        ended = accepted[name] - running
        book.hear(name, load(running=running, accepted=accepted[name], ended=ended, queued_tokens=tokens))

    for action, number in actions:
        name = f"m-{number % 3}"
        if action == "send":
            choice = choose(book, PrefixMap(), PROMPT, Policy(policy), rng, clock())
            if choice is not None:
                open_tickets.append(book.charge(choice.replica_id, PROMPT))
                accepted[choice.replica_id] += 1
            at = Counter(one.replica_id for one in open_tickets)
            assert max(at.values(), default=0) <= 5  # 4 run and 1 waits
            if choice is None and not any(row.lost for row in book.rows.values()):
                assert sum(at.values()) == 15
        elif action == "end" and open_tickets:
            book.discharge(open_tickets.pop(number % len(open_tickets)))
        elif action == "hear":
            tell(name)
        elif action == "wait":
            clock.now += number / 100
        elif action == "lost":
            book.lost(name)
        assert book.in_flight() == len(open_tickets)
    for ticket in open_tickets:
        book.discharge(ticket)
    open_tickets.clear()
    for number in range(3):
        tell(f"m-{number}")
        book.hear(f"m-{number}", started())
        assert (value(book, Field.REQUESTS, number), value(book, Field.TOKENS, number)) == (0, 0)
        assert value(book, Field.KV, number) == 0
    assert book.in_flight() == 0


def spread(routers: int, told: int, seed: int) -> list[int]:
    """Requests at eight replicas, one of them idle, after each router sent 16 between two Load lines."""
    at: Counter[str] = Counter()
    for router in range(routers):
        rng = Random(seed + router)
        book = book_of(*map(entry, range(8)), max_running=64, routers=told)
        for number in range(1, 8):
            book.hear(f"m-{number}", load(running=4))
        for _ in range(16):
            choice = choose(book, PrefixMap(), PROMPT, Policy(), rng, book.clock())
            assert choice is not None
            book.charge(choice.replica_id, PROMPT)
            at[choice.replica_id] += 1
    return [at[f"m-{number}"] + 4 * (number > 0) for number in range(8)]


def test_routers_with_books_of_their_own_do_not_herd_to_the_idle_replica() -> None:
    for seed in range(5):
        blind, aware = spread(4, 1, seed), spread(4, 4, seed)
        mean = sum(aware) / 8
        assert max(aware) < 1.4 * mean
        assert max(aware) <= max(blind)


def test_a_charge_counts_once_for_each_router_until_it_is_seen() -> None:
    clock = Clock()
    book = book_of(entry(0), clock=clock, routers=4)
    book.charge("m-0", PROMPT)
    assert (value(book, Field.REQUESTS), value(book, Field.SHARED), value(book, Field.TOKENS)) == (
        1,
        4,
        4 * 640,
    )
    clock.now += 0.25
    book.hear("m-0", load(accepted=1, running=1, queued_tokens=640))
    assert (value(book, Field.REQUESTS), value(book, Field.SHARED), value(book, Field.TOKENS)) == (1, 1, 640)


def test_two_routers_spread_requests_over_equal_replicas() -> None:
    at: Counter[str] = Counter()
    for router in range(2):
        book, rng = book_of(*map(entry, range(8)), max_running=64), Random(router)
        for _ in range(20):
            choice = choose(book, PrefixMap(), PROMPT, Policy(), rng, book.clock())
            assert choice is not None
            book.charge(choice.replica_id, PROMPT)
            at[choice.replica_id] += 1
    assert max(at.values()) <= 6  # the mean is 5


def test_the_table_says_how_many_routers_share_the_replicas() -> None:
    book = LoadBook(lambda: 0.0)
    book.set_table(msgspec.structs.replace(table(), routers=3))
    assert book.routers == 3
    book.set_table(table(generation=9))  # a controller that does not know
    assert book.routers == 3
