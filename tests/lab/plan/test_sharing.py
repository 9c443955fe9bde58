import pytest

from ridgeline.lab.plan.sharing import sharing
from ridgeline.lab.traffic.request import PlannedRequest, Traffic


def blocks(*prompts: tuple[float, tuple[int, ...]]) -> Traffic:
    requests = tuple(PlannedRequest(at, 10 * len(ids) + 5, 1, prefix=ids) for at, ids in prompts)
    return Traffic("blocks", requests, prefix_block_tokens=10)


def test_only_an_equal_beginning_is_shared() -> None:
    found = sharing(blocks((0, (1, 2, 3)), (1, (1, 2, 9)), (2, (7, 2, 3))))
    assert found.shared_tokens == 20
    assert found.share == pytest.approx(20 / 105)


def test_a_cache_forgets_what_was_not_used_for_long() -> None:
    traffic = blocks((0, (1, 2)), (100, (1, 2)), (1000, (1, 2)))
    assert sharing(traffic).shared_tokens == 40
    assert sharing(traffic, kept_s=300).shared_tokens == 20


def test_a_small_cache_keeps_what_was_used_last() -> None:
    traffic = blocks((0, (1,)), (1, (2,)), (2, (2,)), (3, (1,)))
    assert sharing(traffic, cache_tokens=10).shared_tokens == 10
    assert sharing(traffic, cache_tokens=20).shared_tokens == 20


def test_a_conversation_finds_all_that_was_said() -> None:
    turns = (
        PlannedRequest(0.0, 100, 50, conversation=1),
        PlannedRequest(0.0, 180, 50, conversation=1, turn=1),
        PlannedRequest(0.0, 90, 10, conversation=2),
    )
    assert sharing(Traffic("talk", turns)).shared_tokens == 150


def test_traffic_that_says_nothing_of_prefixes_is_unknown_not_unshared() -> None:
    assert not sharing(Traffic("plain", (PlannedRequest(0.0, 10, 1),))).known
