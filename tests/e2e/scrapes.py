"""Metrics as they are served: by an instance itself, or by Prometheus for all of them."""

from collections.abc import Sequence
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.truth import Reading
from tests.plain import http
from tests.servers import Prometheus

PREFIX = "gpu_orchestrator_"
#: Labels that say where a series comes from.
ORIGIN = ("instance", "job")

#: A series' name, without our prefix → its values by label.
Scrape = dict[str, Reading]


def of_instance(url: str) -> Scrape:
    found: Scrape = {}
    for family in text_string_to_metric_families(http.get(f"{url}/metrics").raise_for_status().text):
        for sample in family.samples:
            if sample.name.startswith(PREFIX) and not sample.name.endswith("_created"):
                found.setdefault(sample.name.removeprefix(PREFIX), {})[key(sample.labels)] = float(sample.value)
    return found


def of_prometheus(server: Prometheus, operation: str, series: Sequence[str]) -> Scrape:
    """Every series, put together over instances by `max`, `min` or `sum`."""
    expression = f"{operation} without ({', '.join(ORIGIN)}) (%s)"
    return {name: vector(server.query(expression % f"{PREFIX}{name}")) for name in series}


def vector(result: list[dict[str, Any]]) -> Reading:
    return {key(one["metric"]): float(one["value"][1]) for one in result}


def key(labels: dict[str, str]) -> tuple[str, ...]:
    return tuple(labels[name] for name in sorted(labels) if name != "__name__")


def added(scrapes: Sequence[Scrape]) -> Scrape:
    """What several instances did themselves, together."""
    total: Scrape = {}
    for scrape in scrapes:
        for name, reading in scrape.items():
            into = total.setdefault(name, {})
            for labels, value in reading.items():
                into[labels] = into.get(labels, 0.0) + value
    return total
