"""The dashboard as Grafana reads it: its panels, and the queries that they send once variables have values."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DASHBOARD: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "deploy" / "grafana" / "gpu-orchestrator.json").read_text()
)
VARIABLES: dict[str, dict[str, Any]] = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
#: Characters of regular expressions, before which Grafana puts two backslashes when a value stands in a query.
SPECIAL = re.compile(r"[$^*{}\[\]'+?.()|]")
#: Grafana's own: four times the scrape interval, and a minute at least unless the data source says otherwise.
BUILT_IN = {"__rate_interval": "1m0s", "__interval": "15s", "__range": "1h"}


@dataclass(frozen=True)
class Query:
    panel: str
    ref: str
    expression: str
    #: Asked for now, instead of for each moment that a panel shows.
    instant: bool

    def __str__(self) -> str:
        return f"{self.panel} ({self.ref})"


def panels(of: Mapping[str, Any] = DASHBOARD) -> Iterator[dict[str, Any]]:
    """All of them, those of collapsed rows too."""
    for panel in of["panels"]:
        yield panel
        yield from panels({"panels": panel.get("panels", [])})


def queries() -> list[Query]:
    """Each panel's, as they stand in the file."""
    return [
        Query(panel["title"], target["refId"], target["expr"], target["instant"])
        for panel in panels()
        for target in panel.get("targets", [])
    ]


def annotations() -> list[Query]:
    return [
        Query(found["name"], "annotation", found["expr"], instant=False)
        for found in DASHBOARD["annotations"]["list"]
        if "expr" in found
    ]


def variables_in(text: str) -> set[str]:
    return set(re.findall(r"\$\{?(\w+)", text))


def sent(expression: str, chosen: Mapping[str, list[str]], built_in: Mapping[str, str] = BUILT_IN) -> str:
    """What Grafana would send. A variable that nobody chose is at All."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name in built_in:
            return built_in[name]
        if name not in chosen:
            return str(VARIABLES[name]["allValue"])
        if not VARIABLES[name]["multi"]:
            return chosen[name][0].replace("\\", "\\\\")
        escaped = [SPECIAL.sub(r"\\\\\g<0>", one.replace("\\", "\\" * 4)) for one in chosen[name]]
        return escaped[0] if len(escaped) == 1 else f"({'|'.join(escaped)})"

    return re.sub(r"\$(?:(\w+)|\{(\w+)(?::\w+)?\})", value, expression)
