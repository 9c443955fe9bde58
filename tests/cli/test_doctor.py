"""`ridgeline doctor`: other machines shown to it, the traps it must see, and this machine."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

from ridgeline.cli.doctor import doctor, machine, measure
from ridgeline.cli.main import main

GIB = 1 << 30


def fake_root(tmp_path: Path, **files: str) -> Path:
    """A root with the given files; double underscores stand for slashes."""
    for name, text in files.items():
        path = tmp_path / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_a_server_processor_is_read_with_all_its_instruction_sets(tmp_path: Path) -> None:
    flags = "avx2 avx512f avx512_vnni avx512_bf16 amx_tile amx_int8"
    text = f"processor : 0\nmodel name : Some Xeon\nflags : {flags}\n"
    chip = machine.processor(fake_root(tmp_path, proc__cpuinfo=text))
    assert chip.model == "Some Xeon"
    assert chip.sets == ["AVX2", "AVX-512", "VNNI", "BF16", "AMX"]
    assert doctor.check_instruction_sets(chip).status == "ok"


def test_a_processor_without_avx2_is_called_slow(tmp_path: Path) -> None:
    chip = machine.processor(fake_root(tmp_path, proc__cpuinfo="model name : Old\nflags : sse4_2 avx\n"))
    finding = doctor.check_instruction_sets(chip)
    assert (finding.status, finding.fatal) == ("slow", False)


def test_cores_are_cut_by_the_control_groups_quota(tmp_path: Path) -> None:
    found = machine.cores(fake_root(tmp_path, sys__fs__cgroup__cpu_dot_max="100000 100000\n"))
    assert found.quota == 1.0
    assert found.usable == 1
    assert doctor.check_cores(found).status == "slow"
    assert machine.cores(fake_root(tmp_path, sys__fs__cgroup__cpu_dot_max="max 100000\n")).quota is None


def test_a_compiler_is_missed_only_where_the_library_is_not_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.check_compiler().status == "ok"
    monkeypatch.setattr("ridgeline.ops.cpu.interface.LIBRARY_PATH", tmp_path / "libridgeline_native.so")
    finding = doctor.check_compiler()
    assert (finding.status, finding.fatal) == ("missing", False)
    assert "install g++" in finding.advice


def test_memory_is_cut_by_the_control_groups_limit(tmp_path: Path) -> None:
    root = fake_root(
        tmp_path,
        proc__meminfo="MemTotal: 33554432 kB\nMemAvailable: 16777216 kB\n",
        sys__fs__cgroup__memory_dot_max=str(3 * GIB),
        sys__fs__cgroup__memory_dot_current=str(2 * GIB),
    )
    found = machine.memory(root)
    assert (found.total_bytes, found.usable_bytes) == (32 * GIB, 1 * GIB)
    finding = doctor.check_memory(found)
    assert (finding.status, finding.fatal) == ("missing", True)
    (root / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert machine.memory(root).usable_bytes == 16 * GIB


def test_a_full_disk_is_fatal_only_while_the_model_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    usage = doctor.shutil.disk_usage("/")
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage._replace(free=1_000_000))
    assert doctor.check_disk(tmp_path / "not" / "yet" / "made").fatal
    place = tmp_path / "models" / "smollm2-135m"
    place.mkdir(parents=True)
    (place / "SmolLM2-135M-Instruct.Q4_1.gguf").touch()
    assert not doctor.check_disk(tmp_path).fatal


def test_a_cache_that_cannot_be_written_is_fatal_only_while_the_model_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    (tmp_path / "file").touch()
    blocked = tmp_path / "file" / "cache"  # nothing can be created below a file, not even by root
    finding = doctor.check_cache(blocked)
    assert (finding.status, finding.fatal) == ("missing", True)
    assert f"{tmp_path / 'file'} is not writable (Not a directory)" in finding.value
    assert "RIDGELINE_CACHE" in finding.advice
    place = tmp_path / "models" / "smollm2-135m"
    place.mkdir(parents=True)
    (place / "SmolLM2-135M-Instruct.Q4_1.gguf").touch()
    assert not doctor.check_cache(blocked).fatal
    assert doctor.check_cache(tmp_path / "not" / "yet" / "made").status == "ok"
    assert not (tmp_path / "not").exists()


def test_a_state_directory_that_cannot_be_written_names_the_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert main(["doctor", "--quick", "--json"]) == 1
    findings = {each["subject"]: each for each in json.loads(capsys.readouterr().out)["findings"]}
    assert (findings["state"]["status"], findings["state"]["fatal"]) == ("missing", True)
    assert "--state-dir" in findings["state"]["advice"]


def test_amx_that_dies_when_used_is_a_finding_with_the_way_out() -> None:
    finding = doctor.check_amx(measure.Measured(failure="died with SIGILL"))
    assert finding.status == "missing"
    assert "SIGILL" in finding.value
    assert "ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16" in finding.advice


def test_amx_that_works_says_how_to_use_it() -> None:
    finding = doctor.check_amx(measure.Measured({"bfloat16_flops_per_s": 2e12}))
    assert (finding.status, finding.value) == ("ok", "works, 2000 GFLOP/s in bfloat16")


def test_bfloat16_slower_than_float32_is_called_slow() -> None:
    assert doctor.check_bfloat16(measure.Measured({"bfloat16_flops_per_s": 1e9}), 5e9).status == "slow"
    assert doctor.check_bfloat16(measure.Measured({"bfloat16_flops_per_s": 9e9}), 5e9).status == "ok"
    dead = doctor.check_bfloat16(measure.Measured(failure="died with SIGILL"), 5e9)
    assert (dead.status, dead.fatal) == ("missing", False)


@pytest.mark.parametrize("needed", [True, False])
def test_a_missing_torch_is_fatal_only_where_nothing_else_computes(needed: bool) -> None:
    absent = measure.Measured(failure="ModuleNotFoundError: No module named 'torch'")
    (finding,) = doctor.check_torch(absent, needed=needed)
    assert (finding.status, finding.fatal) == ("missing", needed)
    assert "pip install 'ridgeline[torch]'" in finding.advice


def test_a_missing_native_library_says_what_it_costs_and_how_to_get_it() -> None:
    finding = doctor.check_native(measure.Measured(failure="NativeUnavailable: it is missing"))
    assert (finding.status, finding.fatal) == ("missing", False)
    assert "install g++" in finding.advice


def test_a_machine_that_only_runs_the_portable_kernels_is_called_slow() -> None:
    found = {"native_isas": ["portable"], "native_isa": "portable", "threads": 2}
    assert doctor.check_native(measure.Measured(found)).status == "slow"


@pytest.mark.parametrize(
    ("isa", "lacks", "cost"),
    [
        ("avx2", "AVX-VNNI, AVX-512 VNNI, AVX-512 BF16, AMX", "0.45 (AVX-512)"),
        ("avxvnni", "AVX-512 VNNI, AVX-512 BF16, AMX", "without AVX-512"),
        ("avx512", "AMX", "without AMX"),
        ("neon", "dot product, I8MM", ""),
    ],
)
def test_the_best_set_names_what_the_processor_lacks_and_what_that_costs(
    isa: str, lacks: str, cost: str
) -> None:
    finding = doctor.check_native(
        measure.Measured({"native_isas": [isa, "portable"], "native_isa": isa, "threads": 2})
    )
    assert finding.status == "ok"
    assert finding.value == f"{isa}, 2 threads (also runs: portable); this processor lacks {lacks}"
    assert cost in finding.advice


def test_a_set_that_was_forced_names_the_better_one() -> None:
    found = {"native_isas": ["avx512", "avx2", "portable"], "native_isa": "avx2", "threads": 2}
    finding = doctor.check_native(measure.Measured(found))
    assert finding.status == "slow"
    assert finding.value == "avx2, 2 threads, by RIDGELINE_ISA; avx512 runs here too"
    assert finding.advice.startswith("unset RIDGELINE_ISA to use avx512")


def test_a_forced_set_that_does_not_run_here_says_so_plainly() -> None:
    failure = "ridgeline.ops.cpu.interface.NativeError: RIDGELINE_ISA=amx does not run on this machine"
    finding = doctor.check_native(measure.Measured(failure=failure))
    assert finding.value == "RIDGELINE_ISA=amx does not run on this machine"
    assert finding.advice.startswith("unset RIDGELINE_ISA")


def test_a_child_that_dies_by_a_signal_is_a_finding_and_keeps_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "python"
    script.write_text('#!/bin/sh\necho \'{"torch": "2.0"}\'\nkill -ILL $$\n')
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    measured = measure.in_child("torch")
    assert measured.values == {"torch": "2.0"}
    assert measured.failure == f"died with {signal.SIGILL.name}"


GPU = {
    "gpu": {
        "name": "NVIDIA H200",
        "total_bytes": 140 * GIB,
        "capability": [9, 0],
        "driver_cuda": [13, 0],
    },
    "torch": "2.11.0+cu130",
    "triton": "3.6.0",
    "free_bytes": 138 * GIB,
    "refusal": None,
}


def test_a_gpu_is_shown_with_its_memory_and_versions() -> None:
    (finding,) = doctor.check_gpu(measure.Measured(GPU))
    assert finding.status == "ok"
    for part in ("NVIDIA H200, 140.0 GiB, 138.0 free", "capability 9.0", "CUDA 13.0", "torch 2.11.0+cu130"):
        assert part in finding.value


def test_a_gpu_that_cannot_be_used_says_why_and_stops_nobody() -> None:
    for measured in (
        measure.Measured(GPU | {"refusal": "triton is not installed: pip install triton"}),
        measure.Measured(GPU, "ImportError: triton is not installed: pip install triton"),
    ):
        (finding,) = doctor.check_gpu(measured)
        assert (finding.status, finding.fatal) == ("missing", False)
        assert "pip install triton" in finding.advice


def test_without_a_gpu_nothing_is_missing() -> None:
    (finding,) = doctor.check_gpu(measure.Measured({"gpu": None}))
    assert (finding.status, finding.value) == ("ok", "none is visible; models run on the CPU")


def test_the_gpus_rates_are_in_its_own_units() -> None:
    rates = {"gpu_read_bytes_per_s": 4.27e12, "gpu_flops_per_s": 791e12}
    finding = doctor.check_gpu_rates(measure.Measured(rates))
    assert finding.value == "reads 4.27 TB/s, 791 TFLOP/s in bfloat16"
    assert doctor.check_gpu_rates(measure.Measured(failure="CUDA error")).status == "missing"


def test_the_gpus_driver_is_read_from_the_kernels_file(tmp_path: Path) -> None:
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release\nGCC version: 12.2\n"
    assert machine.gpu_driver(fake_root(tmp_path, proc__driver__nvidia__version=text)) == "580.65.06"
    assert machine.gpu_driver(tmp_path / "absent") == ""


def test_the_decode_limit_is_bandwidth_over_the_models_bytes(smollm2_path: Path) -> None:
    value = doctor.decode_limit(98_362_432 * 50.0).value
    assert "50 tok/s as stored (98 MB per token)" in value
    assert "9 tok/s in float32 (538 MB per token)" in value


def test_an_unreachable_hub_is_missing_but_not_fatal() -> None:
    finding = doctor.check_hub("http://127.0.0.1:9")
    assert (finding.status, finding.fatal) == ("missing", False)


def test_an_old_python_is_fatal() -> None:
    assert doctor.check_python((3, 10, 4)).fatal
    assert doctor.check_python((3, 12, 0)).status == "ok"


def test_this_machine_is_usable(smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["usable"] is True
    found = {finding["subject"]: finding for finding in report["findings"]}
    expected = {"python", "cores", "memory", "disk", "native", "torch", "gpu", "memory read", "float32"}
    assert expected | {"decode limit"} <= set(found)
    assert found["native"]["status"] in ("ok", "slow")
    assert float(found["memory read"]["value"].split()[0]) > 0.1
