"""What decides in the comparison with llama.cpp: verdicts, flags, the HTTP client, the random model."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from cpu_vs_llamacpp import compared_models, published_models
from rich.console import Console
from versus.bench import Bench, committed_flags
from versus.comparison import Figure, Row
from versus.engine_rates import step_weight_bytes
from versus.engine_rows import ComparedModel, engine_rows
from versus.http_load import LoadFailed, run_round
from versus.peer_llamacpp import FORMATS, LlamaCpp, Variant, every_cache, find, tune
from versus.quantized_files import kind_of
from versus.quiet_machine import Sample, measured
from versus.random_gguf import Shape, write_random_gguf

from ridgeline.models.files.gguf import GgufFile
from ridgeline.models.quantized.blocks import float_rows
from ridgeline.models.quantized.config import read_scheme
from ridgeline.models.quantized.packings import StoredMatrix
from ridgeline.models.spec.ffn import Experts
from ridgeline.models.spec.read_spec import read_spec
from ridgeline.models.text.tokenizer import Tokenizer
from ridgeline.models.weights.dequant import dequantize
from tests.patience import PATIENCE_S


def figure(*values: float, limit: float | None = None, disturbed: int = 0) -> Figure:
    """Five samples at least: the last value again and again."""
    padded = [*values, *[values[-1]] * (5 - len(values))]
    return Figure([Sample(value, 0.5 if i < disturbed else 0.0, 1) for i, value in enumerate(padded)], limit)


def test_the_peers_figure_is_its_best_variants_median_not_its_luckiest_sample() -> None:
    theirs = {"lucky": figure(500, 500, 90), "best": figure(100)}
    row = Row("k", "t", "tok/s", 2.0, ours=figure(220), theirs=theirs)
    assert row.best_variant == "best"
    assert row.ratio == pytest.approx(2.2)
    assert row.verdict == "pass"


def test_where_less_is_better_the_bar_is_a_most() -> None:
    theirs = {"a": figure(1.0), "b": figure(2.0)}
    row = Row("k", "t", "s", 0.25, higher_wins=False, ours=figure(0.3), theirs=theirs)
    assert row.best_variant == "a"
    assert row.verdict == "miss: 0.30×"


def test_every_condition_of_a_bar_must_hold() -> None:
    theirs = {"a": figure(1.2)}
    slow = Row("k", "t", "s", 1.5, higher_wins=False, at_most=1.5, ours=figure(1.7), theirs=theirs)
    assert slow.verdict == "miss: 1.7 s"
    ours = figure(7, limit=10)
    far = Row("k", "t", "tok/s", 1.0, least_percent_of_limit=80, ours=ours, theirs={"a": figure(6)})
    assert far.verdict == "miss: 70 % of the limit"


def test_a_busy_machine_gives_no_verdict_however_large_the_ratio() -> None:
    row = Row("k", "t", "tok/s", 2.0, ours=figure(90), theirs={"a": figure(10, disturbed=3)})
    assert row.verdict == "no verdict: 3 of 5 of its samples disturbed"


def test_too_few_samples_give_no_verdict() -> None:
    ours = Figure([Sample(90.0, 0.0, 1)])
    row = Row("k", "t", "tok/s", 2.0, ours=ours, theirs={"a": figure(10)})
    assert row.verdict == "no verdict: 1 of our samples, 5 needed"


def test_the_search_ends_with_the_best_format_and_the_extra_flag_that_helps() -> None:
    def rate(variant: Variant) -> float:
        speed = {"Q4_0": 100.0, "Q4_1": 50.0, "Q8_0": 80.0}[variant.format]
        return speed * (1.2 if "bf16" in variant.flags else 1.0) * (1.3 if "-kvu" in variant.flags else 1.0)

    tuned = tune(rate, every_cache(FORMATS), (("-kvu",), ("--no-repack",)))
    best = tuned.finalists[0]
    assert best.format == "Q4_0"
    assert "bf16" in best.flags
    assert best.flags[-1] == "-kvu"
    assert tuned.tried[str(best)] == pytest.approx(156)


def test_two_variants_within_the_noise_both_reach_the_real_measurement() -> None:
    speeds = {"Q4_0": 100.0, "Q8_0": 97.0, "Q4_1": 60.0}
    tuned = tune(lambda variant: speeds[variant.format], [Variant(name, ()) for name in speeds])
    assert [one.format for one in tuned.finalists] == ["Q4_0", "Q8_0"]


def test_the_search_for_the_least_keeps_the_least() -> None:
    seconds = {"Q4_0": 2.0, "Q8_0": 1.0, "Q4_1": 5.0}
    tuned = tune(lambda v: seconds[v.format], [Variant(name, ()) for name in seconds], higher_wins=False)
    assert [one.format for one in tuned.finalists] == ["Q8_0"]
    assert tuned.tried["Q4_0"] == 2.0


def test_a_measurement_that_nobody_disturbed_is_taken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = iter([0.5, 0.3, 0.01, 0.0])
    monkeypatch.setattr("versus.quiet_machine.wait_for_quiet", lambda _: True)
    monkeypatch.setattr("versus.quiet_machine.Foreign.share", lambda _: next(shares))
    values = iter([1.0, 2.0, 3.0, 4.0])
    assert measured(lambda: next(values), patience_s=0, attempts=4) == Sample(3.0, 0.01, 3)


def test_of_disturbed_measurements_the_least_disturbed_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = iter([0.5, 0.3, 0.4])
    monkeypatch.setattr("versus.quiet_machine.wait_for_quiet", lambda _: True)
    monkeypatch.setattr("versus.quiet_machine.Foreign.share", lambda _: next(shares))
    values = iter([1.0, 2.0, 3.0])
    sample = measured(lambda: next(values), patience_s=0, attempts=3)
    assert sample == Sample(2.0, 0.3, 3)
    assert sample.is_disturbed


def test_without_a_llama_cpp_the_way_to_get_one_is_said(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"llama-bench.*missing(?s:.*)cmake --build"):
        find(tmp_path, 2)


def test_the_rows_of_qwen_coder_have_the_bars_of_the_memory_bound_model() -> None:
    (model,) = [one for one in compared_models({}) if one.name == "qwen-coder"]
    assert {row.key: row.bar for row in model.rows()} == {
        "qwen-coder.decode.1": 1.0,
        "qwen-coder.decode.8": 2.2,
        "qwen-coder.prefill": 2.5,
    }
    variants = model.variants(("Q4_K_M",))
    assert {variant.format for variant in variants} == {"Q4_K_M"}
    assert len(variants) == 3  # cache types only


def test_a_model_is_fetched_only_where_one_of_its_rows_is_wanted(tmp_path: Path) -> None:
    def fetch() -> dict[str, Path]:
        raise AssertionError("fetched")

    def bench(only: str) -> Bench:
        return Bench(
            LlamaCpp(tmp_path, 1), {}, 1, 0.0, 1, False, lambda key: key.startswith(only), Console(quiet=True)
        )

    model = ComparedModel("large", "a large model", fetch, {1: 1.0}, prefill_bar=1.0)
    assert engine_rows(bench("small"), model) == []
    with pytest.raises(AssertionError, match="fetched"):
        engine_rows(bench("large.prefill"), model)


def test_the_random_model_is_one_that_the_engine_reads(tmp_path: Path) -> None:
    shape = Shape("tiny", layers=2, hidden=64, heads=4, kv_heads=2, ffn=96, vocab=320, context=128)
    path = write_random_gguf(shape, tmp_path / "tiny.gguf")
    spec = read_spec(path)
    assert (spec.num_layers, spec.hidden_size, spec.num_kv_heads, spec.ffn_size) == (2, 64, 2, 96)
    assert spec.weight_format == "gguf:Q4_0"
    assert not spec.tied_embeddings
    assert len(Tokenizer.load(path).encode("any text")) > 1
    file = GgufFile(path)
    weights = dequantize(file.raw("blk.1.ffn_up.weight"), "Q4_0")
    assert weights.size == 96 * 64
    assert weights.std() == pytest.approx(0.02, rel=0.1)


def test_a_random_model_with_experts_is_read_and_only_chosen_experts_count(tmp_path: Path) -> None:
    shape = Shape(
        "tiny", layers=2, hidden=64, heads=4, kv_heads=2, ffn=32, vocab=320, context=128,
        architecture="granitemoe", experts=4, experts_per_token=2, tied=True,
    )  # fmt: skip
    path = write_random_gguf(shape, tmp_path / "tiny.gguf")
    spec, tensors = read_spec(path), GgufFile(path).tensors
    ffn = spec.layers[1].ffn
    assert isinstance(ffn, Experts)
    assert (ffn.num, ffn.per_token, ffn.size) == (4, 2, 32)
    experts = 2 * 3 * 4 * 32 * 64 * 18 // 32
    whole = sum(tensor.nbytes for tensor in tensors.values())
    assert step_weight_bytes(path, spec) == whole - experts // 2
    assert step_weight_bytes(path, spec, streams=2) == whole - experts // 4


# ---- the client, against a server that answers as told ----


@contextmanager
def answering(status: int, events: list[str]) -> Iterator[int]:
    """A server on its own thread that gives every request this answer, in chunks; its port."""
    started: list[int] = []
    ready, stop = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        writer.write(f"HTTP/1.1 {status} x\r\ntransfer-encoding: chunked\r\n\r\n".encode())
        for event in events:
            data = event.encode()
            writer.write(b"%x\r\n%s\r\n" % (len(data), data))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    async def serve() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        started.append(server.sockets[0].getsockname()[1])
        ready.set()
        await stop.wait()
        server.close()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert ready.wait(PATIENCE_S)
    try:
        yield started[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(PATIENCE_S)
        loop.close()


def event(content: str) -> str:
    return f'data: {{"choices":[{{"delta":{{"content":{json.dumps(content)}}}}}]}}\n\n'


USAGE = 'data: {"choices":[],"usage":{"completion_tokens":2,"prompt_tokens":3}}\n\n'


def test_tokens_are_those_of_the_servers_usage_and_events_may_be_cut_anywhere() -> None:
    whole = event("") + event("a") + event("b") + USAGE + "data: [DONE]\n\n"
    pieces = [whole[i : i + 7] for i in range(0, len(whole), 7)]
    with answering(200, pieces) as port:
        result = run_round(port, [[{"role": "user", "content": "x"}]] * 3, max_tokens=2)
    assert result.tokens == 6
    assert len(result.ttft_s) == 3


def test_an_answer_shorter_than_asked_for_is_an_error() -> None:
    with answering(200, [event("a"), USAGE]) as port, pytest.raises(LoadFailed, match="2 tokens of 5"):
        run_round(port, [[{"role": "user", "content": "x"}]], max_tokens=5)


def test_a_refused_request_is_an_error_with_the_servers_words() -> None:
    with answering(400, ["no such thing"]) as port, pytest.raises(LoadFailed, match=r"400.*no such thing"):
        run_round(port, [[{"role": "user", "content": "x"}]], max_tokens=5)


def test_the_rows_of_published_checkpoints_have_flags_for_the_peer() -> None:
    models = published_models(LlamaCpp(Path(), 1), Path())
    keys = {row.key for model in models for row in model.rows()}
    assert len(keys) == 18
    for isa in ("avx512", "avx2"):
        assert keys <= committed_flags(isa).keys()


@pytest.mark.parametrize("name", ["gptq", "awq", "fp8"])
def test_a_made_checkpoint_is_read_as_it_was_rounded(name: str) -> None:
    weights = np.random.default_rng(0).normal(size=(48, 256)).astype(np.float32)
    kind = kind_of(name, 64)
    scheme = read_scheme(kind.settings)
    assert scheme is not None
    (format,) = scheme.formats()
    made = float_rows(StoredMatrix(format, kind.stored(weights), name), np.arange(48))
    assert np.abs(made - weights).max() < (0.4 if name != "fp8" else 0.2)
