"""Fitting and evaluating: on made-up data whose truth is known, by the command line, and on real outcomes."""

from __future__ import annotations

import base64
import csv
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from ridgeline.cli.main import main
from ridgeline.gateway.routing.learned.artifact import load
from ridgeline.gateway.routing.learned.evaluation import Evaluation, evaluate
from ridgeline.gateway.routing.learned.examples import Costing, read_examples
from ridgeline.gateway.routing.learned.fitting import Prepared
from ridgeline.options import OptionError
from tests.gateway.routing.stand import vector_of

ROUTING = Path(__file__).resolve().parents[4] / "shared" / "data" / "routing"
ROWS = 600


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model knows rivers and no sums; a text's words show its topic."""
    rng = np.random.default_rng(3)
    path = tmp_path_factory.mktemp("examples") / "made.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["prompt", "small", "large", "group"])
        for _ in range(ROWS):
            is_sum = bool(rng.integers(2))
            text = ("sum " if is_sum else "river ") * int(rng.integers(1, 4)) + "x" * int(rng.integers(30))
            writer.writerow(
                [text, rng.random() < (0.2 if is_sum else 0.9), rng.random() < 0.92, len(text) % 7]
            )
    return path


@pytest.fixture(scope="module")
def prepared(table: Path) -> Prepared:
    examples = read_examples([table], ("small", "large"), Costing({}, {}))
    return Prepared.of(examples, np.stack([vector_of(turns[-1]) for turns in examples.turns]))


@pytest.fixture(scope="module")
def judged(prepared: Prepared) -> Evaluation:
    return evaluate(prepared, split="part", draws=100)


def test_a_router_that_can_see_the_difference_saves_what_there_is_to_save(judged: Evaluation) -> None:
    ways = {way.name: way for way in judged.ways}
    assert (judged.rows_fitted, judged.rows_held) == (360, 240)
    # Half of the texts are rivers, on which the strong model gains next to nothing. The last bits of the fit
    # depend on the BLAS, and the threshold on one of 240 rows: the bounds leave room for several rows.
    assert 0.25 < ways["router"].saved.value < 0.75
    assert ways["random"].saved.value == pytest.approx(0.05)
    assert ways["oracle"].saved.value > ways["router"].saved.value
    assert ways["router"].saved.low <= ways["router"].saved.value <= ways["router"].saved.high
    assert judged.ahead["random"].low > 0.1
    assert abs(judged.at_threshold["gap_kept"].value - 0.95) < 0.25
    assert max(judged.calibration_error) < 0.25


def test_an_evaluation_is_the_same_when_run_again(prepared: Prepared, judged: Evaluation) -> None:
    assert evaluate(prepared, split="part", draws=100) == judged
    assert evaluate(prepared, split="part", draws=100, seed=1) != judged


def test_what_cannot_be_told_apart_saves_no_more_than_chance(prepared: Prepared) -> None:
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(ROWS, 4)).astype(np.float32)
    noise /= np.linalg.norm(noise, axis=1, keepdims=True)
    blind = Prepared(prepared.examples, noise, rng.normal(size=prepared.features.shape).astype(np.float32))
    found = evaluate(blind, split="part", draws=100)
    assert found.ahead["random"].low <= 0.0
    assert found.ways[0].area.low < 0.5


def test_models_between_which_there_is_no_gap_are_not_judged(prepared: Prepared) -> None:
    examples = prepared.examples
    turned = replace(examples, outcomes=examples.outcomes[:, ::-1].copy())
    with pytest.raises(OptionError, match="large is not better than small"):
        evaluate(replace(prepared, examples=turned))


@pytest.mark.parametrize("split", ["folds", "groups"])
def test_every_row_is_held_back_once(prepared: Prepared, split: str) -> None:
    found = evaluate(prepared.part(np.arange(300)), split=split, draws=20)  # type: ignore[arg-type]
    assert (found.rows_held, len(found.baseline_k)) == (300, 5)
    assert 230 <= found.rows_fitted <= 250


# ---- the command line ----


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        texts = json.loads(self.rfile.read(int(self.headers["content-length"])))["input"]
        rows = [base64.b64encode(vector_of(text).tobytes()).decode() for text in texts]
        body = json.dumps({"data": [{"index": n, "embedding": row} for n, row in enumerate(rows)]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def test_fit_writes_an_artifact_that_a_route_can_name(
    table: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "route.npz"
    command = ["router", "fit", str(table), "--models", "small,large", "--names", "a,b", "--quality", "90"]
    command += ["--embeddings-url", url, "--out", str(out), "--cost", "small=0.001", "--cost", "large=0.01"]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert f"{ROWS} examples; right: a " in said
    artifact = load(out)
    artifact.check(("a", "b"), "all-minilm-l6-v2", "here")
    assert artifact.cost_span == pytest.approx(0.009)
    assert artifact.report["gap_kept"] == pytest.approx(0.9, abs=0.05)
    forecasts = [artifact.forecast(vector_of(text), text, 4) for text in ("sum sum", "river river")]
    assert [found.choice(("a", "b"))[0] for found in forecasts] == ["b", "a"]


def test_fit_finds_the_confidence_below_which_a_cascade_asks_again(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(5)
    path = tmp_path / "sure.csv"
    rows = ["prompt,small,large,small_confidence"]
    for number in range(400):
        sure = rng.random()
        rows.append(f"river {number},{rng.random() < sure},True,{sure:.3f}")
    path.write_text("\n".join(rows))
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    command = ["router", "fit", str(path), "--models", "small,large", "--quality", "75"]
    assert main([*command, "--embeddings-url", url, "--out", str(tmp_path / "route.npz")]) == 0
    # Three quarters of what the small model gets wrong lie in the less sure half of its answers.
    assert load(tmp_path / "route.npz").cascade_threshold == pytest.approx(0.5, abs=0.08)
    assert "cascade: answers below a confidence of 0." in capsys.readouterr().out


def test_evaluate_prints_a_table_and_writes_its_files(
    table: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    command = ["router", "evaluate", str(table), "--models", "small,large", "--embeddings-url", url]
    assert main([*command, "--draws", "50", "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    for words in (
        "at 95% of the gap between small and large",
        "router saves",
        "points more than random",
        "oracle",
    ):
        assert words in said
    written = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert written["rows_held"] == 240
    rows = list(csv.DictReader((tmp_path / "out" / "curve.csv").open()))
    assert (len(rows), float(rows[0]["router"]), float(rows[-1]["router"])) == (21, 0.0, 1.0)
    assert "<svg" in (tmp_path / "out" / "evaluation.html").read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--models", "small"], "two models or more"),
        (["--models", "small,large", "--quality", "120"], "--quality must be between 0 and 100"),
        (["--models", "small,large", "--price", "small=3"], "must be MODEL=IN/OUT"),
        (["--models", "small,large", "--cost", "small=x"], "not a number of US dollars"),
        (["--models", "small,large", "--max-tokens", "2"], "--max-tokens must be 8 to 8192"),
        (["--models", "small,large", "--embeddings-url", "ftp://x"], "must begin with http"),
        (["--models", "small,large", "--out", "/nowhere/at/all.npz"], "does not exist"),
    ],
)
def test_wrong_flags_are_one_line_that_says_so(
    table: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(["router", "fit", str(table), *flags]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_a_server_that_is_not_there_is_one_line_too(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    flags = ["--models", "small,large", "--embeddings-url", "http://127.0.0.1:9"]
    assert main(["router", "evaluate", str(table), *flags]) == 1
    assert "cannot be reached" in capsys.readouterr().err


# ---- real outcomes ----


@pytest.mark.skipif(not ROUTING.is_dir(), reason="../shared/data/routing is not here")
def test_real_outcomes_are_read_whole() -> None:
    models = ("mistralai/Mixtral-8x7B-Instruct-v0.1", "gpt-4-1106-preview")
    found = read_examples([ROUTING / "gsm8k_responses.csv"], models, Costing({}, {}))
    assert len(found) == 1319
    assert found.outcomes.mean(axis=0) == pytest.approx([0.6384, 0.8567], abs=1e-4)


def test_evaluate_scores_an_existing_artifact_on_a_file(
    table: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    lines = table.read_text().splitlines(keepends=True)
    first, rest = tmp_path / "first.csv", tmp_path / "rest.csv"
    first.write_text("".join(lines[:361]))
    rest.write_text("".join([lines[0], *lines[361:]]))
    route = str(tmp_path / "route.npz")
    fit = ["router", "fit", str(first), "--models", "small,large", "--names", "mini,maxi", "--out", route]
    assert main([*fit, "--embeddings-url", url]) == 0
    capsys.readouterr()
    asked = ["router", "evaluate", str(rest), "--artifact", route, "--models", "small,large", "--draws", "50"]
    assert main(asked) == 0  # without an embedding server: it has the vectors of its words
    told = capsys.readouterr().out
    assert "an existing artifact; nothing was fitted" in told
    assert "360 rows to fit, 240 to judge" in told
    assert "with the fitted threshold: keeps" in told
    assert main(["router", "evaluate", str(rest)]) == 2
    assert "or give --artifact" in capsys.readouterr().err
    assert main([*asked[:5], "--models", "a,b,c"]) == 2
    assert "chooses between mini, maxi" in capsys.readouterr().err
