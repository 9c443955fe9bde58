"""What a gate records for the planner, and which verdict counts for which weights."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from ridgeline.lab.errors import BadInput
from ridgeline.lab.evaluate import verdicts
from ridgeline.lab.evaluate.gate import run_gate, stated_format
from ridgeline.lab.evaluate.options import EvaluateOptions, GateOptions
from ridgeline.lab.evaluate.verdicts import (
    STORED,
    CheckSummary,
    QualityVerdict,
    ServedFormat,
    append_verdict,
    newest,
    read_verdicts,
    why_unusable,
)
from ridgeline.lab.model_identity import ModelIdentity, identify
from ridgeline.lab.perfmodel.deployment import ENGINES
from ridgeline.models.spec.precision import Precision
from tests.lab.evaluate.conftest import ITEMS
from tests.lab.evaluate.scripted import ScriptedSubject
from tests.lab.evaluate.test_gate import prefers_right, run

MODEL = ModelIdentity("m", content="one")
WIDE = ServedFormat(MODEL, STORED, "bfloat16", "native", "native, bfloat16")
INT8 = ServedFormat(MODEL, "int8", "bfloat16", "native", "native, int8")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))


def verdict(
    served: ServedFormat = INT8, *, passed: bool = True, at: str = "2026-11-18T10:00:00"
) -> QualityVerdict:
    checks = [CheckSummary("texts", "within the noise floor", 8, "mean KL 0.001")]
    return QualityVerdict("m", "m,weights=int8", served, passed, checks, 0.01, 1.0, at)


def gate(monkeypatch, options, folder, reference, candidate):
    subjects = {}
    for name, served in (("a", reference), ("b", candidate)):
        subjects[name] = ScriptedSubject(prefers_right(), name=name)
        subjects[name].served = served
    return run(monkeypatch, options, folder, subjects)


def test_a_gate_about_a_format_has_its_verdict(monkeypatch, options, tmp_path):
    found = gate(monkeypatch, options, tmp_path / "g", WIDE, INT8)
    assert (found.passed, found.not_recorded) == (True, "")
    recorded = found.verdict
    assert recorded is not None
    assert recorded.served == INT8
    assert [(one.task, one.items) for one in recorded.checks] == [("choices", ITEMS), ("texts", 8)]
    found.save(tmp_path / "g")
    assert read_verdicts(tmp_path / "g") == [recorded]
    assert "choices non-inferior (320 items), texts within the noise floor (8 items)" in recorded.words


def test_a_gate_between_two_models_is_not_recorded_and_says_why(monkeypatch, options, tmp_path):
    other = ServedFormat(ModelIdentity("m", content="two"), "int8", "bfloat16", "native")
    found = gate(monkeypatch, options, tmp_path / "g", WIDE, other)
    assert (found.verdict, found.not_recorded) == (None, "reference and candidate are different models")
    found.save(tmp_path / "g")
    with pytest.raises(BadInput, match="different models"):
        read_verdicts(tmp_path / "g")


@pytest.mark.parametrize(
    ("reference", "candidate", "why"),
    [
        (WIDE, INT8, ""),
        (WIDE, None, "--record-as"),
        (None, INT8, "reference is a server"),
        (INT8, INT8, "quantized itself"),
        (WIDE, WIDE, "as stored"),
        (WIDE, msgspec.structs.replace(WIDE, kv="int8"), ""),
        (msgspec.structs.replace(WIDE, kv="int8"), INT8, "quantized itself"),
        (None, msgspec.structs.replace(INT8, stated=True), ""),
        (INT8, msgspec.structs.replace(INT8, stated=True), "quantized itself"),
    ],
)
def test_a_gate_says_something_about_a_format_against_wide_weights_of_the_same_model(
    reference, candidate, why
):
    found = why_unusable(reference, candidate)
    assert why in found
    assert bool(why) == bool(found)


def test_the_newest_verdict_of_the_same_weights_format_and_backend_counts():
    older, newer = verdict(), verdict(passed=False, at="2026-11-18T11:00:00")
    append_verdict(newer)
    with verdicts.verdicts_file().open("ab") as file:
        file.write(b'not a verdict\n{"served": "\xff"}\n{"served": {"mod')  # the last one on a full disk
    append_verdict(older)
    found = read_verdicts()
    assert found == [newer, older]
    asked = {"weights": "int8", "kv": "bfloat16", "backend": "native"}
    assert newest(found, MODEL, **asked) == newer
    for changed in ({"weights": "int4"}, {"kv": "int8"}, {"backend": "cuda"}):
        assert newest(found, MODEL, **{**asked, **changed}) is None
    assert newest(found, ModelIdentity("m", content="two"), **asked) is None
    assert newest(found, ModelIdentity("m"), **asked) is None


def test_files_are_the_same_by_content_and_hub_models_by_repository_and_commit(tmp_path):
    def folder(name: str, weights: bytes) -> str:
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(weights)
        return str(tmp_path / name)

    first, copy, other = folder("a", b"1" * 99), folder("b", b"1" * 99), folder("c", b"2" * 99)
    assert identify(first).same_as(identify(copy)) == "content"
    assert identify(first).same_as(identify(other)) == ""
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "config.json").write_text("{}")
    assert identify(str(tmp_path / "d")).same_as(identify(str(tmp_path / "d"))) == ""  # no weights

    commit = "0123456789abcdef0123456789abcdef01234567"
    plain, pinned = identify("no-org/no-model"), identify(f"hf:no-org/no-model@{commit}")
    assert plain.same_as(pinned) == "repository"
    assert pinned.same_as(pinned) == "commit"
    assert pinned.same_as(identify(f"no-org/no-model@{commit[::-1]}")) == ""
    assert plain.same_as(identify("no-org/other")) == ""


def test_the_format_of_a_server_is_as_stated():
    url = "http://127.0.0.1:9"
    found = stated_format("no-org/no-model,weights=fp8_e4m3,engine=vllm", url)
    assert (found.weights, found.kv, found.backend, found.stated) == ("fp8", "bfloat16", "vllm", True)
    for text, said in (
        ("no-org/no-model", "weights=FORMAT"),
        ("no-org/no-model,weights=fp9", "unknown precision"),
        ("no-org/no-model,weights=fp8,bits=8", "weights=FORMAT"),
        ("no-org/no-model,weights=fp8,engine=vlm", "asks for no engine 'vlm'.*did you mean 'vllm'"),
        ("no-org/no-model,weights=fp8,engine=ridgeline", "asks for no engine"),
        ("Llama-9,weights=fp8", "'Llama-9' is no model of the hub"),
    ):
        with pytest.raises(BadInput, match=said):
            stated_format(text, url)
    with pytest.raises(BadInput, match="loaded here"):
        run_gate(
            "a", "b", EvaluateOptions(), GateOptions(record_as="m,weights=fp8"), Path("x"), lambda *_: None
        )


def test_a_stated_format_has_the_name_that_a_plan_asks_for():
    url = "http://127.0.0.1:9"
    assert stated_format("no-org/no-model,weights=mxfp4", url).weights == str(Precision.named("mxfp4"))
    stored = stated_format("no-org/no-model,weights=stored,kv=fp8,engine=sglang", url)
    assert (stored.weights, stored.kv, stored.backend) == (verdicts.STORED, "fp8", "sglang")
    assert set(ENGINES) - {"ridgeline"} | {"native", "torch", "cuda"} == set(verdicts.PLANNED_ENGINES)
