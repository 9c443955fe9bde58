"""Arrivals and lengths from distributions, and that a seed's streams do not shift each other."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.lab.errors import BadInput
from ridgeline.lab.traffic.arrivals import Arrivals, parse_arrivals
from ridgeline.lab.traffic.describe import describe
from ridgeline.lab.traffic.lengths import Fixed, parse_lengths, parse_seconds, read_cdf, whole_tokens
from ridgeline.lab.traffic.seeds import stream
from ridgeline.lab.traffic.synthetic import conversations, synthetic

COUNT = 20_000
FEW = settings(max_examples=25, deadline=None)


@FEW
@given(rate=st.floats(0.01, 1e4), cv=st.floats(0.05, 3.0), seed=st.integers(0, 2**63))
def test_arrivals_have_the_rate_and_the_burstiness_asked_for(rate: float, cv: float, seed: int) -> None:
    moments = Arrivals(cv).moments(COUNT, rate, stream(seed, "arrivals"))
    gaps = np.diff(moments)
    # Six standard errors of each: mean cv/√n; CV of gamma gaps about cv·√(1+2cv²)/√(2n).
    assert gaps.mean() * rate == pytest.approx(1, abs=6 * cv / COUNT**0.5)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=6 * ((1 + 2 * cv**2) / COUNT) ** 0.5)
    assert moments[0] == 0
    assert (gaps >= 0).all()


def test_poisson_gaps_are_exponential() -> None:
    gaps = np.diff(parse_arrivals("poisson").moments(COUNT, 4.0, stream(1, "arrivals")))
    for share in (0.1, 0.5, 0.9, 0.99):
        assert np.quantile(gaps, share) == pytest.approx(-np.log(1 - share) / 4, rel=0.1)


def test_constant_arrivals_are_even_and_closed_ones_have_no_moment() -> None:
    random = stream(0, "arrivals")
    assert parse_arrivals("constant").moments(5, 2.0, random).tolist() == [0, 0.5, 1, 1.5, 2]
    assert parse_arrivals("closed").moments(3, 2.0, random).tolist() == [0, 0, 0]


@FEW
@given(start=st.floats(0.1, 100), end=st.floats(0.1, 100))
def test_a_ramp_goes_evenly_from_one_rate_to_the_other(start: float, end: float) -> None:
    count = 4000
    moments = parse_arrivals("constant").moments(count, start, stream(0, "arrivals"), end)
    length = 2 * count / (start + end)
    assert moments[-1] == pytest.approx(length, abs=2 / end)
    tenth = length / 10
    for part, share in ((0, 0.05), (9, 0.95)):
        came = ((moments >= part * tenth) & (moments < (part + 1) * tenth)).sum() / tenth
        assert came == pytest.approx(start + (end - start) * share, rel=0.02, abs=2 / tenth)


@pytest.mark.parametrize(
    ("text", "mean", "p99"),
    [
        ("2000", 2000, 2000),
        ("uniform:100,300", 200, 298),
        ("normal:500,50", 500, 616),
        ("lognormal:200,1.0", 200, 1242),
    ],
)
def test_lengths_have_the_mean_and_tail_of_their_distribution(text: str, mean: float, p99: float) -> None:
    drawn = whole_tokens(parse_lengths(text).draw(200_000, stream(7, "lengths")))
    assert np.mean(drawn) == pytest.approx(mean, rel=0.01)
    assert np.quantile(drawn, 0.99) == pytest.approx(p99, rel=0.03)


def test_pauses_are_not_rounded_and_may_be_nothing() -> None:
    drawn = parse_seconds("uniform:0.25,0.75").draw(1000, stream(0, "x"))
    assert 0.25 <= drawn.min() < 0.3 < 0.7 < drawn.max() <= 0.75
    assert parse_seconds("0").draw(3, stream(0, "x")).tolist() == [0, 0, 0]


def test_lengths_are_never_below_one() -> None:
    assert min(whole_tokens(parse_lengths("normal:3,10").draw(1000, stream(0, "x")))) == 1


def test_a_cumulative_distribution_is_drawn_as_it_is(shared_data: Path) -> None:
    cdf = read_cdf(shared_data / "fleet-cdf" / "azure_cdf.json")
    drawn = cdf.draw(100_000, stream(0, "x"))
    for tokens, share in zip(cdf.tokens, cdf.shares, strict=True):
        assert (drawn <= tokens).mean() == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "holds no pairs"),
        ("[[64, 0.5], [32, 1.0]]", "pair 2"),
        ("[[64, 0.5], [128, 0.4]]", "pair 2"),
        ("[[64, 0.5]]", "the last share is 0.5, not 1"),
        ("{}", "not a list"),
    ],
)
def test_a_broken_distribution_names_the_pair(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "cdf.json").write_text(text)
    with pytest.raises(BadInput, match=message):
        parse_lengths(f"cdf:{tmp_path / 'cdf.json'}", "--input")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lognorml:200,1", "--output: 'lognorml' is unknown; did you mean 'lognormal'"),
        ("lognormal:200", "--output: 'lognormal:200' needs MEAN,SIGMA after the colon"),
        ("lognormal:200,x", "--output: SIGMA of 'lognormal:200,x' is 'x', not a number"),
        ("0", "--output: TOKENS of '0' must be more than 0"),
        ("uniform:9,3", "--output: 'uniform:9,3' needs 0 < LOW ≤ HIGH"),
        ("normal:10,-1", "the spread of 'normal:10,-1' must not be negative"),
        ("fixed:nan", "must be a finite number"),
        ("", "--output: '' is unknown"),
    ],
)
def test_a_wrong_length_names_its_field(text: str, message: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse_lengths(text, "--output")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("poison", "did you mean 'poisson'"),
        ("gamma", "needs CV"),
        ("gamma:0", "CV"),
        ("poisson:3", "no value after"),
    ],
)
def test_wrong_arrivals_name_their_field(text: str, message: str) -> None:
    with pytest.raises(BadInput, match=message) as caught:
        parse_arrivals(text, "--arrivals")
    assert str(caught.value).startswith("--arrivals: ")


# ── seeds ────────────────────────────────────────────────────────────────────────────────────────────────


def test_changing_one_thing_that_is_drawn_shifts_no_other() -> None:
    def made(arrivals: str = "poisson", inputs: str = "uniform:1,999", outputs: str = "uniform:1,99") -> list:
        traffic = synthetic(
            200,
            input_tokens=parse_lengths(inputs),
            output_tokens=parse_lengths(outputs),
            arrivals=parse_arrivals(arrivals),
            rate=3,
            seed=11,
        )
        return [
            [getattr(r, name) for r in traffic.requests] for name in ("at", "input_tokens", "output_tokens")
        ]

    base = made()
    for place, other in enumerate([made(arrivals="gamma:3"), made(inputs="normal:9,3"), made(outputs="5")]):
        assert [other[i] == base[i] for i in range(3)] == [i != place for i in range(3)]
    assert made() == base


def test_another_seed_is_other_traffic() -> None:
    numbers = {(seed, name): stream(seed, name).random() for seed in range(50) for name in ("a", "b", "c")}
    assert len(set(numbers.values())) == len(numbers)


# ── conversations ────────────────────────────────────────────────────────────────────────────────────────


def test_a_turns_input_counts_all_that_was_said_before() -> None:
    traffic = conversations(
        50,
        turns=parse_lengths("uniform:1,6"),
        input_tokens=Fixed(100),
        later_input_tokens=Fixed(20),
        output_tokens=parse_lengths("uniform:5,50"),
        think_s=Fixed(2.5),
        arrivals=parse_arrivals("poisson"),
        rate=2.0,
        seed=5,
    )
    by_conversation: dict[int, list] = {}
    for request in traffic.requests:
        assert request.conversation is not None
        by_conversation.setdefault(request.conversation, []).append(request)
    assert len(by_conversation) == 50
    assert {len(turns) for turns in by_conversation.values()} == {1, 2, 3, 4, 5, 6}
    for turns in by_conversation.values():
        assert [turn.turn for turn in turns] == list(range(len(turns)))
        assert len({turn.at for turn in turns}) == 1
        assert [turn.think_s for turn in turns] == [0.0] + [2.5] * (len(turns) - 1)
        assert turns[0].input_tokens == 100
        for before, after in pairwise(turns):
            assert after.input_tokens == before.input_tokens + before.output_tokens + 20
    found = describe(traffic)
    assert found.conversations == 50
    assert found.rps == pytest.approx(50 / traffic.duration_s)
    assert found.ideal_hit > 0.4
