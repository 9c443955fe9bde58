"""A tiny engine is profiled for real: by torch's profiler, and by py-spy for the native library."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ridgeline.cli.main import main
from ridgeline.engine.config import EngineConfig
from ridgeline.engine.run.core import EngineCore
from ridgeline.engine.schedule.scheduler import Scheduler, SchedulerLimits
from ridgeline.engine.start.build import BuiltEngine, build_engine
from ridgeline.lab.errors import BadInput
from ridgeline.lab.profile.load import PhaseLoad, Shape
from ridgeline.lab.profile.native_samples import HOST
from ridgeline.lab.profile.run import Profile, ProfileRequest, profile_engine
from ridgeline.lab.profile.table import profile_lines
from ridgeline.lab.profile.torch_capture import part_of
from ridgeline.models.weights import packed_cache
from tests.engine.fake_device import FakeDevice
from tests.models.tiny_checkpoints import tiny_model
from tests.models.tiny_families import SIZES, VOCAB

STEPS = 3
SHAPE = Shape(sequences=4, context=40, prompt=50)
LAYERS = SIZES["num_hidden_layers"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model("llama").save_pretrained(folder)
    return folder


def engine(checkpoint: Path, **options: str) -> BuiltEngine:
    config = EngineConfig(model=str(checkpoint), kv_tokens=4096, step_tokens=32, threads=1, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_cache, "source_key", lambda *args: {})
        return build_engine(config, checkpoint)


@pytest.fixture(scope="module")
def torch_engine(checkpoint: Path) -> BuiltEngine:
    return engine(checkpoint, backend="torch")


@pytest.fixture(scope="module")
def torch_profile(torch_engine: BuiltEngine, tmp_path_factory: pytest.TempPathFactory) -> Profile:
    request = ProfileRequest(
        ("prefill", "decode"), STEPS, SHAPE, seconds=0, out=tmp_path_factory.mktemp("out")
    )
    return profile_engine(torch_engine, "tiny", request, lambda text: None)


def test_a_phase_has_its_own_kind_of_step_alone(torch_engine: BuiltEngine) -> None:
    for phase in ("prefill", "decode"):
        load = PhaseLoad(torch_engine.core, VOCAB, phase, SHAPE)
        steps = load.steps(STEPS)
        load.close()
        assert len(steps.records) == STEPS
        for record in steps.records:
            assert (record.decode_batch == 0) == (phase == "prefill")
            assert (record.prefill_tokens == 0) == (phase == "decode")
        if phase == "decode":
            assert steps.samples == STEPS * SHAPE.sequences == steps.tokens
            assert steps.records[0].decode_context >= SHAPE.sequences * SHAPE.context
    assert not torch_engine.core.has_work


def test_decoding_begins_again_before_the_context_ends(torch_engine: BuiltEngine) -> None:
    load = PhaseLoad(torch_engine.core, VOCAB, "decode", Shape(2, 240, 1))
    longest = 0
    for _ in range(4):
        steps = load.steps(10)
        assert len(steps.records) == 10
        longest = max(longest, *(record.decode_context for record in steps.records))
    load.close()
    assert longest <= 2 * SIZES["max_position_embeddings"]


def test_every_operator_of_the_torch_backend_is_timed_and_counted(torch_profile: Profile) -> None:
    for phase in torch_profile.phases:
        rows = {row.name: row for row in phase.operators}
        assert rows["FFN"].calls == rows["qkv projection"].calls == LAYERS * STEPS
        assert rows["LM head"].calls == STEPS
        assert rows["norms"].calls == (2 * LAYERS + 1) * STEPS
        for name in ("qkv projection", "attention", "output projection", "FFN", "LM head"):
            work = rows[name].work
            assert work is not None
            assert work.bytes > 0
            assert rows[name].seconds > 0
        assert rows["norms"].work is None
        assert sum(row.seconds for row in phase.operators) >= phase.step_seconds * 0.99
        assert any(row.name == "aten::mm" for row in phase.counted)


def test_the_trace_is_what_perfetto_reads(torch_profile: Profile) -> None:
    for phase in torch_profile.phases:
        (path,) = phase.files
        with gzip.open(path) as file:
            events = json.load(file)["traceEvents"]
        ranges = [event for event in events if event.get("name") == "ridgeline::qkv" and event["ph"] == "X"]
        assert len(ranges) == LAYERS * STEPS


def test_the_operators_stand_as_before_when_the_profile_is_over(
    torch_engine: BuiltEngine, torch_profile: Profile
) -> None:
    assert torch_engine.core.runner.decoder.ops.NAME == "torch"  # type: ignore[attr-defined]


def test_the_table_has_a_line_for_every_operator(torch_profile: Profile, tmp_path: Path) -> None:
    text = "\n".join(profile_lines(torch_profile))
    for phase in torch_profile.phases:
        for row in phase.operators:
            assert f"  {row.name} " in text
    saved = json.loads(torch_profile.save(tmp_path).read_text())
    assert [phase["phase"] for phase in saved["phases"]] == ["prefill", "decode"]


@pytest.mark.usefixtures("py_spy")
def test_the_native_library_is_profiled_by_samples(checkpoint: Path, tmp_path: Path) -> None:
    built = engine(checkpoint, backend="native", weights="float32")
    request = ProfileRequest(("decode",), STEPS, SHAPE, seconds=1, out=tmp_path)
    (phase,) = profile_engine(built, "tiny", request, lambda text: None).phases
    assert phase.samples > 0
    assert HOST in {row.name for row in phase.operators}
    assert sum(row.seconds for row in phase.operators) == pytest.approx(phase.step_seconds)
    assert phase.watched_step_s is None
    assert json.loads((tmp_path / "decode.speedscope.json").read_text())["profiles"][0]["samples"]
    events = json.loads((tmp_path / "decode.trace.json").read_text())["traceEvents"]
    assert sum(event["name"].startswith("forward pass ") for event in events) == STEPS
    assert phase.files == [str(tmp_path / f"decode.{kind}.json") for kind in ("trace", "speedscope")]


def test_without_py_spy_what_torch_told_still_stands(
    torch_engine: BuiltEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    request = ProfileRequest(("decode",), STEPS, SHAPE, seconds=1)
    profile = profile_engine(torch_engine, "tiny", request, lambda text: None)
    (phase,) = profile.phases
    assert phase.operators
    assert "pip install 'ridgeline[lab]'" in phase.not_sampled
    assert "not sampled: py-spy is not installed" in "\n".join(profile_lines(profile))


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        (Shape(4, 300, 50), "--context"),
        (Shape(4, 40, 300), "--prompt-tokens"),
        (Shape(65, 40, 50), "--max-running"),
        (Shape(60, 100, 50), "--kv-tokens"),
    ],
)
def test_what_the_engine_cannot_hold_is_refused_before_a_step(
    torch_engine: BuiltEngine, shape: Shape, wanted: str
) -> None:
    before = len(torch_engine.core.steps)
    with pytest.raises(BadInput, match=wanted):
        profile_engine(torch_engine, "tiny", ProfileRequest(("prefill", "decode"), STEPS, shape, seconds=0))
    assert len(torch_engine.core.steps) == before


def test_the_number_of_steps_is_bounded() -> None:
    with pytest.raises(BadInput, match="--steps"):
        ProfileRequest(("decode",), 10_000, SHAPE)


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("_decode_attend", "attention"),
        ("_attend_specialized", "attention"),
        ("_gated_linear_kernel", "linears"),
        ("_gemv_kernel", "linears"),
        ("nvjet_tst_128x64_64x7", "linears"),
        ("_add_norm_kernel", "norms, rope, KV write, activation"),
        ("_rope_write_kernel", "norms, rope, KV write, activation"),
        ("_gather_kv", "attention"),
        ("_draw", "sampling"),
        ("Memcpy DtoH (Device -> Pinned)", "copies"),
        ("void at::native::elementwise_kernel", "other kernels"),
    ],
)
def test_kernels_are_parts_of_a_step_by_their_names(kernel: str, part: str) -> None:
    assert part_of(kernel) == part


def test_flags_for_a_running_server_need_its_pid(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--url", "http://127.0.0.1:1"]) == 2
    assert "--pid" in capsys.readouterr().err
    assert main(["profile", "--pid", "0"]) == 2  # all of the machine's processes descend from it
    assert "--pid must be" in capsys.readouterr().err


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_steps_that_overlap_are_watched_whole(phase: str) -> None:
    limits = SchedulerLimits(
        step_tokens=64,
        prefill_chunk=32,
        max_running=16,
        max_waiting=64,
        block_size=4,
        num_blocks=600,
        max_context=400,
    )
    core = EngineCore(Scheduler(limits), FakeDevice(4))
    assert core.scheduler.lookahead == 1
    load = PhaseLoad(core, VOCAB, phase, Shape(3, 20, 40))
    for _ in range(3):
        steps = load.steps(7)
        assert len(steps.records) == 7
        assert all((record.decode_batch == 0) == (phase == "prefill") for record in steps.records)
        if phase == "decode":
            assert steps.samples == steps.tokens == 7 * 3
            assert steps.sampling_steps == 7
    load.close()
    assert not core.has_work
    core.scheduler.check_integrity()


def test_a_profile_needs_nothing_but_what_the_engine_needs() -> None:
    """GPU machines often have torch, triton and numpy alone."""
    absent = ("msgspec", "rich", "scipy", "jinja2", "httptools", "uvloop", "starlette", "uvicorn")
    program = f"import sys; sys.modules.update(dict.fromkeys({absent!r}))\n"
    program += "import ridgeline.lab.profile.run, ridgeline.lab.profile.table, ridgeline.lab.profile.ranges\n"
    program += "import ridgeline.cli.lab.profile, benchmarks.gpu_profile"
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
