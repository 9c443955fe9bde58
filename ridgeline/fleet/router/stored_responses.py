"""The replica of a request that continues a stored response: the one that stores it, and no other.

The id of a response begins with the epoch of the server that began it. A stream that moved is stored by the
replica that ended it, which tells so in its feed. A stored response ends with its replica: a request that
continues it is then refused with a text that names the field.
"""

from __future__ import annotations

from collections.abc import Mapping

from ridgeline.fleet.placement.regions import Rules, all_allow
from ridgeline.fleet.router.replica import Replica
from ridgeline.fleet.router.request import FleetRequest
from ridgeline.proxy.errors import InvalidBody, NoReplica
from ridgeline.proxy.json_fields import field
from ridgeline.replica.response_ids import epoch_of

FIELD = "previous_response_id"
RETRY_S = 1.0


def storing_replica(
    request: FleetRequest, model: str, replicas: Mapping[str, Replica], residency: Rules = ()
) -> str:
    """The id of the replica; empty: the request continues no response. Raises InvalidBody, NoReplica."""
    if FIELD not in request.fields or not request.path.startswith("/v1/responses"):
        return ""
    id = field(request.fields, FIELD, str, "")
    if not id:
        return ""
    of_model = [one for one in replicas.values() if one.entry.model == model]
    epoch = epoch_of(id)
    moved = [one for one in of_model if id in one.adopted]
    found = max(moved, key=lambda one: (not one.is_lost, one.adopted[id]), default=None) or next(
        (one for one in of_model if epoch and one.epoch == epoch), None
    )
    if found is not None:
        check_serves(found, residency)
        return found.id
    if epoch and any(not one.epoch for one in of_model):  # one of them has not told its epoch yet
        raise NoReplica(f"{FIELD}: the replica of this response is not known yet", RETRY_S)
    raise _gone(f"no replica of {model} in this fleet stores the response {id[:64]!r}")


def check_serves(replica: Replica | None, residency: Rules) -> None:
    """Raises InvalidBody for a replica that leaves the fleet or is in a forbidden region, NoReplica for one
    that does not answer now.
    """
    if replica is None:
        raise _gone("the replica that stored this response has left the fleet")
    if not all_allow(residency, replica.entry.region):
        raise _gone("the replica that stored this response is in a region that residency does not allow")
    if replica.entry.state == "draining":
        raise _gone("the replica that stored this response is leaving the fleet")
    if replica.is_lost or replica.entry.state not in ("ready", "ramping"):
        raise NoReplica(f"{FIELD}: the replica that stores this response does not answer", RETRY_S)


def _gone(why: str) -> InvalidBody:
    text = f"{FIELD}: {why}; send the conversation so far in `input` instead"
    return InvalidBody(text, "previous_response_not_found", FIELD)
