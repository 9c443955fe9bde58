"""Measuring steps: what is run, how often, against which limit; and one real calibration of a tiny model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

from ridgeline.engine.config import EngineConfig
from ridgeline.engine.errors import EngineError
from ridgeline.engine.limits.calibration import load_calibration, this_machine
from ridgeline.engine.limits.step_costs import BESIDE, choose_steps
from ridgeline.engine.schedule.step import StepPlan, StepResult
from ridgeline.engine.start import calibrate
from ridgeline.engine.start.build import build_engine
from ridgeline.engine.start.calibrate import (
    BATCHES,
    CHUNKS,
    STAGES,
    StepLimits,
    StepShape,
    TrialSteps,
    best_times,
    calibrate_machine,
    calibrate_model,
    measure_costs,
)
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.read_spec import read_spec
from tests.models.tiny_checkpoints import packed_as, tiny_model, write_gguf

BLOCK = 16


class Recorder:
    """A runner that computes nothing and remembers what it was asked for."""

    name = "recorder"

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        return StepResult([])


class Watch:
    """A clock that only moves when work is done."""

    def __init__(self) -> None:
        self.now = 100.0
        self.done: list[float] = []

    def __call__(self) -> float:
        return self.now

    def work(self, *seconds: float) -> Callable[[], None]:
        """Takes the first of these times when first done, and so on; the last again and again."""
        times = list(seconds)

        def do() -> None:
            took = times.pop(0) if len(times) > 1 else times[0]
            self.now += took
            self.done.append(took)

        return do


def measure_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quick, and yet nothing is left out on a machine that is slow at the moment."""
    steps = {stage: 600.0 for stage in STAGES if stage not in ("reading memory", "multiplying")}
    monkeypatch.setattr(calibrate, "STAGES", {"reading memory": 0.0, "multiplying": 0.0, **steps})
    monkeypatch.setattr(calibrate, "MAX_ROUNDS", 1)
    monkeypatch.setattr(calibrate, "READ_SIZES", (4 << 20, 16 << 20))


def quiet(_: float) -> None:
    pass


@pytest.fixture(scope="module")
def spec(smollm2_path: Path) -> ModelSpec:
    return read_spec(smollm2_path)


@pytest.fixture(scope="module")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    write_gguf(tiny_model("llama"), path, packed_as(GGMLQuantizationType.Q8_0))
    return path


def trial(spec: ModelSpec, num_blocks: int = 1024, max_context: int = 8192) -> tuple[TrialSteps, Recorder]:
    runner = Recorder()
    return TrialSteps(runner, spec, num_blocks, BLOCK, max_context), runner


def shape_of(steps: TrialSteps, decodes: int, chunk: int) -> StepShape:
    shape = steps.shape(decodes, chunk)
    assert shape is not None
    return shape


def test_the_first_run_warms_up_and_the_best_of_the_others_counts() -> None:
    watch = Watch()
    assert best_times([watch.work(9.0, 3.0, 2.0, 4.0)], 100.0, quiet, watch) == pytest.approx([2.0])
    assert len(watch.done) == 1 + calibrate.MAX_ROUNDS


def test_rounds_go_over_all_works_in_turn_and_end_with_the_time() -> None:
    watch = Watch()
    assert best_times([watch.work(1.0), watch.work(2.0)], 14.0, quiet, watch) == pytest.approx([1.0, 2.0])
    assert watch.done == [1.0, 1.0, 2.0, 2.0, 1.0, 2.0, 1.0, 2.0]
    assert watch.now - 100.0 <= 14.0


def test_work_that_would_take_too_long_is_left_out() -> None:
    """The fourth would be tried at 14 s, and two runs like the third's would end at 30."""
    watch = Watch()
    works = [watch.work(1.0), watch.work(2.0), watch.work(4.0), watch.work(8.0)]
    assert best_times(works, 20.0, quiet, watch) == pytest.approx([1.0, 2.0, 4.0])
    assert watch.now - 100.0 <= 20.0 + 4.0


def test_the_smallest_work_is_done_however_long_it_takes() -> None:
    watch = Watch()
    assert best_times([watch.work(50.0), watch.work(60.0)], 10.0, quiet, watch) == pytest.approx([50.0])


def test_progress_only_grows_and_ends_at_one() -> None:
    watch, seen = Watch(), []
    best_times([watch.work(1.0), watch.work(1.0)], 9.0, seen.append, watch)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def test_every_sequence_of_a_step_has_blocks_of_its_own(spec: ModelSpec) -> None:
    steps, _ = trial(spec)
    plan = steps.plan(shape_of(steps, BESIDE, 512))
    assert [row.count for row in plan.rows] == [1] * BESIDE + [512]
    blocks = [block for row in plan.rows for block in row.seq.block_table]
    assert len(blocks) == len(set(blocks))
    assert max(blocks) < 1024
    for row in plan.rows:
        assert len(row.seq.tokens) == row.start + row.count
        assert len(row.seq.block_table) == -(-len(row.seq.tokens) // BLOCK)


def test_decodes_sample_and_a_chunk_amid_its_prompt_does_not(spec: ModelSpec) -> None:
    steps, _ = trial(spec)
    *decodes, chunk = steps.plan(shape_of(steps, 2, 64)).rows
    assert [row.samplers for row in decodes] == [(row.seq,) for row in decodes]
    assert chunk.samplers == ()


def test_chunks_of_all_sizes_look_back_equally_far_on_average(spec: ModelSpec) -> None:
    steps, _ = trial(spec)
    shapes = [shape_of(steps, 0, chunk) for chunk in CHUNKS[:-1]]
    assert {shape.chunk_start + shape.chunk // 2 for shape in shapes} == {1024}


def test_every_block_is_written_before_it_is_read(spec: ModelSpec) -> None:
    """Memory the system has not given yet would be read at the speed of a cache."""
    _, runner = trial(spec, num_blocks=40)
    written = {block for plan in runner.plans for row in plan.rows for block in row.seq.block_table}
    written |= {copy.target for plan in runner.plans for copy in plan.copies}
    assert written == set(range(40))


def test_steps_that_fit_neither_context_nor_cache_are_left_out(spec: ModelSpec) -> None:
    small, _ = trial(spec, max_context=256)
    assert small.shape(0, 128) is not None
    assert small.shape(0, 256) is None
    for decodes in (0, BESIDE):
        shape = shape_of(small, decodes, 128)
        assert shape.chunk_start + shape.chunk <= 256
    few, _ = trial(spec, num_blocks=64)
    assert few.shape(4, 0) is not None
    assert few.shape(5, 0) is None


def test_a_decode_step_is_bound_by_reading_weights_and_kv(spec: ModelSpec) -> None:
    limits = StepLimits(
        step_bytes=100e6, kv_token_bytes=23_040, read_bytes_per_s=20e9, flops_per_s=float("inf")
    )
    one = limits.seconds(spec, StepShape(1, 256, 0, 0))
    assert one == pytest.approx((100e6 + 256 * 23_040) / 20e9)
    assert limits.seconds(spec, StepShape(64, 256, 0, 0)) == pytest.approx((100e6 + 64 * 256 * 23_040) / 20e9)


def test_a_prefill_step_is_bound_by_multiplying(spec: ModelSpec) -> None:
    limits = StepLimits(100e6, 23_040, float("inf"), 1e12)
    expected = spec.prefill_flops(512, 768) - spec.lm_head_flops
    assert limits.seconds(spec, StepShape(0, 0, 512, 768)) == pytest.approx(expected / 1e12)
    mixed = limits.seconds(spec, StepShape(8, 256, 512, 768))
    assert mixed == pytest.approx((expected + 8 * spec.decode_flops(256)) / 1e12)


def test_a_chunk_that_samples_nothing_need_not_read_the_lm_head(spec: ModelSpec) -> None:
    limits = StepLimits(100e6, 0, 20e9, float("inf"))
    head = spec.lm_head_flops / (spec.lm_head_flops + spec.matmul_flops_per_token)
    assert limits.seconds(spec, StepShape(0, 0, 16, 0)) == pytest.approx((1 - head) * 100e6 / 20e9)
    assert limits.seconds(spec, StepShape(1, 1, 16, 0)) == pytest.approx(100e6 / 20e9)


def test_a_tiny_model_is_calibrated_for_real_and_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_model_path: Path
) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    measure_each_once(monkeypatch)
    stages: list[str] = []

    def report(what: str, done: float) -> None:
        assert 0.0 <= done <= 1.0
        stages.append(what)

    found = calibrate_machine(1, report)
    assert found.machine == this_machine(1)
    assert load_calibration(found.machine) == found
    assert all(rate > 0 for rate in found.ceilings.peaks.values())
    assert "float32" in found.ceilings.peaks
    result = calibrate_model("tiny", tiny_model_path, found, report)
    assert list(dict.fromkeys(stages)) == list(STAGES)
    assert [cost.chunk for cost in result.costs.prefill] == [16, 32, 64, 128]  # the context is 256
    assert [cost.chunk for cost in result.costs.mixed] == [16, 32, 64, 128]
    assert [cost.decodes for cost in result.costs.decode] == list(BATCHES)
    assert result.choice == choose_steps(result.costs)
    kept = load_calibration(found.machine)
    assert kept == result.calibration
    assert kept.choices == {result.shape_class: result.choice}
    limits = build_engine(EngineConfig(model="tiny", threads=1), tiny_model_path).core.scheduler.limits
    assert (limits.step_tokens, limits.prefill_chunk) == (
        result.choice.step_tokens,
        result.choice.prefill_chunk,
    )
    again = calibrate_machine(1, report)
    assert again.choices == kept.choices, "measuring the ceilings again must keep the choices"


@pytest.mark.parametrize("what", ["prefill", "prefill beside decodes", "decode"])
def test_a_machine_too_slow_to_measure_is_said_and_nothing_is_chosen(
    what: str, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each stage in turn has time for nothing but the smallest step."""
    steps, _ = trial(spec)
    monkeypatch.setattr(calibrate, "STAGES", {**dict.fromkeys(STAGES, 5.0), what: 1e-9})
    limits = StepLimits(100e6, 23_040, 20e9, 1e12)
    with pytest.raises(EngineError, match=rf"only 1 of \d sizes of {what} steps .* are not changed"):
        measure_costs(steps, limits, lambda what, done: None)


def test_a_cache_that_cannot_be_written_is_said_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "file"))
    measure_each_once(monkeypatch)
    with pytest.raises(EngineError, match=r"cannot store the calibration: .*Set RIDGELINE_CACHE to another"):
        calibrate_machine(1, lambda what, done: None)
