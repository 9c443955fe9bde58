"""Examples from files, their costs, and vectors that are kept between runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from ridgeline.gateway.routing.embedder import Vectors
from ridgeline.gateway.routing.learned.examples import Costing, Price, read_examples
from ridgeline.gateway.routing.learned.vectors import Fetch, store_path, vectors_of
from ridgeline.options import OptionError
from tests.gateway.routing.stand import vector_of

CALLS = Costing({}, {})
MODELS = ("small", "large")


def csv_file(folder: Path, head: str = "prompt,small,large", rows: Sequence[str] = ()) -> Path:
    path = folder / "sums.csv"
    path.write_text("\n".join([head, *(rows or [f'"text {n}",{n % 2 == 0},True' for n in range(60)])]) + "\n")
    return path


def test_csv_and_json_lines_say_the_same(tmp_path: Path) -> None:
    table = read_examples([csv_file(tmp_path)], MODELS, CALLS)
    lines = tmp_path / "sums.jsonl"
    lines.write_text(
        "\n".join(
            json.dumps({"prompt": f"text {n}", "outcomes": {"small": n % 2 == 0, "large": 1.0}})
            for n in range(60)
        )
    )
    other = read_examples([lines], MODELS, CALLS)
    assert table.turns == other.turns
    assert np.array_equal(table.outcomes, other.outcomes)
    assert table.groups == other.groups == ["sums"] * 60
    assert table.outcomes[:3].tolist() == [[1.0, 1.0], [0.0, 1.0], [1.0, 1.0]]


def test_a_conversation_gives_its_users_turns(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "two"},
    ]
    path = tmp_path / "talks.jsonl"
    line = json.dumps({"messages": messages, "outcomes": {"small": 0, "large": 1}, "group": "talk"})
    path.write_text("\n".join([line] * 50))
    found = read_examples([path], MODELS, CALLS)
    assert (found.turns[0], found.groups[0]) == (("one", "two"), "talk")


def test_without_costs_a_call_of_the_strongest_model_is_one(tmp_path: Path) -> None:
    found = read_examples([csv_file(tmp_path)], MODELS, CALLS)
    assert found.costs[0].tolist() == [0.0, 1.0]
    assert [cost.request for cost in found.by_model] == [0.0, 1.0]


def test_prices_count_prompts_by_length_and_answers_where_they_are_known(tmp_path: Path) -> None:
    rows = [f"{'x' * 40},True,True,{'y' * (40 if n % 2 else 120)}," + "z" * 400 for n in range(60)]
    path = csv_file(tmp_path, "prompt,small,large,small_response,large_response", rows)
    prices = {"small": Price(1.0, 2.0), "large": Price(10.0, 30.0)}
    found = read_examples([path], MODELS, Costing({}, prices))
    assert found.costs[0] == pytest.approx([(10 * 1 + 30 * 2) / 1e6, (10 * 10 + 100 * 30) / 1e6])
    assert found.costs[1][0] == pytest.approx((10 * 1 + 10 * 2) / 1e6)
    assert found.by_model[0].request == pytest.approx(20 * 2 / 1e6)
    assert found.by_model[1].token == pytest.approx(10 / 1e6)
    scaled = found.scaled_costs
    assert (scaled[:, 1] - scaled[:, 0]).mean() == pytest.approx(1.0)


def test_only_the_newest_examples_are_used_when_so_asked(tmp_path: Path) -> None:
    found = read_examples([csv_file(tmp_path)], MODELS, CALLS, newest=50)
    assert (len(found), found.turns[0]) == (50, ("text 10",))


@pytest.mark.parametrize(
    ("head", "rows", "models", "message"),
    [
        ("question,small,large", (), MODELS, "no column 'prompt'"),
        ("prompt,small,large", (), ("small", "huge"), "no column 'huge'"),
        ("prompt,small,large", (), ("small",), "two models or more"),
        ("prompt,small,large", ["a,maybe,True"] * 60, MODELS, "row 2: small: an outcome must be"),
        ("prompt,small,large", ["a,1.5,True"] * 60, MODELS, "from 0 to 1, not '1.5'"),
        ("prompt,small,large", ["a,True,True"] * 20, MODELS, "20 examples are too few"),
        (
            "prompt,small,large,small_cost,large_cost",
            ["a,1,1,2,1"] * 60,
            MODELS,
            "list the cheapest model first",
        ),
        ("prompt,small,large,small_cost,large_cost", ["a,1,1,x,1"] * 60, MODELS, "a cost must be a number"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_its_place(
    tmp_path: Path, head: str, rows: list[str], models: tuple[str, ...], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        read_examples([csv_file(tmp_path, head, rows)], models, CALLS)


def test_costs_are_given_for_every_model_or_for_none(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="large has no cost"):
        read_examples([csv_file(tmp_path)], MODELS, Costing({"small": 0.1}, {}))
    with pytest.raises(OptionError, match="'other' is not one of"):
        read_examples([csv_file(tmp_path)], MODELS, Costing({"other": 0.1}, {}))


def test_lines_that_are_no_examples_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for line, message in (
        ("{", "line 1: not JSON"),
        ("[]", "must be an object"),
        ('{"outcomes": {}}', "no user text"),
    ):
        path.write_text(line)
        with pytest.raises(OptionError, match=message):
            read_examples([path], MODELS, CALLS)


# ---- vectors ----


class Server:
    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def start(self) -> Fetch:
        def fetch(texts: Sequence[str]) -> Vectors:
            self.asked.append(list(texts))
            return np.stack([vector_of(text) for text in texts])

        return fetch


def test_vectors_are_asked_for_once_and_kept(tmp_path: Path) -> None:
    store, server = store_path(tmp_path, "hf:org/model", 64), Server()
    quiet = lambda done, total: None  # noqa: E731
    texts = [f"sum {n}" for n in range(100)]
    first = vectors_of(texts + texts[:5], store, server.start, quiet)
    assert [len(batch) for batch in server.asked] == [64, 36]
    again = vectors_of([*texts[::-1], "river"], store, server.start, quiet)
    assert server.asked[2:] == [["river"]]
    assert np.array_equal(first[:100], again[:100][::-1])
    assert np.allclose(again[100], vector_of("river"))


def test_a_store_whose_last_record_is_torn_is_used_up_to_there(tmp_path: Path) -> None:
    store, server = tmp_path / "vectors.bin", Server()
    quiet = lambda done, total: None  # noqa: E731
    vectors_of(["one", "two"], store, server.start, quiet)
    store.write_bytes(store.read_bytes()[:-3])
    found = vectors_of(["one", "two", "three"], store, server.start, quiet)
    assert server.asked[1:] == [["two", "three"]]
    assert np.allclose(found[1], vector_of("two"))
    vectors_of(["one", "two", "three"], store, server.start, quiet)
    assert len(server.asked) == 2
