"""Ports for servers that are started later: free, and outside of what the system gives to other programs."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

import tests.ports
from ridgeline import ports
from ridgeline.ports import free_port, given_by_the_system


def test_a_port_is_free_and_the_system_gives_it_to_no_other_program() -> None:
    first, last = given_by_the_system()
    found = [free_port() for _ in range(50)]
    assert len(set(found)) == 50
    if first > ports.LOWEST or last < ports.HIGHEST:
        assert not [port for port in found if first <= port <= last]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", found[0]))
        listener.listen()


def test_a_port_in_use_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, other = free_port(), free_port()
    monkeypatch.setattr(ports, "_given", set())
    monkeypatch.setattr(ports, "LOWEST", min(taken, other))
    monkeypatch.setattr(ports, "HIGHEST", max(taken, other))
    monkeypatch.setattr(ports, "given_by_the_system", lambda: (min(taken, other) + 1, max(taken, other) - 1))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", taken))
        listener.listen()
        assert free_port() == other


@pytest.mark.parametrize("text", ["1024\t65535\n", "nonsense"])
def test_without_a_port_outside_of_the_range_the_system_chooses(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "range").write_text(text)
    monkeypatch.setattr(ports, "RANGE", tmp_path / "range")
    assert given_by_the_system() == ((1024, 65535) if text[0] == "1" else ports.USUAL_RANGE)
    assert free_port() > 0


def test_another_process_of_tests_has_other_ports() -> None:
    code = "from tests import ports; print(ports._PORTS.start, ports._PORTS.step)"
    other = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[1], capture_output=True, check=True
    )
    start, step = map(int, other.stdout.split())
    assert step == tests.ports._PORTS.step
    assert start != tests.ports._PORTS.start
