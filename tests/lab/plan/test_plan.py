"""A whole plan, on a chip of the table and on this processor, from the command line and in process."""

import json
import re
from pathlib import Path

import pytest

from ridgeline.cli.main import main
from ridgeline.lab.knowledge.entries import find
from ridgeline.lab.plan.compare_chips import ChipPlan, pareto
from ridgeline.lab.plan.demand import read_demand, read_slo
from ridgeline.lab.plan.options import DEFAULT_SLO
from ridgeline.lab.plan.settings import read_config
from ridgeline.lab.prediction import read_prediction
from ridgeline.lab.slo import parse_slo
from ridgeline.lab.traffic.options import TrafficOptions

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def llama(tmp_path: Path) -> str:
    folder = tmp_path / "Llama-3.1-8B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return str(folder)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))


def plan(*arguments: str) -> int:
    return main(["plan", *arguments])


TRAFFIC = ("--input", "512", "--output", "32", "--requests", "200")


def test_a_plan_answers_with_hardware_latency_money_and_reasons(
    llama: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    code = plan(llama, "--hardware", "h200", *TRAFFIC, "--rate", "40", "--users", "100", "--out", str(out))
    text = capsys.readouterr().out
    assert code == 0
    for part in (
        "ANSWER",
        "× h200",
        "time to first token",
        "Roofline of decode",
        "what would move it",
        "KV cache",
        "a user and month",
        "break-even",
        "8. disaggregate? NO",
        "ridgeline serve --config",
        "ridgeline plan verify",
    ):
        assert part in text
    terms = re.findall(r"\[([a-z -]+)\]", " ".join(text.split()))
    assert len(terms) == 7
    assert all(find(term) for term in terms)
    assert read_config(out / "plan.toml").model == llama
    found = read_prediction(out / "prediction.json")
    assert (found.hardware, found.method) == ("h200", "analytic")
    assert found.traffic["facts"]["requests"] == 200
    for interval in found.metrics.values():
        assert interval.low <= interval.mid <= interval.high
    page = (out / "plan.html").read_text()
    assert page.count("<svg") == 2
    assert "http" not in page.replace("http://127.0.0.1", "").replace("http://www.w3.org", "").replace(
        "http-equiv", ""
    )


def test_more_traffic_takes_more_gpus_and_the_rate_one_replica_serves_is_kept_to(
    llama: str, tmp_path: Path
) -> None:
    gpus = {}
    for rate in ("20", "200"):
        out = tmp_path / rate
        assert plan(llama, "--hardware", "h200", *TRAFFIC, "--rate", rate, "--out", str(out)) == 0
        found = read_prediction(out / "prediction.json")
        gpus[rate] = found.traffic["replicas"]
        assert found.metrics["ttft_ms.p90"].mid <= 2000
        assert found.metrics["tpot_ms.p90"].mid <= 100
        assert found.traffic["facts"]["rps"] == pytest.approx(float(rate) / gpus[rate], rel=0.2)
    assert gpus["200"] > gpus["20"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--hardware", "h200", "--slo", "tpot_p90=1ms"), "TPOT ≥"),
        (("--hardware", "h200", "--slo", "ttft_p90=2ms"), "TTFT ≥"),
        (("--hardware", "l4", "--gpus-max", "1", "--engine", "vllm", "--precision", "float32"), "not fit"),
        (("--hardware", "h200", "--slo", "e2e_p50=5ms", "--rate", "1"), "even with minimal traffic"),
        (("--hardware", "h200", "--rate", "5000", "--gpus-max", "4"), "--gpus-max is 4"),
        (("--hardware", "h200", "--rate", "40", "--budget", "$100/month"), "the budget ($100 per month)"),
    ],
)
def test_what_cannot_be_had_is_answered_with_what_binds_and_the_nearest(
    llama: str, arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(llama, *TRAFFIC, *arguments) == 1
    error = capsys.readouterr().err
    assert said in error
    assert "Nearest: " in error


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--hardware", "h20"), "h200"),
        (("--hardware", "h200", "--slo", "latency=3"), "unknown metric"),
        (("--hardware", "h200", "--budget", "cheap"), "--budget"),
        (("--hardware", "h200", "--rate", "0"), "--rate must be more than 0, got 0"),
        (("--hardware", "h200", "--price-in", "1"), "go together"),
        (("--hardware", "h200", "--precision", "fp9"), "unknown precision"),
        (("--hardware", "h200", "--input", "200000"), "--max-context 131072"),
        (("--hardware", "h200", "--set", "step_tokns=5"), "step_tokens"),
        (("--hardware", "l4", "--budget", "$5/month", "--rate", "0.1"), "--gpu-price"),
    ],
)
def test_wrong_questions_are_refused_in_one_line_that_names_the_flag(
    llama: str, arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(llama, *arguments) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_requests_longer_than_the_cache_are_named_and_not_simulated(
    llama: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = ("--input", "uniform:100,60000", "--output", "32", "--requests", "200")
    code = plan(llama, "--hardware", "l4", "--gpus-max", "1", "--slo", "ttft_p90=900s", *lengths)
    assert code == 1
    assert "--max-context" in capsys.readouterr().err


def test_a_cache_format_that_our_gpu_engine_has_not_is_planned_for_another(
    llama: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    few = ("--rate", "2", "--kv-precision", "fp8", "--out", str(out))
    assert plan(llama, "--hardware", "a100", *TRAFFIC, *few) == 0
    text = capsys.readouterr().out
    assert "keys and values in fp8 need a GPU that multiplies FP8" in text.replace("\n   ", " ")
    assert "--kv-cache-dtype fp8" in text
    assert not (out / "plan.toml").exists()


def test_what_no_measurement_was_like_is_among_the_caveats(llama: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert plan(llama, "--hardware", "l4", *TRAFFIC, "--rate", "0.2", "--out", str(out)) == 0
    assert any(
        "bytes/s of memory (measured were" in words
        for words in read_prediction(out / "prediction.json").caveats
    )


def test_the_examples_of_the_page_work_by_the_models_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan"
    arguments = ("--hardware", "h200", "--rate", "2", "--requests", "200", "--out", str(out))
    assert plan("Qwen3-8B", *arguments) == 0
    assert "Qwen3-8B: 8.19B parameters, on NVIDIA H200" in capsys.readouterr().out
    assert read_prediction(out / "prediction.json").model == "Qwen/Qwen3-8B"
    assert 'model = "hf:Qwen/Qwen3-8B"' in (out / "plan.toml").read_text()


def test_help_states_the_defaults_that_a_plan_uses(
    llama: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        plan("--help")
    told = " ".join(capsys.readouterr().out.split())
    demand = read_demand(TrafficOptions())
    assert f"cdf:FILE; default: {demand.options.input}" in told
    assert f"answer tokens, as --input; default: {demand.options.output}" in told
    assert f"default: {DEFAULT_SLO}" in told
    assert str(read_slo(None)) == str(parse_slo(DEFAULT_SLO))


def test_several_chips_are_compared_and_those_that_none_beats_are_marked(
    llama: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    asked = ("--gpu", "h100,h200,l4", *TRAFFIC, "--rate", "4", "--slo", "tpot_p90=20ms", "--out", str(out))
    assert plan(llama, *asked, "--gpus-max", "1") == 0
    text = capsys.readouterr().out
    assert re.search(r"^ *h100 .* Pareto *$", text, re.M)
    assert "l4: cannot. " in text  # 16 GB of weights take longer than that to read
    assert (out / "h100" / "prediction.json").is_file()
    assert (out / "h200" / "plan.html").is_file()
    assert not (out / "l4").exists()
    assert plan(llama, *asked, "--gpu-price", "2") == 2
    assert "--gpu-price applies to one chip" in capsys.readouterr().err


def test_a_chip_that_another_beats_in_all_is_not_on_the_front() -> None:
    class Answer(ChipPlan):
        @property
        def merits(self) -> tuple[float, ...] | None:
            return MERITS[self.chip]

    MERITS = {"a": (1.0, 9.0), "b": (2.0, 5.0), "c": (2.0, 6.0), "d": None}
    assert pareto([Answer(name, None) for name in MERITS]) == {"a", "b"}


def test_a_model_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("no-such-model", "--hardware", "h200") == 1
    assert "no-such-model" in capsys.readouterr().err
