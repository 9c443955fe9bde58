"""The gate on scripted subjects: what passes, what fails, on which items; resumption; reports."""

from __future__ import annotations

import json
from contextlib import contextmanager

import pytest

from ridgeline.lab.errors import BadInput, LabError
from ridgeline.lab.evaluate import gate as gate_module
from ridgeline.lab.evaluate.evaluation import evaluate, load_tasks
from ridgeline.lab.evaluate.gate import run_gate
from ridgeline.lab.evaluate.options import EvaluateOptions, GateOptions
from ridgeline.lab.evaluate.reports.gate_page import gate_page
from ridgeline.lab.evaluate.reports.text import evaluation_text, gate_text
from ridgeline.lab.evaluate.statistics.gate_checks import TaskValues, accuracy_checks, text_verdict
from tests.lab.evaluate.conftest import ITEMS
from tests.lab.evaluate.scripted import ScriptedSubject


def prefers_right(wrong=frozenset()):
    """Chooses "right", except for the items whose numbers are in `wrong`."""

    def prefers(pair):
        if not pair.context.startswith("item"):  # a text
            return -5.0
        number = int(pair.context.split()[1])
        return -1.0 if (pair.continuation == " right") != (number in wrong) else -2.0

    return prefers


def run(monkeypatch, options, folder, subjects, gate=None):
    @contextmanager
    def opened(text, api_key=""):
        yield subjects[text]

    monkeypatch.setattr(gate_module, "opened", opened)
    return run_gate("a", "b", options, gate or GateOptions(), folder, lambda *_: None)


def scripted(name, wrong=frozenset(), shift=0.0):
    return ScriptedSubject(prefers_right(wrong), shift, name=name)


def test_equal_subjects_pass(monkeypatch, options, tmp_path):
    found = run(monkeypatch, options, tmp_path / "g", {"a": scripted("a"), "b": scripted("b")})
    assert found.passed
    assert [check.verdict for check in found.checks] == ["non-inferior", "within the noise floor"]
    assert "gate: passed" in gate_text(found)


def test_a_loss_outside_the_noise_fails_and_names_its_items(monkeypatch, options, tmp_path):
    subjects = {"a": scripted("a"), "b": scripted("b", wrong=frozenset(range(10, 30)))}
    found = run(monkeypatch, options, tmp_path / "g", subjects)
    assert not found.passed
    check = found.checks[0]
    assert check.verdict == "worse"
    assert check.flips.lost == tuple(str(n + 1) for n in range(10, 30))
    assert check.p < 1e-5
    assert "FAILED on choices" in gate_text(found)
    page = gate_page(found)
    assert "FAILED" in page
    assert "11, 12, 13" in page


def test_a_gain_does_not_fail(monkeypatch, options, tmp_path):
    subjects = {"a": scripted("a", wrong=frozenset(range(20))), "b": scripted("b")}
    found = run(monkeypatch, options, tmp_path / "g", subjects)
    assert found.passed
    assert found.checks[0].flips.gained


def test_a_moved_distribution_fails_unless_the_margin_allows_it(monkeypatch, options, tmp_path):
    subjects = {"a": scripted("a"), "b": scripted("b", shift=0.3)}
    found = run(monkeypatch, options, tmp_path / "g", subjects)
    assert not found.passed
    text = found.checks[1]
    assert text.verdict == "outside the noise floor"
    assert text.noise.mean_kl == 0.0
    assert text.divergence.mean_kl > 0.001
    assert text.worst[0][1] >= text.worst[-1][1] > 0
    allowed = GateOptions(kl_margin=1.0)
    assert run(monkeypatch, options, tmp_path / "g", subjects, allowed).passed


class WanderingSubject(ScriptedSubject):
    """Its distributions differ between its runs."""

    def score(self, pairs, top, concurrency):
        if top:
            self._shift += 0.05
        return super().score(pairs, top, concurrency)


def test_the_noise_of_the_reference_against_itself_is_allowed(monkeypatch, options, tmp_path):
    subjects = {"a": WanderingSubject(prefers_right(), name="a"), "b": scripted("b", shift=0.02)}
    found = run(monkeypatch, options, tmp_path / "g", subjects)
    assert found.checks[1].noise.mean_kl > 0
    assert found.passed


def test_few_items_do_not_show_that_a_margin_is_kept(monkeypatch, options, tmp_path):
    few = EvaluateOptions(tasks=options.task_names[0], limit=20)
    subjects = {"a": scripted("a"), "b": scripted("b")}
    found = run(monkeypatch, few, tmp_path / "g", subjects)
    assert (found.passed, found.checks[0].verdict) == (True, "not shown")
    assert found.checks[0].needed > 20
    strict = run(monkeypatch, few, tmp_path / "g", subjects, GateOptions(strict=True))
    assert not strict.passed


def test_a_rerun_asks_only_what_is_missing(monkeypatch, options, tmp_path):
    class Cut(Exception):
        pass

    first = scripted("b")
    whole_score = first.score

    def breaks(pairs, top, concurrency):
        if len(first.asked) > 200:
            raise Cut
        return whole_score(pairs, top, concurrency)

    first.score = breaks
    with pytest.raises(Cut):
        run(monkeypatch, options, tmp_path / "g", {"a": scripted("a"), "b": first})
    again, reference = scripted("b"), scripted("a")
    found = run(monkeypatch, options, tmp_path / "g", {"a": reference, "b": again})
    assert found.passed
    assert reference.asked == []
    assert len(first.asked) + len(again.asked) == 2 * ITEMS + 8
    with (tmp_path / "g" / "candidate" / "results.jsonl").open("ab") as file:
        file.write(b'{"task":"choices","id":"1"')  # a crash in the middle of a line
    assert run(monkeypatch, options, tmp_path / "g", {"a": reference, "b": again}).passed


def test_results_of_another_subject_are_not_continued(monkeypatch, options, tmp_path):
    run(monkeypatch, options, tmp_path / "g", {"a": scripted("a"), "b": scripted("b")})
    with pytest.raises(BadInput, match="has results of b"):
        run(monkeypatch, options, tmp_path / "g", {"a": scripted("a"), "b": scripted("other")})


def test_results_of_another_model_at_the_same_address_are_not_continued(monkeypatch, options, tmp_path):
    first, second = scripted("b"), scripted("b")
    first.facts["identity"], second.facts["identity"] = "small, /v1/completions", "large, /v1/completions"
    run(monkeypatch, options, tmp_path / "g", {"a": scripted("a"), "b": first})
    with pytest.raises(BadInput, match=r"has results of b .*small.*not of b .*large"):
        run(monkeypatch, options, tmp_path / "g", {"a": scripted("a"), "b": second})


def test_texts_that_begin_differently_are_not_compared(monkeypatch, options, tmp_path):
    without, other = scripted("b"), scripted("b")
    without.prefix, other.prefix = None, 3
    with pytest.raises(LabError, match="leaves out the first word"):
        run(monkeypatch, options, tmp_path / "g", {"a": scripted("a"), "b": without})
    found = run(monkeypatch, options, tmp_path / "h", {"a": scripted("a"), "b": other})
    assert found.checks[1].without == "the subjects have different tokens before the text"


def test_one_text_is_too_few(monkeypatch, options, tmp_path):
    one = EvaluateOptions(tasks=options.task_names[1], limit=1)
    with pytest.raises(BadInput, match="at least 2 texts"):
        run(monkeypatch, one, tmp_path / "g", {"a": scripted("a"), "b": scripted("b")})


def test_two_files_of_one_name_are_refused(options, tmp_path):
    other = tmp_path / "other" / "choices.jsonl"
    other.parent.mkdir()
    other.write_bytes((tmp_path / "choices.jsonl").read_bytes())
    with pytest.raises(BadInput, match="two tasks have the name choices"):
        load_tasks(EvaluateOptions(tasks=f"{options.task_names[0]},{other}"))


@pytest.mark.parametrize(("n", "verdict"), [(20, "not shown"), (400, "non-inferior")])
def test_a_gain_in_few_items_shows_no_non_inferiority(n, verdict):
    right = {str(number): 1.0 for number in range(n)}
    wrong_once = right | {"0": 0.0}
    (check,) = accuracy_checks(
        [TaskValues("t", "acc", wrong_once, wrong_once, right)], margin=0.01, alpha=0.05, power=0.8, seed=0
    )
    assert (check.flips.lost, len(check.flips.gained)) == ((), 1)
    assert check.verdict == verdict


def test_texts_with_a_wide_interval_show_nothing():
    assert text_verdict(0.02, 0.04, 0.005, 0.01) == "outside the noise floor"
    assert text_verdict(0.01, 0.03, 0.005, 0.01) == "not shown"
    assert text_verdict(0.001, 0.014, 0.005, 0.01) == "within the noise floor"


def test_a_score_that_is_not_a_number_stops_the_run(monkeypatch, options, tmp_path):
    broken = ScriptedSubject(lambda pair: float("nan"), name="b")
    with pytest.raises(LabError, match="b gives a log-probability that is not finite"):
        run(monkeypatch, options, tmp_path / "g", {"a": scripted("a"), "b": broken})


def test_several_tasks_are_adjusted_together():
    ids = [str(n) for n in range(200)]
    right = dict.fromkeys(ids, 1.0)
    six_lost = right | dict.fromkeys(ids[:6], 0.0)
    alone = accuracy_checks(
        [TaskValues("t", "acc", right, right, six_lost)], margin=0.0, alpha=0.05, power=0.8, seed=0
    )
    assert alone[0].verdict == "worse"  # p = 0.031
    others = [TaskValues(f"t{n}", "acc", right, right, right) for n in range(4)]
    among = accuracy_checks(
        [TaskValues("t", "acc", right, right, six_lost), *others], margin=0.0, alpha=0.05, power=0.8, seed=0
    )
    assert among[0].adjusted_p > 0.05
    assert among[0].verdict == "not shown"


def test_a_loss_no_larger_than_the_noise_passes():
    ids = [str(n) for n in range(400)]
    right = dict.fromkeys(ids, 1.0)
    lost = [right | dict.fromkeys(ids[start : start + 10], 0.0) for start in (0, 50)]
    (check,) = accuracy_checks(
        [TaskValues("t", "acc", right, lost[0], lost[1])], margin=0.0, alpha=0.05, power=0.8, seed=0
    )
    assert check.p < 0.05
    assert check.verdict == "not shown"


def test_an_evaluation_is_written_with_every_metric(options, tmp_path):
    tasks, sizes = load_tasks(options)
    found = evaluate(scripted("a"), tasks, sizes, options, tmp_path / "e", lambda *_: None)
    text = evaluation_text(found)
    assert "acc_norm" in text
    assert "bits_per_byte" in text
    stored = json.loads((tmp_path / "e" / "summary.json").read_text())
    assert stored["tasks"][0]["metrics"][0] == {"name": "acc", "value": 1.0, "error": 0.0, "more": True}
