"""Step times: fitted on records whose truth is known, also where the machine was disturbed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ridgeline.engine.schedule.step import StepWork
from ridgeline.lab.errors import BadInput, LabError
from ridgeline.lab.perfmodel.fit_steps import fit_step_times
from ridgeline.lab.perfmodel.step_times import StepTimes
from ridgeline.telemetry.stats import StepRecord

TURN_S, SCHEDULE_S = 0.0004, 0.00005


def truth(work: StepWork) -> float:
    """A machine: 3 ms, 0.2 ms a token up to 64 and half of that beyond, attention, KV."""
    tokens = work.prefill_tokens + work.decode_batch
    per_token = 0.0002 * min(tokens, 64) + 0.0001 * max(tokens - 64, 0)
    attention = 2e-7 * work.prefill_context_product + 1.5e-6 * work.decode_context
    return 0.003 + per_token + attention + 0.001 * work.prefill_rows


def records(
    seed: int,
    count: int = 600,
    seconds: Callable[[StepWork], float] = truth,
    noise: float = 0.02,
    disturbed: float = 0.0,
) -> list[StepRecord]:
    """Steps one after another; a share of them is held up to three times as long."""
    rng = random.Random(seed)
    start, made = 100.0, []
    for step in range(count):
        batch = rng.randint(1, 40)
        chunk = rng.choice([0, 0, rng.randint(2, 256)])
        context = rng.randint(1, 2000) * (chunk > 0)
        work = StepWork(
            chunk, int(chunk > 0), chunk * (context + chunk), batch, batch * rng.randint(10, 1500)
        )
        wall = seconds(work) * rng.gauss(1, noise)
        if rng.random() < disturbed:
            wall *= rng.uniform(1.5, 3)
        made.append(StepRecord(step, start, *work, wall, SCHEDULE_S, wall))
        start += SCHEDULE_S + wall + TURN_S
    return made


WORK = [
    StepWork(0, 0, 0, 1, 500),
    StepWork(0, 0, 0, 30, 30_000),
    StepWork(200, 1, 200 * 1000, 20, 20_000),
    StepWork(16, 1, 16 * 16, 2, 200),
]


@pytest.mark.parametrize("work", WORK)
def test_a_fit_finds_the_machine_behind_its_records(work: StepWork) -> None:
    times = fit_step_times({"a": records(1), "b": records(2)})
    assert times.seconds(work) == pytest.approx(truth(work), rel=0.05)


@pytest.mark.parametrize("work", WORK)
def test_disturbed_steps_hardly_move_the_fit(work: StepWork) -> None:
    times = fit_step_times({"a": records(1, disturbed=0.1)})
    assert truth(work) * 0.95 < times.seconds(work) < truth(work) * 1.2


def test_all_ordinary_steps_together_take_the_time_that_was_measured() -> None:
    noisy = records(1, noise=0.2)
    times = fit_step_times({"a": noisy})
    predicted = sum(times.seconds(StepWork(*_work(record))) for record in noisy)
    assert predicted == pytest.approx(sum(record.busy_s for record in noisy), rel=0.01)


def _work(record: StepRecord) -> tuple[int, ...]:
    return (
        record.prefill_tokens,
        record.prefill_rows,
        record.prefill_context_product,
        record.decode_batch,
        record.decode_context,
    )


def test_pieces_are_used_where_they_help_and_only_there() -> None:
    bent = fit_step_times({"a": records(1)})
    straight = fit_step_times({"a": records(1, seconds=lambda w: 0.003 + 0.0002 * sum((w[0], w[3])))})
    assert len(bent.mixed.knots) > 1
    assert len(straight.mixed.knots) == 1


def test_no_coefficient_is_negative() -> None:
    falling = records(1, seconds=lambda work: 0.05 - 1e-7 * work.decode_context)
    terms = fit_step_times({"a": falling}).decode
    assert min(terms.fixed_s, *terms.token_s, terms.context_s, terms.batch_s) >= 0


def test_whole_traces_are_held_out() -> None:
    slower = records(3, seconds=lambda work: 1.5 * truth(work))
    times = fit_step_times({"a": records(1), "b": records(2), "slower": slower})
    assert times.fitted_on == ("a", "b", "slower")
    by_trace = {error.trace: error for error in times.errors}
    assert by_trace["slower"].total == pytest.approx(1 / 1.5 - 1, abs=0.03)  # by a fit on the other two
    totals = sorted(abs(error.total) for error in times.errors)
    assert times.spread == totals[2]  # of three, none says how far a fourth may be off in four of five cases


def test_a_machine_that_changed_its_speed_is_known_by_slow_seconds() -> None:
    """Half of the trace at a third of the speed, as beside another program; single slow steps say nothing."""
    quick = records(1, count=300)
    slow = records(2, count=300, seconds=lambda work: 3 * truth(work))
    later = quick[-1].start - slow[0].start + 1
    changed = [*quick, *(replace(record, start=record.start + later) for record in slow)]
    low, high = fit_step_times({"a": changed}).speeds
    assert high / low > 2
    low, high = fit_step_times({"a": records(1, disturbed=0.02)}).speeds
    assert high / low < 1.5


def test_host_time_is_read_off_the_gaps_between_steps() -> None:
    host = fit_step_times({"a": records(1)}).host
    assert host.schedule(20) == pytest.approx(SCHEDULE_S, rel=0.05)
    assert host.turn(20) == pytest.approx(TURN_S, rel=0.05)


def test_outside_the_fitted_range_the_interval_widens_and_says_so() -> None:
    times = fit_step_times({"a": records(1)})
    inside, outside = StepWork(0, 0, 0, 30, 30_000), StepWork(0, 0, 0, 160, 30_000)
    assert times.out_of_range(inside) == []
    assert times.out_of_range(outside) == ["sequences decoding together: 160, fitted from 1 to 40"]
    near, far = times.interval(inside), times.interval(outside)
    assert near.low < near.mid < near.high < 1.2 * near.mid
    assert far.high > 3 * far.mid
    assert far.low < far.mid / 3


def test_an_interval_covers_as_many_steps_as_it_claims() -> None:
    times = fit_step_times({"a": records(1, noise=0.1)})
    fresh = records(2, noise=0.1)
    covered = [r.busy_s in times.interval(StepWork(*_work(r)), coverage=0.8) for r in fresh]
    assert 0.75 < sum(covered) / len(covered) < 0.86


def test_decode_steps_padded_to_graph_sizes_share_their_time() -> None:
    graphs = (8, 16, 32, 64)

    def padded(work: StepWork) -> float:
        size = next(size for size in graphs if size >= work.decode_batch)
        return truth(work._replace(decode_batch=size)) if not work.prefill_tokens else truth(work)

    times = fit_step_times({"a": records(1, seconds=padded)}, batches=graphs)
    assert times.seconds(StepWork(0, 0, 0, 9, 9000)) == times.seconds(StepWork(0, 0, 0, 16, 9000))
    assert times.seconds(StepWork(0, 0, 0, 9, 9000)) == pytest.approx(
        padded(StepWork(0, 0, 0, 9, 9000)), rel=0.05
    )


def test_too_few_records_are_refused() -> None:
    with pytest.raises(LabError, match="12 step records are too few"):
        fit_step_times({"a": records(1, count=12)})


def test_saved_times_are_read_back_and_foreign_files_refused(tmp_path: Path) -> None:
    times = fit_step_times({"a": records(1)}, about={"model": "m"})
    times.save(tmp_path / "deep" / "times.json")
    assert StepTimes.load(tmp_path / "deep" / "times.json") == times
    (tmp_path / "other.json").write_text('{"decode": 1}')
    with pytest.raises(BadInput, match="no step times"):
        StepTimes.load(tmp_path / "other.json")
    with pytest.raises(BadInput, match="cannot be read"):
        StepTimes.load(tmp_path / "nowhere.json")
