"""Regions: where a request of this router may be computed, and where it goes on after a failure.

A region is up while it has a replica of the model that may take requests. It is in doubt when one of its
replicas has died and no other has reported since: then a request that failed there goes on elsewhere. What
leaves a region that is up is paid from the budget of `GeoFailover`; a region that is down costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from ridgeline.fleet.messages import ModelEntry, ReplicaEntry
from ridgeline.fleet.placement.geo import GeoFailover
from ridgeline.fleet.placement.regions import Rules, all_allow
from ridgeline.fleet.routing.choose import Choice
from ridgeline.proxy.errors import NoReplica

IN_SERVICE = ("ready", "ramping")
RETRY_AFTER_S = 30.0

Choose = Callable[[Collection[str]], Choice | None]  # with replicas that are excluded


class Replica(Protocol):
    """A replica as its router knows it. Times are seconds of the clock."""

    entry: ReplicaEntry
    id: str
    is_lost: bool
    died_at: float  # when it last failed a request so that others would fail too

    @property
    def heard_at(self) -> float:
        """When its feed last had a line."""
        ...


class Regions:
    def __init__(self, own: str, replicas: Mapping[str, Replica], clock: Callable[[], float]) -> None:
        """own: the router's. replicas: of the router, by id; it changes them."""
        self.own, self._replicas = own, replicas
        self.failover = GeoFailover(clock)

    def rules_of(self, entry: ModelEntry, residency: Rules) -> Rules:
        """Of a model and a request together. NoReplica: no region of the model satisfies them."""
        rules = tuple(rule for rule in (entry.residency, *residency) if rule)
        if not rules:
            return ()
        known = {one.entry.region for one in self._replicas.values() if one.entry.model == entry.name}
        if not any(all_allow(rules, region) for region in known.union(entry.regions)):
            allowed = " and ".join(", ".join(rule) for rule in rules)
            has = ", ".join(sorted(filter(None, known.union(entry.regions)))) or "none with a name"
            message = f"residency allows the regions {allowed}; {entry.name} has replicas in: {has}"
            raise NoReplica(message, RETRY_AFTER_S)
        return rules

    def states(self, inhibited: Collection[str] = ()) -> dict[str, bool]:
        """Each region of a replica in service, and whether it is up."""
        found: dict[str, bool] = {}
        for one in self._replicas.values():
            if one.entry.region and one.entry.state in IN_SERVICE:
                is_up = not one.is_lost and one.id not in inhibited
                found[one.entry.region] = found.get(one.entry.region, False) or is_up
        return found

    def choose_again(
        self, choose: Choose, model: str, failed: Collection[str], inhibited: Collection[str]
    ) -> Choice | None:
        """For a request that these replicas have failed. inhibited: replicas that no request may use now."""
        exclude = {*inhibited, *failed}
        mine = [one for one in self._replicas.values() if one.entry.model == model]
        tried = {one.entry.region for one in mine if one.id in failed} - {""}
        if not tried or all(one.entry.region in tried for one in mine):
            return choose(exclude)
        alive = [
            one
            for one in mine
            if one.entry.state in IN_SERVICE and not one.is_lost and one.id not in inhibited
        ]
        up = {one.entry.region for one in alive}
        if self.failover.may_leave(tried, up):
            doubted = {region for region in tried & up if self._is_doubted(region, mine, alive)}
            outside = {one.id for one in mine if one.entry.region in doubted}
            choice = (choose(exclude | outside) if outside else None) or choose(exclude)
        else:
            choice = choose(exclude.union(one.id for one in mine if one.entry.region not in tried))
        if choice is not None:
            self.failover.went(tried, up, self._replicas[choice.replica_id].entry.region)
        return choice

    def _is_doubted(self, region: str, mine: Collection[Replica], alive: Collection[Replica]) -> bool:
        """Whether a replica there has died, and none that is left has reported since."""
        died_at = max(one.died_at for one in mine if one.entry.region == region)
        heard_at = max(one.heard_at for one in alive if one.entry.region == region)
        return heard_at < died_at
