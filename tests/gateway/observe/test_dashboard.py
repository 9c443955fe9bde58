"""deploy/grafana/gateway.json asks for metrics and labels that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

from ridgeline.gateway.observe.metrics import FAMILIES, CacheReading, Readings, UpstreamReading
from tests.gateway.observe.test_metrics import new_metrics, row, samples

DASHBOARD = Path(__file__).resolve().parents[3] / "deploy" / "grafana" / "gateway.json"
PAGE = Path(__file__).resolve().parents[3] / "docs" / "gateway-observability.md"


def test_every_panel_asks_for_what_a_page_has() -> None:
    metrics = new_metrics()
    metrics.observe(row(error_code="x"))
    metrics.attempt("retry", "local", "timeout")
    metrics.guard_found({"email": 1}, "redacted")
    metrics.refused(404)
    readings = Readings([UpstreamReading("local", "open", 0, 0, {"dead": 1})], [CacheReading("exact", 1, 1)])
    there = samples(metrics.render(readings))
    asked = [
        target["expr"] for panel in json.loads(DASHBOARD.read_text())["panels"] for target in panel["targets"]
    ]
    assert len(asked) > 10
    for expression in asked:
        for name in re.findall(r"ridgeline_gateway_(\w+)", expression):
            assert name in there, expression
            labels = {label for of in there[name] for label, _ in of}
            for group in re.findall(r"by \(([^)]*)\)", expression):
                assert set(group.split(", ")) <= labels, expression


def test_the_page_names_every_metric() -> None:
    text = PAGE.read_text()
    assert [name for name in FAMILIES if f"`{name}`" not in text] == []
