"""Where a fleet's weights come from: settings, the peers that a replica is told, status, metrics, records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from ridgeline.cli.fleet.status import weights_text
from ridgeline.cli.serve import add_parser
from ridgeline.fleet.config import make_fleet
from ridgeline.fleet.controller.api.metrics import metrics_text
from ridgeline.fleet.controller.api.status import FleetStatus, replica_status
from ridgeline.fleet.controller.life.replica import MOST_PEERS, Replica, weight_peers
from ridgeline.fleet.controller.model_state import replica_spec, version_of
from ridgeline.options import OptionError, build
from ridgeline.replica import cold_starts
from ridgeline.replica.cold_starts import ColdStart, add_start, read_starts
from ridgeline.replica.messages import CacheFrom, Load, Started, WeightsFrom, decode_line, encode_line
from ridgeline.server.config import ServerConfig

FROM_PEER = WeightsFrom(
    "peer chat-1", 98_000_000, 0.5, 1.25e9, CacheFrom("packed weights", "peer chat-1", 97_000_000, 0.4)
)


def model_with(**weights: Any) -> Any:
    return make_fleet({"models": [{"name": "chat", "source": "smollm2-135m", "weights": weights}]}).models[0]


def test_the_default_is_local_then_peers_then_the_hub() -> None:
    assert model_with().weights.sources == ("local", "peers", "hub")
    stores = ["local", "peers", "https://bucket.example/m?sig=x", "file:///mnt/m", "/mnt/n", "hub"]
    assert model_with(sources=stores).weights.sources == tuple(stores)
    assert model_with().version == model_with(sources=stores).version  # no reason for a rollout


@pytest.mark.parametrize(
    ("sources", "why"),
    [
        ([], "is empty"),
        (["peers"], "first source is always 'local'"),
        (["local", "peer"], "'peer' is not a source.*peers"),
        (["local", "hub", "peers"], "'peers' stands after 'hub'"),
        (["local", "peers", "peers"], "has 'peers' twice"),
        (["local", "s3://bucket/m"], "needs a bucket's own protocol.*presigned"),
        (["local", "https:///m"], "has no host"),
        (["local", "file://mnt/m"], "three slashes"),
        (["local", "models/m"], "is not a source"),
        (["local", "https://h/a b?t=1"], "has a space"),
        (["local", "https://h:port/a"], "a port that cannot be read"),
    ],
)
def test_a_list_of_sources_that_cannot_work_is_refused(sources: list[str], why: str) -> None:
    with pytest.raises(OptionError, match=why):
        model_with(sources=sources)


@pytest.mark.parametrize(
    "source",
    [
        "https://user:s3cret@host/x",
        "https://user:s3cret@host/x y",
        "https://user:/s3cret@host/x",
        "https://user:?s3cret@host/x",
        "https://user:[s3cret@host/x",
        "htps://user:s3cret@host/x",
        "s3://user:s3cret@host/x",
        "file://user:s3cret@host/x",
        "user:s3cret@host/x",
        "htps://host/x?t=s3cret",
    ],
)
def test_a_login_is_refused_and_not_shown(source: str) -> None:
    for sources in (["local", source], [source], ["local", source, source], ["local", "hub", source]):
        with pytest.raises(OptionError) as refused:
            model_with(sources=sources)
        assert "s3cret" not in str(refused.value)
    with pytest.raises(OptionError) as refused:
        ServerConfig(weight_peers=(f"a={source}",))
    assert "s3cret" not in str(refused.value)


def test_a_server_without_keys_shares_nothing() -> None:
    with pytest.raises(OptionError, match="share_weights needs api_keys or api_key_file"):
        ServerConfig(share_weights=True)


def test_the_fleets_own_options_are_not_set_by_hand() -> None:
    with pytest.raises(OptionError, match="share_weights is set by the fleet itself"):
        make_fleet({"models": [{"name": "chat", "serve": {"share_weights": True}}]})
    with pytest.raises(OptionError, match="mb_per_s"):
        model_with(mb_per_s=0)


def test_a_server_reads_what_the_fleet_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import argparse

    from ridgeline.cli.flags.environment import from_environment
    from ridgeline.engine.config import EngineConfig

    model = model_with(sources=["local", "peers", "https://x.example/a,b?t=1"], transfers=3, caches=False)
    spec = replica_spec(
        "f",
        "chat-2",
        model,
        version_of(model),
        threads=None,
        key="k",
        drain_s=1.0,
        peers=("chat-1=http://10.0.0.1:8000", "chat-3=http://10.0.0.3:8000"),
    )
    assert not any("x.example" in flag for flag in spec.flags)  # a token is not for `ps`
    for name, value in spec.environment.items():
        monkeypatch.setenv(name, value)
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    args = parser.parse_args(["serve"])
    config = build(ServerConfig, from_environment(args, server=ServerConfig, engine=EngineConfig)["server"])
    assert config.weight_sources == ("local", "peers", "https://x.example/a%2Cb?t=1")
    assert config.weight_peers == ("chat-1=http://10.0.0.1:8000", "chat-3=http://10.0.0.3:8000")
    assert (config.share_weights, config.share_transfers, config.share_mb_per_s) == (True, 3, 100.0)
    assert config.weight_caches is False
    assert config.accepted_keys() == ("k",)


def serving(id: str, running: int = 0, version: str = "v1") -> Replica:
    replica = Replica(id, "chat", version, 0.0)
    replica.url = f"http://{id}"
    replica.enter("ready", 1.0)
    replica.hear(Load(0, "ready", running, *(0,) * 11), 1.0)
    return replica


def test_peers_serve_the_same_files_and_the_idle_ones_come_first() -> None:
    busy, idle, other = serving("chat-1", running=5), serving("chat-2"), serving("chat-3", version="v9")
    starting = Replica("chat-4", "chat", "v1", 0.0)
    draining = serving("chat-5")
    draining.enter("draining", 2.0)
    peers = weight_peers([busy, idle, other, starting, draining], {"v1", "v2"})
    assert peers == ("chat-2=http://chat-2", "chat-1=http://chat-1")
    assert len(weight_peers([serving(f"c-{n}") for n in range(9)], {"v1"})) == MOST_PEERS


def started(weights: WeightsFrom | None) -> Started:
    return Started(
        "e", 1, "chat", ("chat",), "v", 8, 100, 16, {"process": 1.0, "fetch": 0.5}, 97, {}, weights, "cpu x"
    )


def test_a_start_is_shown_with_its_source_and_bandwidth_beside_the_links() -> None:
    line = decode_line(encode_line(started(FROM_PEER)))
    assert isinstance(line, Started)
    replica = serving("chat-2")
    replica.segments = {"spawn": 0.1, "first_token": 0.2, "total": 2.0}
    replica.hear(line, 2.0)
    assert list(replica.segments) == ["spawn", "process", "fetch", "first_token", "total"]
    status = replica_status(replica, 3.0)
    shown = weights_text(msgspec.to_builtins(status))
    assert shown == "98 MB from peer chat-1, 196 MB/s of 1250; packed weights from peer chat-1"
    whole = FleetStatus("f", "u", 1, 1.0, 1, 1, False, 1, 1, (), (status,))
    labels = '{model="chat",replica="chat-2",source="peer chat-1"}'
    metrics = metrics_text(whole)
    assert f"ridgeline_fleet_weights_fetched_bytes{labels} 9.8e+07" in metrics
    assert f"ridgeline_fleet_weights_fetched_bytes_per_second{labels} 1.96e+08" in metrics
    assert f"ridgeline_fleet_weights_link_bytes_per_second{labels} 1.25e+09" in metrics


@pytest.mark.parametrize(
    ("weights", "shown"),
    [
        (None, "-"),
        (WeightsFrom("local"), "local"),
        (WeightsFrom("local", cache=CacheFrom("kernels", "local")), "local; kernels local"),
        (
            WeightsFrom("hub", 2_000_000, 2.0, cache=CacheFrom("kernels", "", refused="driver is 1 there")),
            "2 MB from hub, 1 MB/s; no kernels: driver is 1 there",
        ),
    ],
)
def test_other_sources_are_shown_too(weights: WeightsFrom | None, shown: str) -> None:
    replica = serving("chat-2")
    replica.hear(started(weights), 2.0)
    assert weights_text(msgspec.to_builtins(replica_status(replica, 3.0))) == shown


def test_the_records_of_starts_are_bounded_and_survive_a_cut_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cold_starts, "KEPT", 5)
    for number in range(40):
        segments = {"import": 3.0, "padding" * 100: 0.0, "total": float(number)}
        add_start(tmp_path, ColdStart(1.0, "m", "cpu", "local", segments, FROM_PEER))
    with (tmp_path / cold_starts.FILE).open("ab") as file:
        file.write(b'{"at": 1')
    kept = read_starts(tmp_path)
    assert 5 <= len(kept) <= 10
    assert kept[-1].segments["total"] == 39.0
    assert kept[-1].weights == FROM_PEER
    assert read_starts(tmp_path / "none") == ()
