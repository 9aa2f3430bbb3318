"""The dashboard and the alerts ask for metrics that the server has, and the server has those of the contract."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import REGISTRY

from intentkv.engine.metrics import PrometheusMetrics

OPS = Path(__file__).resolve().parents[2] / "docs" / "ops"
SCORE = {"intentkv_score_seconds_bucket", "intentkv_score_seconds_sum", "intentkv_score_seconds_count"}
CONTRACT = SCORE | {
    "intentkv_events_total", "intentkv_dropped_tokens_total", "intentkv_freed_slots_total", "intentkv_live_tokens",
    "intentkv_sessions", "intentkv_namespaces_evicted_total", "intentkv_reused_prefix_tokens_total",
}  # fmt: skip


@pytest.fixture(scope="module")
def exposed() -> set[str]:
    """Names of samples that a server's collectors have."""
    metrics = PrometheusMetrics(cache=None)
    metrics._events.labels(scorer="intent")
    samples = {sample.name for family in REGISTRY.collect() for sample in family.samples}
    return {name for name in samples if name.startswith("intentkv_") and not name.endswith("_created")}


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((OPS / "prometheus-rules.yaml").read_text())["groups"]
    return list(group["rules"])


def asked(expressions: list[str]) -> set[str]:
    return {name for expression in expressions for name in re.findall(r"intentkv_\w+", expression)}


def test_metrics_are_those_of_the_contract(exposed: set[str]) -> None:
    assert exposed == CONTRACT


def test_dashboard_shows_every_metric_and_no_other(exposed: set[str]) -> None:
    board = json.loads((OPS / "grafana-dashboard.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert asked(expressions) == exposed - {"intentkv_score_seconds_sum", "intentkv_score_seconds_count"}
    assert asked([variable["query"] for variable in board["templating"]["list"]]) <= exposed
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids) and all(panel["description"] for panel in board["panels"])


def test_dashboard_panels_do_not_overlap() -> None:
    board = json.loads((OPS / "grafana-dashboard.json").read_text())
    cells: set[tuple[int, int]] = set()
    for place in (panel["gridPos"] for panel in board["panels"]):
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not own & cells and max(x for x, _ in own) < 24
        cells |= own


def test_metrics_in_alert_rules_exist_and_say_what_to_do(exposed: set[str]) -> None:
    assert len(rules()) == 3 and asked([rule["expr"] for rule in rules()]) <= exposed
    for rule in rules():
        assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
        assert rule["expr"].count("(") == rule["expr"].count(")") and len(rule["annotations"]["description"]) > 80
