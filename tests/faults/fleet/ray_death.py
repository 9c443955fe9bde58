"""SIGKILL of replicas under streams on a Ray cluster, in a process and a network namespace of its own.

unshare --user --map-root-user --net python -m tests.faults.fleet.ray_death MODEL FOLDER
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import traceback
from pathlib import Path

from ridgeline.fleet.substrates.substrate import MARK
from tests.faults.fleet.streams import at_rest, streams
from tests.fleet.controller.live_fleet import LiveFleet
from tests.fleet.substrates.ray_scenes import loopback_up, marks

STREAMS, TOKENS, KILLS = 16, 80, 2
FILE = """
[fleet]
port = 0
state_dir = "{state_dir}"
drain_s = 20.0

[substrate]
kind = "ray"

[substrate.ray]
cpus = 2

[[models]]
name = "chat"
source = "{model}"
replicas = 2

[models.serve]
kv_tokens = 16384
max_context = 512
deterministic = true
threads = 1
"""


def servers() -> dict[str, int]:
    """The server process of each replica in this network namespace, by the replica's id."""
    found: dict[str, int] = {}
    here = Path("/proc/self/ns/net").readlink()
    for folder in sorted(Path("/proc").glob("[0-9]*"), key=lambda one: int(one.name)):
        with contextlib.suppress(OSError):
            if (folder / "ns/net").readlink() != here:
                continue
            is_server = b"serve" in (folder / "cmdline").read_bytes().split(b"\0")
            for one in (folder / "environ").read_bytes().split(b"\0"):
                if is_server and one.startswith(f"{MARK}=".encode()):
                    found.setdefault(one.rpartition(b"/")[2].decode(), int(folder.name))
    return found


def is_lost(fleet: LiveFleet, victim: str) -> bool:
    events = fleet.client.get("/fleet/events")["events"]
    return any(one["kind"] == "lost" and victim in one["text"] for one in events)


def main(model: str, folder: Path) -> None:
    fleet = LiveFleet(folder)
    fleet.file.write_text(FILE.format(state_dir=fleet.state_dir, model=model))
    try:
        fleet.up()
        undisturbed = asyncio.run(streams(fleet.url, STREAMS, TOKENS))
        assert all(one.done and not one.errors for one in undisturbed)
        for turn in range(KILLS):
            fleet.until(lambda: fleet.serving() == 2, "two replicas serve")
            victim = sorted(fleet.serving_ids())[turn % 2]
            pid = servers()[victim]
            got = asyncio.run(
                streams(fleet.url, STREAMS, TOKENS, lambda pid=pid: os.kill(pid, signal.SIGKILL))
            )
            assert [one.errors for one in got if one.errors] == []
            assert sum(one.done for one in got) == STREAMS
            assert [one.told() for one in got] == [one.told() for one in undisturbed]
            assert all(len(one.ids) == 1 for one in got)
            fleet.until(lambda: at_rest(fleet), "no request and no KV block is left")
            fleet.until(lambda victim=victim: is_lost(fleet, victim), f"{victim} is lost")
            print("killed", victim, flush=True)
        assert fleet.run("down").returncode == 0
        assert not marks(), marks()
    finally:
        fleet.close()


if __name__ == "__main__":
    loopback_up()
    try:
        main(sys.argv[1], Path(sys.argv[2]))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    print("done")
