"""What does it cost to choose a replica, and how many prefix events does one core absorb?

100,000 prompt blocks in the prefix map, of conversations that share a few system prompts; every replica is
fed Load lines. Beside `choose` alone stands what belongs to it: charge, note the guess, discharge. The
claims: a choice among 1,000 replicas in at most 200 µs at the 99th percentile, and at least 50,000 prefix
events/s. CPU time of the thread is taken, so that others on the machine matter little; the 99th percentile
of the time on the wall stands beside it. Fixed work of the same kind comes first: where its own 99th
percentile is far above its median, the machine is shared, and the figures with it. --windows splits the
choices, measures the fixed work before each part, and shows the part in which its 99th percentile was lowest.

    python benchmarks/fleet_routing.py [--choices 20000] [--windows 1] [--events 100000] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import time
from pathlib import Path
from random import Random

import numpy as np

from ridgeline.fleet.messages import ModelEntry, ReplicaEntry, Table
from ridgeline.fleet.routing.book import LoadBook
from ridgeline.fleet.routing.choose import choose
from ridgeline.fleet.routing.policy import POLICIES, Policy
from ridgeline.fleet.routing.prefixes import PrefixMap
from ridgeline.fleet.routing.prompt import PromptView
from ridgeline.replica.messages import Load, Removed, Started, Stored, decode_line, encode_line

BLOCKS = 100_000
CLAIM_US = 200.0
CLAIM_EVENTS = 50_000
SYSTEM_BLOCKS = 24  # 6 kB
TAIL_BLOCKS = 72  # of a conversation, 18 kB: about 4,600 tokens
IN_FLIGHT = 8  # at each replica


def load_line(rng: Random, accepted: int = 0) -> Load:
    running = rng.randrange(4, 12)
    return Load(
        0,
        "ready",
        running,
        0,
        rng.randrange(4000),
        40 * running,
        9000,
        100,
        accepted,
        max(accepted - running, 0),
        10**6,
        10**4,
        10**6,
        10**5,
    )


def filled(replicas: int, rng: Random) -> tuple[LoadBook, PrefixMap, list[list[int]]]:
    """A book, a map with BLOCKS blocks, and the conversations in it."""
    book, prefixes = LoadBook(time.monotonic), PrefixMap()
    names = [f"m-{number}" for number in range(replicas)]
    book.set_table(
        Table(
            1,
            (ModelEntry("m"),),
            tuple(ReplicaEntry(name, "m", "http://x", "ready", "e", "v") for name in names),
        )
    )
    systems = [[rng.getrandbits(64) for _ in range(SYSTEM_BLOCKS)] for _ in range(16)]
    sequence = dict.fromkeys(names, 0)
    for name in names:
        started = Started("e", 1, "m", ("m",), "v", 256, 50_000, 16, {})
        book.hear(name, started)
        prefixes.hear(name, started)
        book.hear(name, load_line(rng))
        for system in systems:
            sequence[name] += 1
            prefixes.stored(name, sequence[name], system)
    conversations = []
    while len(prefixes) < BLOCKS:
        conversation = [*rng.choice(systems), *(rng.getrandbits(64) for _ in range(TAIL_BLOCKS))]
        for name in rng.sample(names, min(rng.choice((1, 1, 2, 4)), replicas)):
            held = conversation[: rng.randrange(SYSTEM_BLOCKS + 1, len(conversation) + 1)]
            sequence[name] += 1
            prefixes.stored(name, sequence[name], held)
        conversations.append(conversation)
    return book, prefixes, conversations


def choices_us(replicas: int, policy: Policy, count: int, windows: int, rng: Random) -> dict[str, float]:
    book, prefixes, conversations = filled(replicas, rng)
    names = list(book.rows)
    taken, walls, whole, tickets, controls = [], [], [], [], []
    each = count // windows
    gc.freeze()
    for number in range(each * windows):
        if windows > 1 and number % each == 0:
            controls.append(noise(Random(1), 1000)["p99_us"])
        conversation = rng.choice(conversations)
        prompt = PromptView("m", conversation, 64 * len(conversation), session=str(number % 5000))
        wall, begun = time.perf_counter_ns(), time.thread_time_ns()
        choice = choose(book, prefixes, prompt, policy, rng, time.monotonic())
        chosen, chosen_wall = time.thread_time_ns(), time.perf_counter_ns()
        if choice is None:
            raise SystemExit("every replica is saturated: the benchmark is set up wrongly")
        tickets.append(book.charge(choice.replica_id, prompt, choice.matched_blocks))
        prefixes.routed(choice.replica_id, conversation, time.monotonic())
        if len(tickets) > IN_FLIGHT * replicas:
            book.discharge(tickets.pop(rng.randrange(len(tickets))))
        ended = time.thread_time_ns()
        taken.append(chosen - begun)
        walls.append(chosen_wall - wall)
        whole.append(ended - begun)
        for _ in range(4):
            book.hear(rng.choice(names), load_line(rng, number))
    quietest = controls.index(min(controls)) if controls else 0
    part = slice(quietest * each, (quietest + 1) * each)
    taken, walls, whole = taken[part], walls[part], whole[part]
    p50, p99 = np.percentile(taken, (50, 99)) / 1000
    return {
        "control_p99_us": min(controls, default=0.0),
        "p50_us": p50,
        "p99_us": p99,
        "wall_p99_us": np.percentile(walls, 99) / 1000,
        "with_charge_p50_us": np.percentile(whole, 50) / 1000,
        "with_charge_p99_us": np.percentile(whole, 99) / 1000,
    }


def noise(rng: Random, count: int = 4000) -> dict[str, float]:
    """Work of the same kind that is always the same: its spread is the machine's, not ours."""
    table = {rng.getrandbits(64): 1 for _ in range(BLOCKS)}
    blocks, values, taken = list(table), np.ones((12, 1000)), []
    for _ in range(count):
        asked = rng.choices(blocks, k=30)
        begun = time.thread_time_ns()
        for block in asked:
            table.get(block)
        for _ in range(3):
            row = values[1] * 2.0
            row += values[2]
            (row < np.minimum.reduce(row)).nonzero()
        taken.append(time.thread_time_ns() - begun)
    return {"p50_us": np.percentile(taken, 50) / 1000, "p99_us": np.percentile(taken, 99) / 1000}


def events_per_s(replicas: int, count: int, blocks: int, rng: Random) -> dict[str, float]:
    """Stored and removed in turn, decoded from JSON before and as part of the time."""
    _, prefixes, _ = filled(replicas, rng)
    names = [f"m-{number}" for number in range(replicas)]
    sequence = {name: prefixes.position(name)[1] for name in names}
    held: dict[str, list[tuple[int, ...]]] = {name: [] for name in names}
    lines = []
    for _ in range(count):
        name = rng.choice(names)
        sequence[name] += 1
        if len(held[name]) > 4 and rng.random() < 0.5:
            line: Stored | Removed = Removed(sequence[name], held[name].pop(0))
        else:
            held[name].append(tuple(rng.getrandbits(64) for _ in range(blocks)))
            line = Stored(sequence[name], held[name][-1])
        lines.append((name, line))
    encoded = [(name, encode_line(line)) for name, line in lines]
    gc.freeze()
    begun = time.process_time()
    missed = sum(prefixes.hear(name, line) for name, line in lines)
    absorbed = time.process_time() - begun
    begun = time.process_time()
    for _, raw in encoded:
        decode_line(raw)
    decoded = time.process_time() - begun
    if missed:
        raise SystemExit(f"{missed} events were out of order")
    return {"events_per_s": count / absorbed, "with_decode_per_s": count / (absorbed + decoded)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--choices", type=int, default=20_000)
    parser.add_argument("--windows", type=int, default=1)
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--json", type=Path, default=Path("bench-results/fleet_routing.json"))
    args = parser.parse_args()
    choices, events, control = {}, {}, noise(Random(1))
    print(
        f"fixed work of the same kind: p50 {control['p50_us']:.1f} µs, p99 {control['p99_us']:.1f} µs, "
        f"{control['p99_us'] / control['p50_us']:.1f} times; 1-minute load {os.getloadavg()[0]:.1f} "
        f"on {os.cpu_count()} cores"
    )
    print(f"choose, {BLOCKS:,} blocks, prompts of {SYSTEM_BLOCKS + TAIL_BLOCKS} blocks; µs of CPU time")
    print(
        " replicas policy             p50      p99     bar   wall p99   with charge: p50      p99"
        "   fixed work p99"
    )
    for replicas in (10, 100, 1000):
        for name in POLICIES if replicas == 1000 else ("default",):
            one = choices[f"{name}/{replicas}"] = choices_us(
                replicas, Policy(name), args.choices, args.windows, Random(17)
            )
            print(
                f"{replicas:9,} {name:13} {one['p50_us']:8.1f} {one['p99_us']:8.1f} {CLAIM_US:7.0f} "
                f"{one['wall_p99_us']:10.1f} {one['with_charge_p50_us']:18.1f} "
                f"{one['with_charge_p99_us']:8.1f} {one['control_p99_us'] or control['p99_us']:16.1f}"
            )
    print("\nprefix events, one core\n replicas  blocks   events/s  with JSON      bar")
    for replicas, blocks in ((100, 8), (1000, 1), (1000, 8), (1000, 16)):
        rate = events[f"{replicas}/{blocks}"] = events_per_s(replicas, args.events, blocks, Random(17))
        print(
            f"{replicas:9,} {blocks:7} {rate['events_per_s']:10,.0f} {rate['with_decode_per_s']:10,.0f} "
            f"{CLAIM_EVENTS:8,}"
        )
    report = {
        "python": platform.python_version(),
        "blocks": BLOCKS,
        "control": control,
        "choose": choices,
        "events": events,
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
