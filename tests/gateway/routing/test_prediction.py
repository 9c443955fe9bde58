"""Neighbours, classifier, calibration, the curve, and the file that keeps them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.gateway.routing.learned.artifact import Artifact, load, save
from ridgeline.gateway.routing.learned.classifier import fit_path, sigmoid
from ridgeline.gateway.routing.learned.curve import choices, curve
from ridgeline.gateway.routing.learned.features import NAMES, Recipe, features_of
from ridgeline.gateway.routing.learned.fitting import calibration_error, threshold_for
from ridgeline.gateway.routing.learned.neighbours import Weighing, nearest
from ridgeline.gateway.routing.learned.predictor import group_folds, random_folds
from ridgeline.options import OptionError
from tests.gateway.routing.stand import artifact, vector_of


@pytest.fixture(scope="module")
def fitted() -> Artifact:
    return artifact()


def unit(rows: np.ndarray) -> np.ndarray:
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def test_the_nearest_are_those_that_sorting_all_of_them_finds() -> None:
    rng = np.random.default_rng(1)
    examples, asked = unit(rng.normal(size=(700, 8))), unit(rng.normal(size=(30, 8)))
    near, similarities = nearest(examples, asked, 9)
    exact = np.argsort(-(asked @ examples.T), axis=1)[:, :9]
    assert np.array_equal(near, exact)
    assert np.all(np.diff(similarities, axis=1) <= 0)
    assert nearest(examples[:4], asked, 9)[0].shape == (30, 4)


def test_an_example_is_not_its_own_neighbour() -> None:
    rng = np.random.default_rng(2)
    examples = unit(rng.normal(size=(600, 8)))
    near, _ = nearest(examples, examples, 5, skip_self=True)
    assert not (near == np.arange(600)[:, None]).any()


def test_neighbours_count_by_nearness_beside_what_is_usual() -> None:
    similarities = np.array([[0.9, 0.9 - 0.2 * math.log(3)]], np.float32)
    outcomes = np.array([[[1.0], [0.0]]], np.float32)
    plain = Weighing(2, prior_weight=0.0).estimate(similarities, outcomes, np.array([0.5]))
    near = Weighing(2, 0.2, prior_weight=0.0).estimate(similarities, outcomes, np.array([0.5]))
    shrunk = Weighing(2, prior_weight=2.0).estimate(similarities, outcomes, np.array([0.0]))
    assert [float(found[0, 0]) for found in (plain, near, shrunk)] == pytest.approx([0.5, 0.75, 0.25])


def test_the_classifier_finds_the_weights_that_made_its_examples() -> None:
    rng = np.random.default_rng(3)
    vectors, features = unit(rng.normal(size=(4000, 6))), rng.normal(size=(4000, 2)).astype(np.float32)
    truth = sigmoid(4 * vectors[:, 0] - 2 * features[:, 1] + 0.5)
    outcomes = (rng.random(4000) < truth)[:, None].astype(np.float32)
    path = fit_path(vectors, features, outcomes, (1.0, 1e6))
    assert np.abs(path[1.0].many(vectors, features)[:, 0] - truth).mean() < 0.02
    # A great penalty leaves nothing but the mean.
    assert np.ptp(path[1e6].many(vectors, features)) < 0.05
    assert path[1e6].many(vectors, features).mean() == pytest.approx(outcomes.mean(), abs=0.01)


def test_the_classifier_is_where_its_slope_is_nothing() -> None:
    rng = np.random.default_rng(4)
    vectors, features = unit(rng.normal(size=(300, 5))), rng.normal(size=(300, 2)).astype(np.float32)
    outcomes = rng.random((300, 2)).astype(np.float32)  # grades
    for penalty, found in fit_path(vectors, features, outcomes, (3.0, 30.0)).items():
        inputs = found.inputs(vectors, features)
        slope = inputs.T @ (sigmoid(inputs @ found.weights) - outcomes)
        slope[:-1] += penalty * found.weights[:-1]
        assert np.abs(slope).max() < 0.1


def test_predictions_of_unseen_texts_are_calibrated(fitted: Artifact) -> None:
    chances, _ = fitted.predictor.many(
        np.stack([vector_of("what is the sum of " + "y" * 20), vector_of("which river is " + "y" * 20)]),
        np.array([features_of("what is the sum of yyyy"), features_of("which river is yyyy")], np.float32),
    )
    assert chances[0, 0] == pytest.approx(0.1, abs=0.12)
    assert chances[1, 0] == pytest.approx(0.9, abs=0.12)
    assert chances[:, 1] == pytest.approx(0.95, abs=0.06)


def test_the_calibration_error_is_the_distance_between_word_and_deed() -> None:
    outcomes = np.tile([1.0, 0.0, 1.0, 1.0], 100).astype(np.float32)
    assert calibration_error(np.full(400, 0.75), outcomes, bins=1) == pytest.approx(0.0)
    assert calibration_error(np.full(400, 0.95), outcomes, bins=1) == pytest.approx(0.2)


# ---- the curve ----


def test_the_curve_runs_from_the_cheapest_model_to_the_strongest_and_the_oracles_is_above_it() -> None:
    rng = np.random.default_rng(5)
    outcomes = (rng.random((500, 2)) < [0.5, 0.8]).astype(np.float32)
    costs = np.tile([1.0, 3.0], (500, 1))
    blind = curve(rng.random((500, 2)), outcomes, costs)
    oracle = curve(outcomes.astype(np.float64), outcomes, costs)
    for found in (blind, oracle):
        assert (found.cost[0], found.gap[0]) == pytest.approx((0.0, 0.0))
        assert (found.cost[-1], found.gap[-1]) == pytest.approx((1.0, 1.0))
    assert oracle.area > 1.0 > blind.area
    assert blind.area == pytest.approx(0.5, abs=0.1)
    assert oracle.cost_at(0.95) < 0.5 < blind.cost_at(0.95)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([2, 3]), st.floats(0.0, 1.2))
def test_a_price_chooses_just_the_point_that_the_curve_has_for_it(seed: int, models: int, gap: float) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.random((60, models))
    outcomes = (rng.random((60, models)) < np.linspace(0.3, 0.9, models)).astype(np.float32)
    outcomes[0, -1], outcomes[0, 0] = 1.0, 0.0
    costs = np.sort(rng.random((60, models)), axis=1) + np.arange(models)
    found = curve(scores, outcomes, costs)
    chosen = choices(scores, costs, found.price_at(gap))
    cost = costs[np.arange(60), chosen].mean()
    span = costs[:, -1].mean() - costs[:, 0].mean()
    assert (cost - costs[:, 0].mean()) / span == pytest.approx(found.cost_at(gap), abs=1e-9)


def test_a_row_that_is_drawn_twice_counts_twice() -> None:
    rng = np.random.default_rng(6)
    scores, outcomes = rng.random((40, 2)), (rng.random((40, 2)) < [0.4, 0.9]).astype(np.float32)
    costs = np.tile([0.0, 1.0], (40, 1))
    weights = rng.integers(0, 3, 40).astype(np.float64)
    rows = np.repeat(np.arange(40), weights.astype(int))
    drawn, repeated = (
        curve(scores, outcomes, costs, weights),
        curve(scores[rows], outcomes[rows], costs[rows]),
    )
    assert drawn.area == pytest.approx(repeated.area, abs=0.02)
    assert drawn.cost_at(0.9) == pytest.approx(repeated.cost_at(0.9), abs=0.05)


def test_the_threshold_keeps_the_quality_that_is_asked_for() -> None:
    rng = np.random.default_rng(7)
    need = rng.random(6000)
    outcomes = np.stack([rng.random(6000) > need, np.ones(6000)], axis=1).astype(np.float32)
    scores = np.stack([1 - need, np.ones(6000)], axis=1)
    costs = np.tile([0.0, 1.0], (6000, 1))
    threshold = threshold_for(scores, outcomes, costs, 0.75, seed=0)
    assert threshold == pytest.approx(0.5, abs=0.04)  # of need above 1/2: three quarters of what is lacking


def test_folds_of_groups_keep_kin_together_and_are_even() -> None:
    groups = [f"subject {n % 13}" for n in range(1300)]
    folds = group_folds(groups, 5, seed=0)
    homes = {group: set(folds[[g == group for g in groups]]) for group in set(groups)}
    assert all(len(home) == 1 for home in homes.values())
    assert np.bincount(folds).max() - np.bincount(folds).min() <= 100
    assert sorted(np.bincount(random_folds(12, 5, 0))) == [2, 2, 2, 3, 3]


# ---- texts ----


def test_features_have_their_names_and_tell_texts_apart() -> None:
    code = "def f(x):\n    return x[0] + 1"
    question = "Which of these is a river?\nA. Rome\nB. Nile\nC. Oslo"
    first, second = (dict(zip(NAMES, features_of(text), strict=True)) for text in (code, question))
    assert first["code_share"] > second["code_share"]
    assert second["log_options"] == pytest.approx(math.log1p(3))
    assert second["is_english"] == 1.0
    assert all(math.isfinite(value) for value in features_of(""))


def test_a_long_text_is_cut_to_its_head_and_tail() -> None:
    text = Recipe(head_chars=10, tail_chars=5).text(("a" * 20 + "b" * 20,))
    assert text == "aaaaaaaaaa … bbbbb"


def test_turns_before_the_last_fill_what_room_there_is() -> None:
    recipe = Recipe(head_chars=20, prior_turns=2)
    assert recipe.text(("lost", "first", "second", "third")) == "first\nsecond\nthird"
    assert recipe.text(("first", "second one", "the third is longer")) == "the third is longer"
    assert recipe.text(()) == ""


# ---- the file ----


def test_an_artifact_reads_back_as_it_was_written(fitted: Artifact, tmp_path: Path) -> None:
    save(replace(fitted, cascade_threshold=0.6, report={"examples": 400}), tmp_path / "route.npz")
    read = load(tmp_path / "route.npz")
    one, other = (found.forecast(vector_of("a river"), "which river is it", 8) for found in (fitted, read))
    assert np.array_equal(one.chances, other.chances)
    assert (read.models, read.threshold, read.recipe) == (fitted.models, fitted.threshold, fitted.recipe)
    assert (read.cascade_threshold, read.report) == (0.6, {"examples": 400})


def test_a_file_that_is_no_artifact_or_was_changed_is_refused(fitted: Artifact, tmp_path: Path) -> None:
    path = tmp_path / "route.npz"
    with pytest.raises(OptionError, match="no such artifact"):
        load(path)
    path.write_bytes(b"PK\x03\x04 nothing")
    with pytest.raises(OptionError, match="not an artifact"):
        load(path)
    save(fitted, path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(OptionError, match="not an artifact"):
        load(path)
    path.write_bytes(whole)
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    arrays["outcomes"] = 1 - arrays["outcomes"]
    np.savez(path, **arrays)
    with pytest.raises(OptionError, match="checksum"):
        load(path)


def test_an_artifact_of_another_version_is_refused(
    fitted: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ridgeline.gateway.routing.learned.artifact.VERSION", 999)
    save(fitted, tmp_path / "route.npz")
    monkeypatch.undo()
    with pytest.raises(OptionError, match="another version"):
        load(tmp_path / "route.npz")
