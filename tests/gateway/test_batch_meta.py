"""What the store keeps of a batch: read as it was written, also by earlier gateways."""

from __future__ import annotations

import msgspec
import pytest

from ridgeline.gateway.objects.batch_meta import BatchMeta, Stopped, meta_of
from ridgeline.gateway.tenants.owned import Meta, Owned


def of(meta: Meta) -> BatchMeta:
    """By way of the store's JSON."""
    return meta_of(
        Owned("batch_1", "key_a", "gpu", "batch", 5, msgspec.json.decode(msgspec.json.encode(meta)))
    )


def test_a_batch_is_read_as_it_was_noted() -> None:
    meta = BatchMeta("m", "gpu/m", ("chat",), 2, 30, 40, 50, key="key_a", used=(3, 4), held_pusd=0)
    assert of(meta.stored()) == meta
    stopped = msgspec.structs.replace(meta, stopped=Stopped("budget_exceeded", "no room"))
    assert of(stopped.stored()) == stopped


def test_what_was_not_noted_is_not_in_the_store() -> None:
    """Earlier gateways ask whether a name is there: `at_ms` 0 would date the batch to 1970."""
    assert not {"stopped", "held_pusd", "lines", "at_ms", "order"} & BatchMeta("m").stored().keys()


def test_the_amounts_of_a_free_batch_are_in_the_store() -> None:
    """Earlier gateways read them without asking."""
    stored = BatchMeta("m", lines=3).stored()
    assert (stored["tokens_in"], stored["tokens_out"], stored["cost_pusd"]) == (0, 0, 0)


def test_what_an_earlier_gateway_has_left_out_or_added_is_no_hindrance() -> None:
    meta = of({"model": "m", "cost_pusd": 7, "shown": {"id": "file_1"}, "used": [1, 2]})
    assert (meta.model, meta.cost_pusd, meta.used, meta.lines, meta.held_pusd) == ("m", 7, (1, 2), 0, None)


def test_money_that_is_no_number_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="cost_pusd"):
        of({"model": "m", "cost_pusd": "much"})
