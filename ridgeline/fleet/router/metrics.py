"""A router's metrics, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ridgeline.fleet.router.demand import BUCKETS_S
from ridgeline.telemetry.exposition import Family, Labels, Page

if TYPE_CHECKING:
    from ridgeline.fleet.router.fleet_router import FleetRouter

PREFIX = "ridgeline_fleet_"

FAMILIES: dict[str, Family] = {
    "requests_total": Family("counter", "Requests that ended, by outcome: ok, failed, refused, cancelled"),
    "arrived_total": Family("counter", "Requests that arrived"),
    "prompt_tokens_total": Family("counter", "Prompt tokens, estimated from bytes"),
    "output_tokens_total": Family("counter", "Output tokens of streams"),
    "moves_total": Family("counter", "Requests that went on at another replica, by cause"),
    "held_total": Family("counter", "Requests that waited because no replica had room"),
    "held_seconds_total": Family("counter", "Time that requests waited for a replica"),
    "held": Family("gauge", "Requests that wait for a replica"),
    "oldest_held_seconds": Family("gauge", "Age of the oldest request that waits", "max"),
    "in_flight": Family("gauge", "Requests at replicas"),
    "cold": Family("gauge", "1 while the model has no replica that may take requests", "max"),
    "ttft_seconds": Family("histogram", "Arrival at the router to the first token"),
    "replica_up": Family("gauge", "1: requests may go to the replica", "max"),
    "replica_running": Family("gauge", "Requests of this router at the replica"),
    "replica_requests_total": Family("counter", "Requests sent to the replica"),
    "replica_failures_total": Family("counter", "Requests that the replica failed"),
    "replica_ejections_total": Family("counter", "Times the replica was ejected without progress"),
    "feed_gaps_total": Family("counter", "Gaps in prefix events, each followed by a snapshot"),
    "budget_refused_total": Family("counter", "Moves and retries that the budget refused, by kind"),
    "table_generation": Family("gauge", "Of the controller's table", "max"),
    "controller_connected": Family("gauge", "1 while the router follows its controller", "min"),
    "controller_losses_total": Family("counter", "Times the controller went away"),
}


def metrics_text(router: FleetRouter) -> str:
    page = Page(FAMILIES, PREFIX)
    fill(page, router)
    return page.text()


def fleets_text(routers: Mapping[str, FleetRouter]) -> str:
    """Of a gateway's worker: each fleet is labelled with its upstream."""
    page = Page(FAMILIES, PREFIX)
    for upstream, router in routers.items():
        fill(page, router, (("upstream", upstream),))
    return page.text()


def fill(page: Page, router: FleetRouter, labels: Labels = ()) -> None:
    """labels: of every sample, such as the gateway's upstream."""
    for name, book in router.books.items():
        of_model = (*labels, ("model", name))
        held = router.held[name]
        for outcome in ("ok", "failed", "refused", "cancelled"):
            page.add("requests_total", book.outcomes[outcome], (*of_model, ("outcome", outcome)))
        page.add("arrived_total", book.arrived, of_model)
        page.add("prompt_tokens_total", book.prompt_tokens, of_model)
        page.add("output_tokens_total", book.output_tokens, of_model)
        for cause, count in sorted(book.moves.items()):
            page.add("moves_total", count, (*of_model, ("cause", cause)))
        page.add("held_total", book.held, of_model)
        page.add("held_seconds_total", book.held_s, of_model)
        page.add("held", len(held), of_model)
        page.add("oldest_held_seconds", held.oldest_s(), of_model)
        page.add("in_flight", router.book.in_flight(model=name), of_model)
        page.add("cold", held.is_cold, of_model)
        page.add_histogram("ttft_seconds", BUCKETS_S, book.ttft_counts, book.ttft_s, of_model)
    for replica in router.replicas.values():
        of_replica = (*labels, ("model", replica.entry.model), ("replica", replica.id))
        is_up = replica.entry.state in ("ready", "ramping") and not replica.is_lost
        page.add("replica_up", is_up and replica.breaker.is_closed, of_replica)
        page.add("replica_running", len(replica.running), of_replica)
        page.add("replica_requests_total", replica.requests, of_replica)
        page.add("replica_failures_total", replica.failures, of_replica)
        page.add("replica_ejections_total", replica.ejections, of_replica)
    page.add("feed_gaps_total", router.gaps, labels)
    for kind, budget in zip(("move", "retry"), router.budgets, strict=True):
        page.add("budget_refused_total", budget.refused, (*labels, ("kind", kind)))
    page.add("table_generation", max(router.book.generation, 0), labels)
    page.add("controller_connected", router.control.is_connected, labels)
    page.add("controller_losses_total", router.control.losses, labels)
