"""`ridgeline simulate engine`, as a user calls it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ridgeline.cli.main import main

FLAGS = ("simulate", "engine", "Qwen3-8B", "--requests", "12", "--input", "64", "--output", "64")
RATES = ("--draft-rates", "0.73,0.52,0.35")


def figures(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, dict[str, float]]:
    assert main([*FLAGS, *more, "--json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert any("step times are analytic" in caveat for caveat in answer["caveats"])
    found: dict[str, dict[str, float]] = answer["figures"]
    return found


def test_right_guesses_make_tokens_come_faster(capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(capsys, "--concurrency", "2", *RATES)
    plain, guessing = found["plain"], found["with guesses"]
    assert guessing["tpot_ms.p50"] < 0.8 * plain["tpot_ms.p50"]
    assert guessing["output_tokens_per_s"] > 1.2 * plain["output_tokens_per_s"]
    dear = figures(capsys, "--concurrency", "2", *RATES, "--draft-ms", "2")["with guesses"]
    assert guessing["tpot_ms.p50"] < dear["tpot_ms.p50"]


def test_without_rates_there_is_one_column(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(figures(capsys, "--rate", "20")) == ["plain"]


def test_the_table_has_both_columns_and_their_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLAGS, "--rate", "20", "--kv-tokens", "4096", "--max-running", "8", *RATES]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["plain", "with", "guesses", "ratio"]
    tpot = next(row for row in rows if row.startswith("TPOT p50")).split()
    assert float(tpot[5]) == pytest.approx(float(tpot[4]) / float(tpot[3]), abs=0.02)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ((), "either arrivals"),
        (("--rate", "2", "--concurrency", "2"), "either arrivals"),
        (("--rate", "2", "--replicas", "2"), "--replicas is for `simulate fleet`"),
        (("--rate", "2", "--roll-at-s", "2"), "--roll-at-s is for `simulate fleet`"),
        (("--concurrency", "0"), "at least 1"),
        (("--rate", "2", "--draft-rates", "0.2,0.4"), "acceptance rates fall"),
    ],
)
def test_what_does_not_fit_is_refused(
    capsys: pytest.CaptureFixture[str], more: tuple[str, ...], said: str
) -> None:
    assert main([*FLAGS, *more]) == 2
    assert said in capsys.readouterr().err
