"""Threads and quotas on machines described by files: hyper-threads, mixed cores, both versions of cgroups."""

from __future__ import annotations

from pathlib import Path

import pytest

from ridgeline import machine


def describe(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def siblings(cores: list[list[int]]) -> dict[str, str]:
    """The files of cores with these CPUs."""
    return {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": ",".join(map(str, core)) + "\n"
        for core in cores
        for cpu in core
    }


@pytest.fixture
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "allowed_cpus", lambda: list(range(8)))


@pytest.mark.usefixtures("eight_cpus")
def test_a_thread_computes_on_each_physical_core(tmp_path: Path) -> None:
    root = describe(tmp_path, siblings([[0, 4], [1, 5], [2, 6], [3, 7]]))
    assert machine.fast_cores(root, list(range(8))) == [0, 1, 2, 3]
    assert machine.compute_threads(root) == 4
    assert machine.usable_cpus(root) == 8


@pytest.mark.usefixtures("eight_cpus")
def test_efficiency_cores_do_not_compute_beside_fast_ones(tmp_path: Path) -> None:
    """As Alder Lake shows itself: two threads for each performance core, one for each efficiency core."""
    files = siblings([[0, 1], [2, 3], [4], [5], [6], [7]])
    root = describe(
        tmp_path, {**files, "sys/devices/cpu_core/cpus": "0-3\n", "sys/devices/cpu_atom/cpus": "4-7\n"}
    )
    assert machine.compute_threads(root) == 2
    assert machine.fast_cores(root, [3, 4, 5]) == [3]
    assert machine.fast_cores(root, [4, 5, 6]) == [4, 5, 6]  # bound to these: they are all there is


@pytest.mark.usefixtures("eight_cpus")
def test_little_cores_of_an_arm_chip_do_not_compute_beside_big_ones(tmp_path: Path) -> None:
    """Four little cores, three big ones and one a little faster, as phones and small boards have them."""
    capacities = [290] * 4 + [870] * 3 + [1024]
    files = {
        f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity": f"{capacity}\n"
        for cpu, capacity in enumerate(capacities)
    }
    root = describe(tmp_path, files)
    assert machine.compute_threads(root) == 4
    assert machine.fast_cores(root, list(range(8))) == [4, 5, 6, 7]
    assert machine.fast_cores(root, [0, 1]) == [0, 1]


@pytest.mark.usefixtures("eight_cpus")
def test_a_machine_that_says_nothing_of_its_cores_computes_on_all_cpus(tmp_path: Path) -> None:
    assert machine.compute_threads(tmp_path) == 8


@pytest.mark.usefixtures("eight_cpus")
@pytest.mark.parametrize(
    ("files", "quota", "threads"),
    [
        ({"sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5, 1),
        ({"sys/fs/cgroup/cpu.max": "390000 100000\n"}, 3.9, 3),
        ({"sys/fs/cgroup/cpu.max": "max 100000\n"}, None, 8),
        ({"sys/fs/cgroup/cpu.max": "20000 100000\n"}, 0.2, 1),
        # A group below another one: the least of both counts.
        (
            {
                "proc/self/cgroup": "0::/user.slice/job\n",
                "sys/fs/cgroup/user.slice/cpu.max": "300000 100000\n",
                "sys/fs/cgroup/user.slice/job/cpu.max": "max 100000\n",
            },
            3.0,
            3,
        ),
        # Version 1; the path is one of the host, which a container does not see: the mount itself counts.
        (
            {
                "proc/self/cgroup": "11:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "200000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            2.0,
            2,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu:/job\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
            },
            None,
            8,
        ),
    ],
)
def test_threads_are_cut_by_the_control_groups_quota(
    tmp_path: Path, files: dict[str, str], quota: float | None, threads: int
) -> None:
    root = describe(tmp_path, files)
    assert machine.cpu_quota(root) == quota
    assert machine.compute_threads(root) == machine.usable_cpus(root) == threads


@pytest.mark.parametrize(
    ("text", "cpus"), [("0-3,8\n", [0, 1, 2, 3, 8]), ("5", [5]), ("", []), ("a-b", []), ("1,x", [])]
)
def test_lists_of_cpus_are_read(text: str, cpus: list[int]) -> None:
    assert machine.cpu_list(text) == cpus


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"sys/fs/cgroup/memory.max": "max\n"}, None),
        ({"sys/fs/cgroup/memory.max": f"{64 << 20}\n"}, 64 << 20),
        (
            {
                "proc/self/cgroup": "0::/user.slice/job\n",
                "sys/fs/cgroup/user.slice/memory.max": f"{32 << 20}\n",
                "sys/fs/cgroup/user.slice/job/memory.max": f"{64 << 20}\n",
            },
            32 << 20,
        ),
        (  # version 1
            {
                "proc/self/cgroup": "4:memory:/job\n1:cpu:/\n0::/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{48 << 20}\n",
            },
            48 << 20,
        ),
    ],
)
def test_memory_is_cut_by_the_control_groups_limit(
    tmp_path: Path, files: dict[str, str], limit: int | None
) -> None:
    installed = machine.memory_bytes(tmp_path)
    assert installed > 64 << 20
    assert machine.memory_bytes(describe(tmp_path, files)) == (limit or installed)
