import pytest

from ridgeline.lab.errors import BadInput
from ridgeline.lab.slo import Limit, parse_slo


def test_limits_are_read_with_their_percentiles_and_units() -> None:
    found = parse_slo("ttft_p90=400ms, tpot_p99=0.05s, e2e=1.5min, ttft_sched_p50=250")
    assert found.limits == (
        Limit("ttft", 90, 400.0),
        Limit("tpot", 99, 50.0),
        Limit("e2e", 90, 90_000.0),
        Limit("ttft_sched", 50, 250.0),
    )
    assert parse_slo(str(found)) == found


def test_a_limit_has_the_name_its_metric_has_in_a_summary() -> None:
    assert [limit.key for limit in parse_slo("ttft_p90=1s,tpot_p50=20ms").limits] == [
        "ttft_ms.p90",
        "tpot_ms.p50",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"),
        ("ttft", "metric=limit"),
        ("tfft_p90=4ms", "did you mean ttft"),
        ("ttft_p42=3ms", "not p42"),
        ("ttft_p90=fast", "not a duration"),
        ("ttft=0ms", "above zero"),
        ("ttft_p90=1ms,ttft=2ms", "limited twice"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_what_can(text: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        parse_slo(text)
