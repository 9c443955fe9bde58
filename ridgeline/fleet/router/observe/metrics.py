"""A router's metrics, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ridgeline.fleet.router.demand import BUCKETS_S
from ridgeline.telemetry.exposition import Family, Labels, Page

if TYPE_CHECKING:
    from ridgeline.fleet.queueing.durable import DurableQueue
    from ridgeline.fleet.router.fleet_router import FleetRouter

PREFIX = "ridgeline_fleet_"

FAMILIES: dict[str, Family] = {
    "requests_total": Family("counter", "Requests that ended, by outcome: ok, failed, refused, cancelled"),
    "arrived_total": Family("counter", "Requests that arrived"),
    "prompt_tokens_total": Family("counter", "Prompt tokens, estimated from bytes"),
    "output_tokens_total": Family("counter", "Output tokens of streams"),
    "moves_total": Family("counter", "Requests that were moved to another replica, by cause"),
    "quarantined_total": Family(
        "counter", "Requests that were refused because replicas may have died of them"
    ),
    "held_total": Family("counter", "Requests that waited because no replica had room"),
    "held_seconds_total": Family("counter", "Time that requests waited for a replica"),
    "held": Family("gauge", "Requests that wait for a replica"),
    "oldest_held_seconds": Family("gauge", "Age of the oldest request that waits", "max"),
    "in_flight": Family("gauge", "Requests in flight at replicas"),
    "cold": Family("gauge", "1 while the model has no replica that may take requests", "max"),
    "ttft_seconds": Family("histogram", "Arrival at the router to the first token"),
    "replica_up": Family("gauge", "1 while the replica may take requests", "max"),
    "replica_running": Family("gauge", "Requests of this router in flight at the replica"),
    "replica_requests_total": Family("counter", "Requests sent to the replica"),
    "replica_failures_total": Family("counter", "Requests that the replica failed"),
    "replica_ejections_total": Family("counter", "Times the replica was ejected without progress"),
    "region_up": Family("gauge", "1: a replica of the region may take requests", "max"),
    "region_moves_total": Family("counter", "Failed requests that went on in another region"),
    "region_moves_paid_total": Family("counter", "Of these: paid from the retry budget; the region was up"),
    "feed_gaps_total": Family("counter", "Gaps in prefix events, each followed by a snapshot"),
    "budget_refused_total": Family("counter", "Moves and retries that the budget refused, by kind"),
    "journal_waiting": Family("gauge", "Requests of the durable queue without an answer"),
    "journal_oldest_seconds": Family("gauge", "Age of the oldest of them, also over restarts", "max"),
    "journal_answers": Family("gauge", "Answers of the durable queue that are kept for their clients"),
    "journal_bytes": Family("gauge", "Size of the journal's file"),
    "journal_appended_total": Family("counter", "Requests written to the journal"),
    "journal_replayed_total": Family("counter", "Requests of the journal that were sent after a restart"),
    "routers": Family("gauge", "Router processes in this page"),
    "table_generation": Family("gauge", "Generation of the controller's table", "max"),
    "controller_connected": Family("gauge", "1 while the router follows its controller", "min"),
    "controller_losses_total": Family("counter", "Lost connections to the controller"),
}


def metrics_text(router: FleetRouter, journal: DurableQueue | None = None, process: str = "") -> str:
    """process: name of this router process, the label `router` of its counters; a restarted one keeps it."""
    page = Page(FAMILIES, PREFIX, (("router", process),) if process else ())
    fill(page, router)
    if journal is not None:
        page.add("journal_waiting", len(journal.waiting()))
        page.add("journal_oldest_seconds", journal.oldest_s())
        page.add("journal_answers", journal.answers)
        page.add("journal_bytes", journal.size)
        page.add("journal_appended_total", journal.appended)
        page.add("journal_replayed_total", journal.recovered)
    return page.text()


def fleets_text(routers: Mapping[str, FleetRouter]) -> str:
    """Metrics of a gateway's worker: each fleet is labelled with its upstream."""
    page = Page(FAMILIES, PREFIX)
    for upstream, router in routers.items():
        fill(page, router, (("upstream", upstream),))
    return page.text()


def fill(page: Page, router: FleetRouter, labels: Labels = ()) -> None:
    """labels: added to every sample, such as the gateway's upstream."""
    for name, book in router.books.items():
        of_model = (*labels, ("model", name))
        for outcome in ("ok", "failed", "refused", "cancelled"):
            page.add("requests_total", book.outcomes[outcome], (*of_model, ("outcome", outcome)))
        page.add("arrived_total", book.arrived, of_model)
        page.add("prompt_tokens_total", book.prompt_tokens, of_model)
        page.add("output_tokens_total", book.output_tokens, of_model)
        for cause, count in sorted(book.moves.items()):
            page.add("moves_total", count, (*of_model, ("cause", cause)))
        page.add("quarantined_total", book.quarantined, of_model)
        page.add("held_total", book.held, of_model)
        page.add("held_seconds_total", book.held_s, of_model)
        page.add("held", router.held.count(name), of_model)
        page.add("oldest_held_seconds", router.held.oldest_s(name), of_model)
        page.add("in_flight", router.book.in_flight(model=name), of_model)
        page.add("cold", router.is_cold(name), of_model)
        page.add_histogram("ttft_seconds", BUCKETS_S, book.ttft_counts, book.ttft_s, of_model)
    for replica in router.replicas.values():
        of_replica = (*labels, ("model", replica.entry.model), ("replica", replica.id))
        is_up = replica.entry.state in ("ready", "ramping") and not replica.is_lost
        page.add("replica_up", is_up and replica.breaker.is_closed, of_replica)
        page.add("replica_running", len(replica.running), of_replica)
        page.add("replica_requests_total", replica.requests, of_replica)
        page.add("replica_failures_total", replica.failures, of_replica)
        page.add("replica_ejections_total", replica.ejections, of_replica)
    if states := router.regions.states(router.inhibited()):
        for region, is_up in sorted(states.items()):
            page.add("region_up", is_up, (*labels, ("region", region)))
        page.add("region_moves_total", router.regions.failover.moves, labels)
        page.add("region_moves_paid_total", router.regions.failover.paid, labels)
    page.add("feed_gaps_total", router.gaps, labels)
    for kind, refused in router.refused_by_budget.items():
        page.add("budget_refused_total", refused, (*labels, ("kind", kind)))
    page.add("routers", 1, labels)
    page.add("table_generation", max(router.book.generation, 0), labels)
    page.add("controller_connected", router.control.is_connected, labels)
    page.add("controller_losses_total", router.control.losses, labels)
