"""The calibration file: written atomically, read back unchanged, ignored with a warning if unusable."""

from __future__ import annotations

import json
import logging
import os
import stat
from pathlib import Path

import pytest

from ridgeline.engine.limits import calibration
from ridgeline.engine.limits.calibration import (
    Calibration,
    Ceilings,
    Machine,
    ReadRate,
    calibration_file,
    load_calibration,
    processor_name,
    shape_class,
    store_calibration,
    this_machine,
)
from ridgeline.engine.limits.step_costs import StepChoice, StepCost, StepCosts
from ridgeline.ops.cpu.library import NativeUnavailable

MIB = 1 << 20
MACHINE = Machine("Some Xeon", 2, "avx512", 1)
CEILINGS = Ceilings((ReadRate(8 * MIB, 60e9), ReadRate(128 * MIB, 20e9)), {"float32": 2e11, "int8": 1e12})
COST = StepCost(0, 16, 0.01, 0.002)
COSTS = StepCosts((COST,), (StepCost(8, 0, 0.01, 0.005),), (StepCost(8, 16, 0.02, 0.005),))
STORED = Calibration(
    MACHINE,
    CEILINGS,
    {"128M to 256M parameters, 4-bit": StepChoice(320, 256, "because")},
    {"128M to 256M parameters, 4-bit": COSTS},
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))


def test_what_was_stored_is_read_back() -> None:
    assert load_calibration(MACHINE) is None
    path = store_calibration(STORED)
    assert load_calibration(MACHINE) == STORED
    assert path == calibration_file(MACHINE)
    assert json.loads(path.read_text())["machine"]["processor"] == "Some Xeon"


@pytest.mark.parametrize(
    "other",
    [
        Machine("Some EPYC", 2, "avx512", 1),
        Machine("Some Xeon", 4, "avx512", 1),
        Machine("Some Xeon", 2, "avx2", 1),
        Machine("Some Xeon", 2, "avx512", 2),
    ],
)
def test_each_processor_thread_count_instruction_set_and_library_has_its_own(other: Machine) -> None:
    store_calibration(STORED)
    assert load_calibration(other) is None
    store_calibration(Calibration(other, CEILINGS))
    assert load_calibration(MACHINE) == STORED


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("{", ""),  # not JSON
        ('"version": 1', '"version": 2'),
        ("Some Xeon", "Some EPYC"),  # copied from another machine
        ("60000000000.0", "-1.0"),
        ("60000000000.0", "1e999"),
        ("60000000000.0", '"fast"'),
        ("8388608", "0"),
        ('"prefill_chunk": 256', '"prefill_chunk": 0'),
        ('"prefill_chunk": 256', '"prefill_chunk": 321'),
        ('"step_tokens": 320', '"step_tokens": 320.5'),
        ('"seconds": 0.01', '"seconds": 0'),
        ('"ceilings"', '"cielings"'),
    ],
)
def test_a_damaged_or_stale_file_is_ignored_with_a_warning(
    old: str, new: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = store_calibration(STORED)
    content = path.read_text()
    assert old in content
    path.write_text(content.replace(old, new, 1))
    with caplog.at_level(logging.WARNING):
        assert load_calibration(MACHINE) is None
    assert str(path) in caplog.text
    assert "ridgeline doctor --calibrate" in caplog.text


@pytest.mark.parametrize("kept", [0, 1, 100])
def test_a_truncated_file_is_ignored(kept: int) -> None:
    path = store_calibration(STORED)
    path.write_bytes(path.read_bytes()[:kept])
    assert load_calibration(MACHINE) is None


def test_a_file_that_cannot_be_read_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    calibration_file(MACHINE).mkdir(parents=True)  # a directory in its place; root may read any file
    assert load_calibration(MACHINE) is None
    assert "ignoring" in caplog.text


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    path = store_calibration(STORED)

    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        store_calibration(Calibration(MACHINE, CEILINGS))
    assert load_calibration(MACHINE) == STORED
    assert list(path.parent.iterdir()) == [path]


def test_others_may_read_the_file_as_the_umask_says() -> None:
    """A service and the user that calibrated it may differ."""
    before = os.umask(0o022)
    try:
        assert stat.S_IMODE(store_calibration(STORED).stat().st_mode) == 0o644
    finally:
        os.umask(before)


def test_the_read_rate_is_the_caches_for_small_models_and_the_memorys_for_large_ones() -> None:
    assert CEILINGS.read_bytes_per_s(1 * MIB) == 60e9
    assert CEILINGS.read_bytes_per_s(8 * MIB) == 60e9
    assert CEILINGS.read_bytes_per_s(32 * MIB) == pytest.approx(40e9)  # half way, by ratio
    assert CEILINGS.read_bytes_per_s(128 * MIB) == pytest.approx(20e9)
    assert CEILINGS.read_bytes_per_s(10_000 * MIB) == 20e9


def test_models_within_a_factor_of_two_and_of_equal_bits_share_a_class() -> None:
    smollm2 = shape_class(134_515_008, 98_362_432)
    assert smollm2 == "128M to 256M parameters, 4-bit"
    assert shape_class(200_000_000, 112_000_000) == smollm2
    assert shape_class(134_515_008, 4 * 134_515_008) == "128M to 256M parameters, 32-bit"
    assert shape_class(134_515_008, 2 * 134_515_008) == "128M to 256M parameters, 16-bit"
    assert shape_class(134_515_008, 142_000_000) == "128M to 256M parameters, 8-bit"
    assert shape_class(1_100_048_384, 640_000_000) == "1G to 2G parameters, 4-bit"
    assert shape_class(2000, 8000) == "1k to 2k parameters, 32-bit"
    assert shape_class(3, 12) == "2 to 4 parameters, 32-bit"


def test_a_choice_is_found_by_the_models_numbers() -> None:
    assert STORED.choice(134_515_008, 98_362_432) == StepChoice(320, 256, "because")
    assert STORED.choice(134_515_008, 538_060_032) is None


def test_the_processors_name_is_the_systems(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: Some Xeon\nflags\t: avx2\nmodel name\t: Other\n")
    assert processor_name(info) == "Some Xeon"
    assert processor_name(tmp_path / "none")


def test_without_the_library_nothing_is_calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise NativeUnavailable("no library")

    monkeypatch.setattr(calibration, "choose_isa", missing)
    assert load_calibration() is None
    with pytest.raises(NativeUnavailable):
        this_machine()
