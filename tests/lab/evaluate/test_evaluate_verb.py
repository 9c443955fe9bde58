"""The verb with the real model: evaluate, gate with its exit codes, compare with its picture."""

from __future__ import annotations

import json

import pytest

from ridgeline.cli.main import main
from ridgeline.lab.evaluate import verdicts
from ridgeline.lab.evaluate.compare import Comparison, Entry, quality_of
from ridgeline.lab.evaluate.evaluation import Evaluation, TaskResult
from ridgeline.lab.evaluate.reports.compare_page import comparison_page, comparison_text
from ridgeline.lab.evaluate.scoring.metrics import Metric
from ridgeline.lab.model_identity import identify

MODEL = "smollm2-135m,kv_tokens=2048"
TEXTS = (  # of similar divergence: its error is far below its mean on every instruction set
    "The river runs to the sea, and the sea is wide.",
    "Bread is made of flour, water, salt and yeast, and it is baked in an oven.",
    "The train to the north leaves at nine in the morning from the old station.",
    "In winter the lake freezes, and children skate on it until the sun goes down.",
    "She opened the letter, read it twice, and put it back in the drawer.",
    "The mountain is the highest of the country, and few people have climbed it.",
)
QUESTIONS = (("The capital of France is", "Paris", "a spoon"), ("Two and two make", "four", "a river"))


@pytest.fixture(autouse=True)
def own_verdicts(tmp_path, monkeypatch):
    """The models are the user's, the verdicts are not."""
    monkeypatch.setattr(verdicts, "cache_dir", lambda: tmp_path / "cache")


@pytest.fixture
def tasks(tmp_path):
    choices, texts = tmp_path / "capitals.jsonl", tmp_path / "texts.jsonl"
    lines = [{"query": query, "choices": [good, bad], "gold": 0} for query, good, bad in QUESTIONS]
    choices.write_text("".join(json.dumps(line) + "\n" for line in lines))
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return f"{choices},{texts}"


def test_evaluate_prints_and_keeps_its_metrics(smollm2_path, tasks, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["evaluate", MODEL, "--tasks", tasks, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "capitals" in printed
    assert "token_perplexity" in printed
    assert (out / "report.html").read_text().startswith("<!doctype html>")
    summary = json.loads((out / "summary.json").read_text())
    assert summary["tasks"][0]["metrics"][0]["value"] == 1.0
    assert main(["evaluate", MODEL, "--tasks", tasks, "--out", str(out), "--json"]) == 0  # nothing is asked
    assert json.loads(capsys.readouterr().out)["tasks"] == summary["tasks"]


def test_the_gate_passes_the_same_model_and_fails_another_format(smollm2_path, tasks, tmp_path, capsys):
    exact = MODEL + ",deterministic=true"  # no noise from batching on any instruction set

    def gate(candidate, out):
        reference = ["--reference", exact, "--candidate", candidate]
        return main(["evaluate", "gate", *reference, "--tasks", tasks, "--out", str(tmp_path / out)])

    assert gate(exact, "same") == 0
    printed = capsys.readouterr()
    assert "gate: passed" in printed.out
    assert "not recorded for `ridgeline plan`: the candidate has the weights as stored" in printed.err
    assert gate(exact + ",weights=int8-channel,kv_dtype=int8", "int8") == 1
    assert "gate: FAILED on texts" in capsys.readouterr().out
    result = json.loads((tmp_path / "int8" / "gate.json").read_text())
    assert result["passed"] is False
    assert result["checks"][1]["divergence"]["mean_kl"] > result["checks"][1]["noise"]["mean_kl"]
    assert "FAILED" in (tmp_path / "int8" / "gate.html").read_text()
    (recorded,) = verdicts.read_verdicts()
    assert [recorded] == verdicts.read_verdicts(tmp_path / "int8")[1:]
    served = recorded.served
    assert (served.weights, served.kv, served.backend) == ("int8-channel", "int8", "native")
    assert served.model == identify("smollm2-135m")
    assert (recorded.passed, recorded.items) == (False, len(QUESTIONS) + len(TEXTS))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--reference", "no-such-model", "--candidate", "no-such-model", "--tasks", "{tasks}"],
        ["--reference", MODEL, "--candidate", MODEL, "--tasks", "no_such_task"],
        ["--reference", MODEL, "--candidate", MODEL, "--tasks", "arc_easy", "--data", "/no/such/folder"],
        ["--reference", MODEL, "--candidate", MODEL, "--margin", "-1"],
        ["--reference", "http://127.0.0.1:9", "--candidate", MODEL, "--tasks", "{tasks}"],
    ],
)
def test_a_gate_that_cannot_run_exits_with_2(arguments, tasks, tmp_path, capsys):
    given = [argument.format(tasks=tasks) for argument in arguments]
    assert main(["evaluate", "gate", *given, "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.strip()


def entry(name, acc, speed, memory, usd=None):
    result = TaskResult("t", 10, 10, "acc", [Metric("acc", acc, 0.01)])
    quality, error = quality_of([result])
    return Entry(name, Evaluation(name, {}, [result], 0, None), quality, error, speed, memory, usd)


def test_the_front_holds_what_no_other_beats():
    found = Comparison(
        [
            entry("large", 0.8, 10.0, 4 << 30),
            entry("small", 0.6, 40.0, 1 << 30),
            entry("beaten", 0.5, 30.0, 2 << 30),
            entry("hosted", 0.7, None, None, 3.0),
            entry("dearer", 0.7, None, None, 4.0),
        ],
        {},
    )
    assert [one.subject for one in found.front] == ["large", "hosted", "small"]
    page = comparison_page(found)
    for name in ("large", "small", "beaten", "hosted"):
        assert name in page
    assert page.count("<svg") == 3
    assert "4.00 GiB" in comparison_text(found)


def test_compare_measures_speed_memory_and_price(smollm2_path, tasks, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = [MODEL, "--tasks", tasks, "--out", str(out), "--price", "0.36", "--concurrency", "2"]
    assert main(["evaluate", "compare", *arguments]) == 0
    (one,) = json.loads((out / "compare.json").read_text())["entries"]
    assert one["tokens_per_s"] > 0
    assert one["memory_bytes"] > 50 << 20
    assert one["usd_per_mtok"] == pytest.approx(100 / one["tokens_per_s"])
    assert "front" in capsys.readouterr().out
