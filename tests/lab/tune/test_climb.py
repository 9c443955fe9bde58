"""The search over settings with a formula in place of servers: what it finds, keeps, refuses and survives."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from ridgeline.lab.errors import BadInput, LabError
from ridgeline.lab.tune.climb import Climb, NotMeasured, RunId, Search, ahead
from ridgeline.lab.tune.effects import effects, more_is_better
from ridgeline.lab.tune.ledger import FILE, Effect, Header, Ledger, Run, Settings, Verdict
from tests.clock import Clock

BASE: Settings = {"step_tokens": 64, "max_running": 8}
SPACE = {"step_tokens": (64, 128, 256, 512, 1024), "max_running": (4, 8, 16, 32)}
BEST: Settings = {"step_tokens": 256, "max_running": 16}


def peak(settings: Settings, which: RunId) -> dict[str, float]:
    """Throughput with one optimum, 1.5 % of noise in every run, and a drift that a round's halves share."""
    noise = random.Random(f"{which} {sorted(settings.items())}").gauss(0, 0.015)
    away = abs(math.log2(settings["step_tokens"] / 256)) + abs(math.log2(settings["max_running"] / 16))
    rate = 100 * 0.85**away * (1 + noise) * (1 + 0.3 * math.sin(which.round))
    return {"output_tokens_per_s": rate, "ttft_ms.p90": 1e5 / rate, "failures": 0.0}


def flat(settings: Settings, which: RunId) -> dict[str, float]:
    noise = random.Random(f"{which} {sorted(settings.items())}").gauss(0, 0.03)
    return {"output_tokens_per_s": 100 * (1 + noise)}


def opened(folder: Path, **options: object) -> Ledger:
    ledger = Ledger(folder)
    if ledger.header is None:
        defaults = {
            "model": "m",
            "base": BASE,
            "objective": "output_tokens_per_s",
            "workload": {},
            "rounds": 4,
        }
        ledger.append(Header(**(defaults | options)))  # type: ignore[arg-type]
    return ledger


def accepted(ledger: Ledger) -> list[tuple[str, object]]:
    found = ((trial, ledger.verdict(trial.number)) for trial in ledger.trials)
    return [
        (trial.key, trial.after) for trial, verdict in found if verdict and verdict.decision == "accepted"
    ]


def final_settings(ledger: Ledger) -> Settings:
    return BASE | dict(accepted(ledger))


def test_a_known_optimum_is_found_through_the_noise(tmp_path: Path) -> None:
    with opened(tmp_path) as ledger:
        ended = Climb(ledger, peak, Search(SPACE)).run()
        assert final_settings(ledger) == BEST
        assert ended == "no single change is better beyond the noise"


def test_nothing_is_accepted_where_there_is_only_noise(tmp_path: Path) -> None:
    with opened(tmp_path) as ledger:
        Climb(ledger, flat, Search(SPACE)).run()
        assert accepted(ledger) == []
        assert len(ledger.trials) > 3


def test_every_trial_names_its_parent_and_changes_one_key_of_it(tmp_path: Path) -> None:
    with opened(tmp_path) as ledger:
        climb = Climb(ledger, peak, Search(SPACE))
        climb.run()
        for trial in ledger.trials[1:]:
            assert trial.settings == climb.settings_after(trial.parent)
            assert trial.before == trial.settings[trial.key]
            assert trial.after != trial.before


def test_runs_of_a_and_b_take_turns(tmp_path: Path) -> None:
    with opened(tmp_path) as ledger:
        Climb(ledger, peak, Search()).trial({"step_tokens": 128})
        assert [(run.arm, run.round) for run in ledger.runs(1)] == [
            (arm, number) for number in range(4) for arm in "ab"
        ]
        for run in ledger.runs(1):
            assert run.settings["step_tokens"] == (64 if run.arm == "a" else 128)


def test_noise_is_measured_first_and_once(tmp_path: Path) -> None:
    with opened(tmp_path) as ledger:
        climb = Climb(ledger, peak, Search(SPACE))
        climb.run()
        assert ledger.trials[0].key == ""
        assert [trial.key for trial in ledger.trials].count("") == 1
        first = ledger.verdict(1)
        assert first is not None
        assert first.effects["output_tokens_per_s"].noise is not None


def test_two_keys_at_once_are_refused(tmp_path: Path) -> None:
    with opened(tmp_path) as ledger:
        climb = Climb(ledger, peak, Search())
        with pytest.raises(BadInput, match="one key, not 2"):
            climb.trial({"step_tokens": 128, "max_running": 16})
        with pytest.raises(BadInput, match="already"):
            climb.trial({"step_tokens": 64})
        assert [trial.key for trial in ledger.trials] == [""]


def entries(folder: Path) -> list[object]:
    """What is in a ledger, but for times, and for halves of rounds that were run again."""
    with Ledger(folder, write=False) as ledger:
        found: list[object] = []
        for trial in ledger.trials:
            found.append(trial)
            found += [
                (r.arm, r.round, r.settings, r.metrics) for pair in ledger.rounds(trial.number) for r in pair
            ]
            found.append(ledger.verdict(trial.number))
        return found


class Stopped(BaseException):
    """As Ctrl-C or a crash: nothing catches it."""


def test_a_climb_interrupted_anywhere_and_begun_again_comes_to_the_same_ledger(tmp_path: Path) -> None:
    space = {"step_tokens": (64, 128, 256), "max_running": (8, 16)}
    with opened(tmp_path / "whole", rounds=2) as ledger:
        Climb(ledger, peak, Search(space)).run()
        total = sum(1 for _ in ledger.runs())
    for point in range(total):
        folder = tmp_path / f"stopped-{point}"
        runs = 0

        def stopping(settings: Settings, which: RunId, point: int = point) -> dict[str, float]:
            nonlocal runs
            runs += 1
            if runs == point + 1:
                raise Stopped
            return peak(settings, which)

        with opened(folder, rounds=2) as ledger, pytest.raises(Stopped):
            Climb(ledger, stopping, Search(space)).run()
        with opened(folder) as ledger:
            kept = sum(1 for _ in ledger.runs())
            assert kept == point, "only the run under way is lost"
            Climb(ledger, peak, Search(space)).run()
        assert entries(folder) == entries(tmp_path / "whole")


def test_a_ledger_cut_at_any_byte_is_taken_up_again(tmp_path: Path) -> None:
    space = {"max_running": (8, 16)}
    with opened(tmp_path / "whole", rounds=2) as ledger:
        Climb(ledger, peak, Search(space)).run()
    content = (tmp_path / "whole" / FILE).read_bytes()
    first = content.index(b"\n") + 1
    for at in range(first, len(content), 97):
        folder = tmp_path / f"cut-{at}"
        folder.mkdir()
        (folder / FILE).write_bytes(content[:at])
        with opened(folder, rounds=2) as ledger:
            Climb(ledger, peak, Search(space)).run()
        assert entries(folder) == entries(tmp_path / "whole")


def test_settings_that_are_refused_or_kill_the_server_are_recorded_and_passed_over(tmp_path: Path) -> None:
    def fragile(settings: Settings, which: RunId) -> dict[str, float]:
        if settings["step_tokens"] == 128:
            raise NotMeasured("refused", "--step-tokens 128 is not for this machine")
        if settings["max_running"] == 4:
            raise NotMeasured("died", "the server ended with signal SIGKILL")
        return peak(settings, which)

    with opened(tmp_path) as ledger:
        Climb(ledger, fragile, Search(SPACE)).run()
        verdicts = {
            (trial.key, trial.after): ledger.verdict(trial.number) for trial in ledger.trials if trial.number
        }
        refused = verdicts["step_tokens", 128]
        assert refused is not None
        assert (refused.decision, refused.reason) == ("refused", "--step-tokens 128 is not for this machine")
        assert final_settings(ledger)["max_running"] == 16
        died = Climb(ledger, fragile, Search()).trial({"max_running": 4})
        assert died.decision == "died"
        assert "SIGKILL" in died.reason


def test_a_base_that_cannot_be_measured_ends_the_search(tmp_path: Path) -> None:
    def refusing(settings: Settings, which: RunId) -> dict[str, float]:
        raise NotMeasured("refused", "no such model")

    with opened(tmp_path) as ledger, pytest.raises(LabError, match="no such model"):
        Climb(ledger, refusing, Search(SPACE)).run()


@pytest.mark.parametrize("arm", ["a", "b"])
def test_a_base_that_could_not_be_measured_once_is_tried_again(arm: str, tmp_path: Path) -> None:
    """A busy hour must not spoil a ledger for good."""
    is_busy = True

    def moody(settings: Settings, which: RunId) -> dict[str, float]:
        if is_busy and (which.round, which.arm) == (1, arm):
            raise NotMeasured("invalid", "the client was the bottleneck")
        return peak(settings, which)

    with opened(tmp_path) as ledger, pytest.raises(LabError, match=r"bottleneck.*tries them again"):
        Climb(ledger, moody, Search(SPACE)).run()
    is_busy = False
    with opened(tmp_path) as ledger:
        Climb(ledger, moody, Search(SPACE)).run()
        assert final_settings(ledger) == BEST
        assert [a.round for a, _ in ledger.rounds(0)] == [0, 1, 2, 3]


def test_the_budget_ends_the_search_between_rounds_and_more_time_goes_on(tmp_path: Path) -> None:
    clock = Clock(0.0)

    def slow(settings: Settings, which: RunId) -> dict[str, float]:
        clock.now += 10
        return peak(settings, which)

    with opened(tmp_path) as ledger:
        assert (
            Climb(ledger, slow, Search(SPACE, budget_s=130), clock=clock).run()
            == "the time budget was used up"
        )
        assert clock.now == 140
        Climb(ledger, slow, Search(SPACE), clock=clock).run()
        assert final_settings(ledger) == BEST


def test_a_trial_that_is_out_of_time_is_decided_by_the_rounds_it_has(tmp_path: Path) -> None:
    clock = Clock(0.0)

    def slow(settings: Settings, which: RunId) -> dict[str, float]:
        clock.now += 10
        return peak(settings, which)

    with opened(tmp_path) as ledger:
        verdict = Climb(ledger, slow, Search(trial_s=50), clock=clock).trial({"step_tokens": 128})
        assert verdict.rounds == 3


def test_a_gain_that_breaks_the_limit_is_not_accepted(tmp_path: Path) -> None:
    def trade(settings: Settings, which: RunId) -> dict[str, float]:
        return peak(settings, which) | {
            "ttft_ms.p90": 2.0 * settings["step_tokens"] * (1 + which.round / 100)
        }

    with opened(tmp_path, slo="ttft_p90=300ms") as ledger:
        Climb(ledger, trade, Search(SPACE)).run()
        assert final_settings(ledger) == {"step_tokens": 128, "max_running": 16}
        reasons = [entry.reason for entry in ledger.entries if isinstance(entry, Verdict)]
        assert any("ttft_ms.p90" in reason and "300" in reason for reason in reasons)


def test_in_open_loops_limits_hold_from_the_planned_moment(tmp_path: Path) -> None:
    """Where requests wait in a late client or a full queue, time from sending would hide it."""

    def waiting(settings: Settings, which: RunId) -> dict[str, float]:
        own = peak(settings, which)
        own["ttft_ms.p90"] = 10.0
        own["ttft_sched_ms.p90"] = 10.0 if settings["step_tokens"] == 64 else 500.0
        return own

    with opened(tmp_path, slo="ttft_p90=100ms", workload={"concurrency": None}) as ledger:
        verdict = Climb(ledger, waiting, Search()).trial({"step_tokens": 128})
        assert verdict.decision == "rejected"
        assert "ttft_sched_ms.p90 is 500 ms" in verdict.reason


def test_a_percentile_that_is_not_told_is_held_to_by_the_share_of_good_answers(tmp_path: Path) -> None:
    """Runs of a trial are too short for a P99: a limit on it must not be passed over in silence."""

    def attaining(settings: Settings, which: RunId) -> dict[str, float]:
        good = 1.0 if settings["step_tokens"] == 64 else 0.95
        return peak(settings, which) | {"attainment": good}

    with opened(tmp_path, slo="tpot_p99=50ms") as ledger:
        verdict = Climb(ledger, attaining, Search()).trial({"step_tokens": 128})
        assert verdict.decision == "rejected"
        assert "95.0% of answers kept the limits" in verdict.reason


def test_more_failures_are_no_gain(tmp_path: Path) -> None:
    def dropping(settings: Settings, which: RunId) -> dict[str, float]:
        return peak(settings, which) | {"failures": 0.02 if settings["step_tokens"] > 64 else 0.0}

    with opened(tmp_path) as ledger:
        verdict = Climb(ledger, dropping, Search()).trial({"step_tokens": 256})
        assert verdict.decision == "rejected"
        assert "failed" in verdict.reason


def test_an_unset_key_is_tried_at_every_value(tmp_path: Path) -> None:
    def unset(settings: Settings, which: RunId) -> dict[str, float]:
        return peak({"step_tokens": 64} | settings, which)

    with opened(tmp_path, base={"max_running": 8}) as ledger:
        Climb(ledger, unset, Search({"step_tokens": (32, 64, 128, 256)})).run()
        assert accepted(ledger) == [("step_tokens", 128), ("step_tokens", 256)]


def test_a_ledger_has_one_writer(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(LabError, match="another tuning"):
        Ledger(tmp_path)


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    with opened(tmp_path):
        pass
    with (tmp_path / FILE).open("ab") as file:
        file.write(b'{"kind": "run"}\n')
    with pytest.raises(BadInput, match="line 2"):
        Ledger(tmp_path, write=False)


def test_effects_are_paired_so_that_drift_cancels() -> None:
    rounds = [({"x_ms": base}, {"x_ms": base * 1.1}) for base in (10.0, 30.0, 90.0)]
    (effect,) = effects(rounds).values()
    assert effect.change == pytest.approx(0.1)
    assert effect.high - effect.low < 1e-9


def test_the_interval_is_students() -> None:
    rounds = [({"x": 1.0}, {"x": math.exp(d)}) for d in (0.1, 0.2, 0.3)]
    half = 4.302653 * 0.1 / math.sqrt(3)
    effect = effects(rounds)["x"]
    assert math.log1p(effect.low) == pytest.approx(0.2 - half, abs=1e-6)
    assert math.log1p(effect.high) == pytest.approx(0.2 + half, abs=1e-6)


def test_a_change_must_leave_both_zero_and_the_noise_behind() -> None:
    assert Effect(0.05, 0.03, 0.07, 0.02).is_beyond_noise
    assert not Effect(0.05, 0.03, 0.07, 0.06).is_beyond_noise
    assert not Effect(0.05, -0.01, 0.11, 0.02).is_beyond_noise
    assert Effect(-0.5, -0.6, -0.4, 0.9).is_beyond_noise, "half is as far away as double"


def test_chance_is_hardly_ever_accepted_and_a_real_gain_mostly_found() -> None:
    rng = random.Random(0)

    def rounds(gain: float) -> list[tuple[dict[str, float], dict[str, float]]]:
        return [
            ({"x": math.exp(rng.gauss(0, 0.02))}, {"x": math.exp(gain + rng.gauss(0, 0.02))})
            for _ in range(4)
        ]

    chance = found = 0
    for _ in range(300):
        noise = effects(rounds(0.0))
        chance += effects(rounds(0.0), noise)["x"].is_beyond_noise
        found += effects(rounds(0.08), noise)["x"].is_beyond_noise
    assert chance <= 3
    assert found >= 220


def test_rates_should_rise_and_times_fall() -> None:
    assert more_is_better("output_tokens_per_s")
    assert not more_is_better("ttft_ms.p90")
    with pytest.raises(BadInput, match="direction"):
        more_is_better("concurrency_mean")


def test_values_ahead_are_nearest_first() -> None:
    assert list(ahead((1, 2, 4, 8), 4, -1)) == [2, 1]
    assert list(ahead((1, 2, 4, 8), 4, 1)) == [8]


def test_an_outcome_stands_in_the_ledger_with_its_settings(tmp_path: Path) -> None:
    with opened(tmp_path) as ledger:
        Climb(ledger, peak, Search()).noise()
    with Ledger(tmp_path, write=False) as ledger:
        run = next(ledger.runs())
        assert isinstance(run, Run)
        assert run.settings == BASE
        assert run.outcome == "measured"
        assert run.at
