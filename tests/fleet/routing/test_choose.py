"""choose(): which replica gets a request."""

from __future__ import annotations

from random import Random

from ridgeline.fleet.messages import ModelEntry, ReplicaEntry, Table
from ridgeline.fleet.routing.book import LoadBook
from ridgeline.fleet.routing.choose import choose
from ridgeline.fleet.routing.policy import Policy
from ridgeline.fleet.routing.prefixes import PrefixMap
from ridgeline.fleet.routing.prompt import PromptView


def test_a_replica_with_the_prefix_is_chosen_among_equals() -> None:
    book, prefixes = LoadBook(lambda: 0.0), PrefixMap()
    replicas = tuple(ReplicaEntry(f"m-{n}", "m", "http://x", "ready", "", "v1") for n in range(4))
    book.set_table(Table(1, (ModelEntry("m"),), replicas))
    prefixes.snapshot("m-2", 0, range(100, 110))
    prompt = PromptView("m", list(range(100, 110)), 640)
    choice = choose(book, prefixes, prompt, Policy(), Random(1), 0.0)
    assert choice is not None
    assert (choice.replica_id, choice.matched_blocks) == ("m-2", 10)
    ticket = book.charge(choice.replica_id, prompt, choice.matched_blocks)
    assert book.in_flight() == 1
    book.discharge(ticket)
    book.discharge(ticket)
    assert book.in_flight() == 0
