"""The dashboard in deploy/grafana is one that Grafana can show: ids, places, variables, units, links to runbooks."""

from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.grafana import BUILT_IN, DASHBOARD, VARIABLES, annotations, panels, queries, sent, variables_in
from tests.promql import documented, metrics_in, unknown_in

ROOT = Path(__file__).parents[2]
ROWS = [
    "Overview",
    "Queue",
    "Latency",
    "Workers & pools",
    "GPUs & leases",
    "Leader & duties",
    "Admission",
    "Failures & dead letters",
]
CHARTS = [panel for panel in panels() if panel["type"] != "row"]
named = pytest.mark.parametrize("panel", CHARTS, ids=lambda panel: panel["title"])


def overlap(one: dict[str, Any], other: dict[str, Any]) -> bool:
    a, b = one["gridPos"], other["gridPos"]
    across = a["x"] < b["x"] + b["w"] and b["x"] < a["x"] + a["w"]
    return across and a["y"] < b["y"] + b["h"] and b["y"] < a["y"] + a["h"]


def test_it_can_be_found_again_and_needs_no_import_dialog():
    assert DASHBOARD["uid"] == "gpu-orchestrator"
    assert DASHBOARD["schemaVersion"] >= 39
    assert "__inputs" not in DASHBOARD, "the data source is a variable"


def test_ids_are_unique():
    assert [id for id, times in Counter(panel["id"] for panel in panels()).items() if times > 1] == []


def test_nothing_lies_on_top_of_something_else_or_beyond_the_edge():
    assert [(a["title"], b["title"]) for a, b in combinations(panels(), 2) if overlap(a, b)] == []
    assert [panel["title"] for panel in panels() if panel["gridPos"]["x"] + panel["gridPos"]["w"] > 24] == []


def test_it_has_its_rows():
    assert [panel["title"] for panel in panels() if panel["type"] == "row"] == ROWS


def test_what_it_asks_for_exists():
    asked = [query.expression for query in [*queries(), *annotations()]]
    asked += [variable["definition"] for variable in VARIABLES.values() if variable["type"] == "query"]
    assert {name for expression in asked for name in unknown_in(expression)} == set()


def test_every_metric_is_shown():
    shown = {name for query in queries() for name in metrics_in(query.expression)}
    assert documented() - shown == set()


def test_every_variable_is_known_and_used():
    expressions = [query.expression for query in [*queries(), *annotations()]]
    used = {name for expression in expressions for name in variables_in(expression)}
    links = [link["url"] for panel in CHARTS for link in panel["links"]] + [link["url"] for link in DASHBOARD["links"]]
    used |= {name for link in links for name in variables_in(link)}
    used |= {name for panel in CHARTS for name in variables_in(panel["datasource"]["uid"])}
    assert used - BUILT_IN.keys() == VARIABLES.keys()


@named
def test_a_panel_says_what_it_shows_in_which_unit(panel):
    assert panel["description"].endswith(".")
    assert panel["targets"], "it shows something"
    assert [target for target in panel["targets"] if target["datasource"]["uid"] != "${datasource}"] == []
    assert panel["type"] == "heatmap" or panel["fieldConfig"]["defaults"]["unit"]
    assert panel["type"] == "heatmap" or panel["fieldConfig"]["defaults"]["thresholds"]["steps"]


@named
def test_links_of_a_panel_lead_to_runbooks(panel):
    urls = [link["url"] for link in panel["links"]]
    assert [url for url in urls if not (ROOT / url.replace("${runbooks}", "runbooks")).is_file()] == []


@pytest.mark.parametrize("name", ["datasources/prometheus.yml", "dashboards/gpu-orchestrator.yml"])
def test_provisioning_is_of_the_version_that_grafana_reads(name):
    read = yaml.safe_load((ROOT / "deploy" / "grafana" / "provisioning" / name).read_text())
    assert read["apiVersion"] == 1


# What Grafana makes of variables.


def test_a_variable_that_nobody_chose_matches_everything():
    assert sent('x{type=~"$type"}[$__rate_interval]', {}) == 'x{type=~".*"}[1m0s]'


def test_chosen_values_are_escaped_and_joined():
    assert sent('x{stream=~"${stream}"}', {"stream": ["a.b"]}) == 'x{stream=~"a\\\\.b"}'
    assert sent('x{stream=~"$stream"}', {"stream": ["a", "b"]}) == 'x{stream=~"(a|b)"}'


def test_panels_that_overlap_are_seen():
    one, other = ({"gridPos": {"x": x, "y": 0, "w": 4, "h": 4}} for x in (0, 3))
    assert overlap(one, other)
    other["gridPos"]["x"] = 4
    assert not overlap(one, other)
