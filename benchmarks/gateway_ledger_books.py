"""The rows of a ledger beside the books of the upstream that computed: for benchmarks/gateway_ledger.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from ridgeline.gateway.accounting.store.reports import usd

# Picodollars per token.
PRICE_IN, PRICE_CACHED, PRICE_OUT = 1_000_000, 100_000, 2_000_000


def compare(
    books: dict[str, dict[str, Any]],
    rows: dict[str, dict[str, Any]],
    seen: Mapping[str, str],
    ends: Counter[str],
) -> dict[str, Any]:
    counts = ("tokens_in", "tokens_cached", "tokens_out", "tokens_reasoning")
    different = []
    for request_id, book in books.items():
        row = rows.get(request_id)
        if row is None or any(row[name] != book[name] for name in counts):
            different.append({"request_id": request_id, "upstream": book, "ledger": row})
    unasked = [row for request_id, row in rows.items() if request_id not in books]
    charged = [row for row in unasked if any(row[name] for name in counts) or row["cost_pusd"]]
    unbooked = sorted(set(seen) - set(rows) - {""})
    cost = sum(row["cost_pusd"] for row in rows.values())
    expected = sum(map(cost_of, books.values()))
    return {
        "rows": len(rows),
        "upstream_requests": len(books),
        "answers_seen": len(seen),
        "outcomes": dict(Counter(row["outcome"] for row in rows.values())),
        "upstream_ends": dict(Counter(book["status"] for book in books.values())),
        "clients": dict(ends),
        "tokens_ledger": {name: sum(row[name] for row in rows.values()) for name in counts},
        "tokens_upstream": {name: sum(book[name] for book in books.values()) for name in counts},
        "cost_usd": usd(cost),
        "cost_expected_usd": usd(expected),
        "estimated_rows": sum(row["usage_source"] == "estimated" for row in rows.values()),
        "different": different,
        "charged_without_upstream": charged,
        "seen_without_row": unbooked,
        "is_exact": not (different or charged or unbooked) and cost == expected,
    }


def compare_dollars(books: dict[str, Any], rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Of every request: what its attempts cost upstream, beside its rows and those of its attempts."""
    expected: Counter[str] = Counter()
    for request_id, book in books["books"].items():
        expected[request_id] += sum(map(cost_of, (book, *books["earlier"].get(request_id, ()))))
    booked: Counter[str] = Counter()
    marked: set[str] = set()
    for row in rows.values():
        request_id = row["request_id"].partition(".")[0]
        booked[request_id] += row["cost_pusd"]
        if row["usage_source"] == "estimated":
            marked.add(request_id)
    missing = {one: cost - booked[one] for one, cost in expected.items() if cost > booked[one]}
    beyond = {one: cost - expected[one] for one, cost in booked.items() if cost > expected[one]}
    unmarked = {one: cost for one, cost in (missing | beyond).items() if one not in marked}
    total = sum(expected.values())
    return {
        "cost_expected_usd": usd(total),
        "missing_percent": 100 * sum(missing.values()) / total,
        "beyond_percent": 100 * sum(beyond.values()) / total,
        "unmarked_percent": 100 * sum(unmarked.values()) / total,
        "unmarked": [
            {"request_id": one, "pusd": cost, "row": rows.get(one)} for one, cost in unmarked.items()
        ],
        "is_marked": not unmarked,
    }


def cost_of(book: dict[str, Any]) -> int:
    fresh = book["tokens_in"] - book["tokens_cached"]
    cost = fresh * PRICE_IN + book["tokens_cached"] * PRICE_CACHED + book["tokens_out"] * PRICE_OUT
    return int(cost)


def show_dollars(result: dict[str, Any]) -> None:
    print(f"{result['requests']} requests in {result['seconds']:.0f} s; clients: {result['clients']}")
    print(f"rows by outcome: {result['outcomes']}; at the upstream: {result['upstream_ends']}")
    print("| | of the upstream's dollars |\n|---|---:|")
    for name in ("missing", "beyond", "unmarked"):
        print(f"| {name} | {result[name + '_percent']:.3f} % |")
    print(
        f"US dollars upstream: {result['cost_expected_usd']}, ledger: {result['cost_usd']}; rows estimated: "
        f"{result['estimated_rows']}; answers without a row: {len(result['seen_without_row'])}"
    )
    for one in result["unmarked"][:8]:
        print(f"  {one}")
    print("all marked" if result["is_marked"] else "NOT all marked")


def show(result: dict[str, Any]) -> None:
    print(f"{result['requests']} requests in {result['seconds']:.0f} s; clients: {result['clients']}")
    print(f"rows by outcome: {result['outcomes']}; at the upstream: {result['upstream_ends']}")
    print("| | upstream | ledger | difference |\n|---|---:|---:|---:|")
    for name, told in result["tokens_upstream"].items():
        booked = result["tokens_ledger"][name]
        print(f"| {name} | {told:,} | {booked:,} | {booked - told:+,} |")
    print(f"| US dollars | {result['cost_expected_usd']} | {result['cost_usd']} | |")
    print(
        f"requests that differ: {len(result['different'])}; answers without a row: "
        f"{len(result['seen_without_row'])}; rows charged without the upstream: "
        f"{len(result['charged_without_upstream'])}; estimated: {result['estimated_rows']}"
    )
    for one in [*result["different"], *result["charged_without_upstream"]][:8]:
        print(f"  {one}")
    print("exact" if result["is_exact"] else "NOT exact")
