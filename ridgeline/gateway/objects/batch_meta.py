"""BatchMeta: what the gateway remembers of a batch. It is in the store as the `meta` of an owned object.

A file has what its lines gave; an order adds what was reserved; a batch adds what it has used.
"""

from __future__ import annotations

import msgspec

from ridgeline.gateway.tenants.owned import Meta, Owned


class Stopped(msgspec.Struct, frozen=True):
    """Why the gateway has cancelled a batch."""

    code: str
    message: str


class BatchMeta(msgspec.Struct, frozen=True, omit_defaults=True):
    # of the file
    model: str = ""  # the public name, one for all lines; empty: the file is not a batch's input
    upstream_model: str = ""
    endpoints: tuple[str, ...] = ()
    lines: int = 0  # 0: uploaded before batches were estimated
    tokens_in: int = 0  # at most, of all lines; likewise the next two
    tokens_out: int = 0
    cost_pusd: int = 0
    # of the order
    key: str = ""
    team: str = ""
    order: str = ""  # the id of its reservation
    input_file_id: str = ""
    reserved_tokens: int = 0
    at_ms: int = 0
    # of the batch, as it was last seen
    used: tuple[int, int] = (0, 0)  # tokens read and written
    spent_pusd: int = 0
    held_pusd: int | None = None  # what it holds of its budgets; None: not looked at yet
    stopped: Stopped | None = None

    def stored(self) -> Meta:
        """As the store keeps it: defaults are left out, except the amounts that earlier gateways require."""
        noted: Meta = msgspec.to_builtins(self)
        amounts = {"tokens_in": self.tokens_in, "tokens_out": self.tokens_out, "cost_pusd": self.cost_pusd}
        return {**amounts, **noted}


def meta_of(owned: Owned) -> BatchMeta:
    """Of a batch, an order or a file. msgspec.ValidationError where the store holds something else."""
    return msgspec.convert(owned.meta, BatchMeta)
