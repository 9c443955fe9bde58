"""The table of chips: every cell has a source and is dense, and names are found in the usual spellings."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest

from ridgeline.engine.limits.calibration import (
    Calibration,
    Ceilings,
    ReadRate,
    store_calibration,
    this_machine,
)
from ridgeline.lab.errors import BadInput
from ridgeline.lab.hardware.find_chip import find_chip
from ridgeline.lab.hardware.page import page
from ridgeline.lab.hardware.table import CHIP_FIELDS, CHIPS
from ridgeline.lab.hardware.this_machine import this_cpu
from ridgeline.ops.cpu.library import NativeError

ROOT = Path(__file__).resolve().parents[2]
SYSTEMS = ROOT / ".." / "shared" / "data" / "measured-serving" / "systems"
ASKED_FOR = {
    "a100", "h100", "h200", "b200", "gb200", "b300", "gb300", "l4", "l40s", "rtx-pro-6000", "rtx-5090",
    "rtx-4090", "mi300x",
}  # fmt: skip
GEFORCE = ("rtx-5090", "rtx-4090")  # bf16 at half the rate that their fp8 would suggest
SYSTEM_FILES = {
    "a100": "a100_sxm", "h100": "h100_sxm", "h200": "h200_sxm", "b200": "b200_sxm", "gb200": "gb200",
    "b300": "b300_sxm", "gb300": "gb300", "l4": "l4", "l40s": "l40s", "rtx-pro-6000": "rtx_pro_6000_server",
}  # fmt: skip


def test_every_chip_asked_for_is_there() -> None:
    assert {known.name for known in CHIPS} == ASKED_FOR


@pytest.mark.parametrize("known", CHIPS, ids=lambda known: known.name)
def test_every_cell_has_a_source_and_every_price_its_date(known) -> None:
    cells = {field for field in CHIP_FIELDS if getattr(known, field) is not None}
    cells |= {f"flops.{unit}" for unit in known.flops}
    assert set(known.sources) == cells
    assert all(len(source) > 10 for source in known.sources.values())
    if known.usd_per_hour is not None:
        assert re.search(r"read 20\d\d-\d\d-\d\d", known.sources["usd_per_hour"])


@pytest.mark.parametrize("known", CHIPS, ids=lambda known: known.name)
def test_half_the_bits_are_about_twice_the_rate_so_no_sparse_figure_got_in(known) -> None:
    """A sparse figure would make it four times."""
    rates = known.flops
    if "fp8" in rates and known.name not in GEFORCE:
        assert 1.9 < rates["fp8"] / rates["bf16"] < 2.1
    if "fp4" in rates and known.name not in ("b300", "gb300"):  # these have fp4 units for three times as much
        assert 1.9 < rates["fp4"] / rates["fp8"] < 2.1
    # Published with sparsity: H100 1,979 bf16; B200 4,500; MI300X 2,614.9; L40S 733.
    limits = {
        "h100": 1000,
        "h200": 1000,
        "b200": 2300,
        "mi300x": 1310,
        "l40s": 400,
        "rtx-5090": 210,
        "rtx-4090": 166,
    }
    assert rates["bf16"] / 1e12 <= limits.get(known.name, 2500)


@pytest.mark.parametrize(("name", "file"), SYSTEM_FILES.items())
def test_the_figures_are_those_of_the_cited_file(name: str, file: str) -> None:
    path = SYSTEMS / f"{file}.yaml"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    cited = {key: float(value) for key, value in re.findall(r"^\s+(\w+): ([\d.]+)", path.read_text(), re.M)}
    known = find_chip(name)
    assert known.memory_bytes == cited["mem_capacity"]
    assert known.bytes_per_s == cited["mem_bw"]
    assert known.link_bytes_per_s == cited["intra_node_bw"]
    assert known.internode_bytes_per_s == cited["inter_node_bw"]
    assert known.gpus_per_node == cited["num_gpus_per_node"]
    assert known.link_domain == cited.get("num_gpus_per_rack", known.gpus_per_node)
    assert known.watts == cited["power"]
    keys = {
        "bf16": "bfloat16_tc_flops",
        "fp8": "fp8_tc_flops",
        "fp4": "fp4_tc_flops",
        "int8": "int8_tc_flops",
    }
    stated = {unit: cited[key] for unit, key in keys.items() if key in cited}
    assert dict(known.flops) == pytest.approx(stated, rel=1e-3)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("H200", "h200"),
        ("h200_sxm", "h200"),
        ("NVIDIA H100 SXM", "h100"),
        ("rtx_pro_6000_server", "rtx-pro-6000"),
        ("GeForce RTX 5090", "rtx-5090"),
        ("AMD Instinct MI300X", "mi300x"),
        ("GB200 NVL72", "gb200"),
    ],
)
def test_a_chip_is_found_as_others_write_it(spelling: str, name: str) -> None:
    assert find_chip(spelling).name == name


def test_an_unknown_chip_is_refused_with_the_nearest() -> None:
    with pytest.raises(BadInput, match="unknown hardware 'h20'; did you mean h200"):
        find_chip("h20")


def test_weights_are_multiplied_in_the_fastest_unit_that_takes_them() -> None:
    assert find_chip("h200").unit("fp8") == "fp8"
    assert find_chip("h200").unit("nvfp4") == "bf16"
    assert find_chip("b200").unit("nvfp4") == "fp4"
    assert find_chip("a100").unit("fp8") == "bf16"
    assert find_chip("b200").unit("int4") == "bf16"
    assert find_chip("h200").unit("int8") == "int8"
    assert find_chip("b300").unit("int8") == "bf16"  # its int8 unit is slower than widening
    assert find_chip("h200").ridge("fp8") == pytest.approx(1978e12 / 4.8e12)


def test_a_chip_can_be_sent_to_another_process_and_looked_up_by() -> None:
    assert pickle.loads(pickle.dumps(find_chip("b200"))) == find_chip("b200")
    assert {find_chip("b200"): 1}[find_chip("b200")] == 1


def test_this_processor_is_what_its_calibration_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    try:
        machine = this_machine()
    except NativeError as missing:
        pytest.skip(str(missing))
    reads = (ReadRate(1 << 24, 90e9), ReadRate(1 << 29, 40e9))
    store_calibration(
        Calibration(machine, Ceilings(reads, {"float32": 2e11, "bfloat16": 4e11, "int8": 9e11}))
    )
    here = this_cpu()
    assert (here.name, here.bytes_per_s) == ("cpu", 40e9)  # weights come from memory, not from a cache
    assert dict(here.flops) == {"fp32": 2e11, "bf16": 4e11, "int8": 9e11}
    assert here.unit("gguf:Q4_1") == "int8"
    assert here.ridge("gguf:Q8_0") == pytest.approx(9e11 / 40e9)
    assert "doctor --calibrate" in here.sources["bytes_per_s"]


def test_the_page_is_what_the_table_says() -> None:
    assert (ROOT / "docs" / "hardware.md").read_text(encoding="utf-8") == page()
