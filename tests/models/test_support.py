"""The table of supported models is computed from the families, the backends and the formats."""

from __future__ import annotations

import json

import pytest

from ridgeline.models import support
from ridgeline.models.spec.coverage import COMPUTED, kinds_of, refusal
from ridgeline.models.spec.declarations.family import Family
from ridgeline.models.spec.families import FAMILIES, SERVED_FORMATS, check_servable
from ridgeline.models.spec.precision import Precision, packed_precision
from ridgeline.models.weights.packed_formats import FORMAT_NAMES, choose_format

BY_NAME = {row.family.name: row for row in support.family_support()}


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_every_family_has_a_sample_that_is_served(family: Family) -> None:
    """A key that the reader requires stands in support.SAMPLE; torch computes every family."""
    for optional in (False, True):
        spec = support.sample_spec(family, optional=optional)
        assert spec.family == family.name
        check_servable(spec)
    assert BY_NAME[family.name].cell("torch") == "yes"


def test_a_cell_is_what_the_backend_refuses() -> None:
    for name, row in BY_NAME.items():
        plain, full = (support.sample_spec(row.family, optional=optional) for optional in (False, True))
        for backend in support.BACKENDS:
            assert (backend in row.refusals) == (refusal(plain, backend) is not None), name
            served_in_part = refusal(plain, backend) is None and refusal(full, backend) is not None
            assert (backend in row.limits) == served_in_part, name


def test_a_backend_that_learns_a_kind_changes_its_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "gpt2"
    kinds = kinds_of(support.sample_spec(FAMILIES[name], optional=True))
    monkeypatch.setitem(COMPUTED, "cuda", frozenset())
    assert support._support(FAMILIES[name]).cell("cuda").startswith("no: LayerNorm")
    monkeypatch.setitem(COMPUTED, "cuda", frozenset(kinds))
    assert support._support(FAMILIES[name]).cell("cuda") == "yes"


def test_an_optional_part_limits_a_family_without_refusing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMPUTED, "cuda", frozenset())
    assert support._support(FAMILIES["phi3"]).cell("cuda") == "yes, without partly rotated heads"


def test_formats_say_what_is_computed_or_refused() -> None:
    rows = {(row.container, row.stored): row.computed for row in support.format_support()}
    assert rows["safetensors", "bfloat16"] == {"native": "bfloat16", "torch": "float32", "cuda": "bfloat16"}
    assert rows["safetensors", "float32"]["native"] == "bfloat16 (rounded)"
    assert rows["GGUF", "Q4_K"]["native"] == "int4 (Q4_K)"
    assert rows["GGUF", "Q6_K"]["native"] == "int6 (Q6_K); on AMX int8 (rounded)"
    assert rows["safetensors", "mxfp4 (gpt_oss)"]["native"] == "int8"
    blocks = rows[support.QUANTIZED, "FP8 (blocks of 128×128) of fp8, compressed-tensors"]
    assert blocks == {"native": "FP8", "torch": "float32", "cuda": "FP8, as stored"}
    int4 = rows[support.QUANTIZED, "int4 (groups of 128) of compressed-tensors, gptq"]
    assert int4["native"] == "int4 (Q4_0)"
    assert int4["cuda"] == "int4, as stored"
    assert rows["GGUF", "IQ4_NL"]["native"] == "int8"
    assert rows["GGUF", "IQ2_XS"]["native"] == "int8 (rounded)"
    assert set(rows[support.QUANTIZED, "aqlm"].values()) == {None}
    assert {stored for container, stored in rows if container == "safetensors"} >= set(SERVED_FORMATS)


@pytest.mark.parametrize(("precision", "stored"), [("fp8", "FP8"), ("nvfp4", "NVFP4"), ("mxfp4", "MXFP4")])
def test_the_planner_counts_what_the_native_library_keeps(precision: str, stored: str) -> None:
    kept = FORMAT_NAMES[choose_format("auto", (stored,), outermost=False, isa="avx512")].lower()
    assert packed_precision(Precision.named(precision)).experts == kept


def test_formats_that_ask_for_rounded_inputs_say_what_they_get() -> None:
    rows = {row.stored: row for row in support.input_support()}
    assert {row.asked for row in rows.values()} == {"FP8", "FP4", "int8"}
    blocks = rows["FP8 (blocks of 128×128)"]
    assert blocks.computed == {
        "native": "not quantized: float32; bfloat16 for several rows where the CPU multiplies it",
        "torch": "not quantized: float32",
        "cuda": "FP8, per token and 128 columns",
    }
    assert rows["int8 (a scale per row)"].computed["native"].startswith("the library's own")
    assert not any(name.startswith("int4") for name in rows)  # GPTQ and AWQ ask for nothing


def test_it_is_json() -> None:
    told = json.loads(json.dumps(support.as_json()))
    llama = next(row for row in told["families"] if row["family"] == "llama")
    assert llama["gguf_architecture"] == "llama"
    assert llama["backends"]["cuda"] == {"served": True, "reason": None}
    assert told["weights"]["torch"] == ["float32", "bfloat16", "float16"]
