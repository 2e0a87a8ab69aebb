"""What expressions of rules and panels ask for, and whether there is such a thing."""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
RECORDED = {
    rule["record"]
    for group in yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules.yml").read_text())["groups"]
    for rule in group["rules"]
}
METRIC = re.compile(r"(?<![\w:])gpu_orchestrator_\w+(?![\w:])")
RECORD = re.compile(r"\b[a-z_]+:gpu_orchestrator_\w+:\w+")
PARTS = re.compile(r"_(bucket|sum|count)$")


def documented() -> set[str]:
    """The metrics that docs/metrics.md describes."""
    return set(re.findall(r"^\| `(gpu_orchestrator_\w+)` \|", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE))


def metrics_in(expression: str) -> set[str]:
    """The served metrics that an expression asks for, a histogram by its own name."""
    return {PARTS.sub("", name) for name in METRIC.findall(expression)}


def unknown_in(expression: str) -> set[str]:
    """Metrics that nobody serves, and records that no rule makes."""
    return (metrics_in(expression) - documented()) | (set(RECORD.findall(expression)) - RECORDED)
