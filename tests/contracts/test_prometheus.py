"""Rules and alerts in deploy/prometheus: they load, each alert was seen to fire and to keep quiet, and has its page."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.promql import metrics_in, unknown_in

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "prometheus"
RULES = [rule for group in yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"] for rule in group["rules"]]
ALERTS = {
    rule["alert"]: rule
    for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
}
TESTS = {path.name: yaml.safe_load(path.read_text()) for path in sorted((FOLDER / "tests").glob("*.yml"))}


def run(promtool: str, *arguments: str) -> str:
    """What it says. Raises AssertionError with that when it is not content."""
    done = subprocess.run([promtool, *arguments], capture_output=True, text=True, timeout=100, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return said


def expectations(name: str, tests: dict[str, Any]) -> list[list[Any]]:
    """What the tests of a file expect of an alert, case by case."""
    cases = [case for test in tests["tests"] for case in test.get("alert_rule_test", [])]
    return [case["exp_alerts"] for case in cases if case["alertname"] == name]


def test_the_example_configuration_loads_with_its_rules(promtool):
    said = run(promtool, "check", "config", str(FOLDER / "prometheus.yml"))
    assert f"SUCCESS: {len(RULES)} rules found" in said
    assert f"SUCCESS: {len(ALERTS)} rules found" in said


@pytest.mark.parametrize("name", TESTS)
def test_rules_and_alerts_do_what_their_tests_say(promtool, name):
    run(promtool, "test", "rules", str(FOLDER / "tests" / name))


@pytest.mark.parametrize("alert", ALERTS)
def test_every_alert_was_seen_to_fire_and_to_keep_quiet(alert):
    seen = [[bool(expected) for expected in expectations(alert, tests)] for tests in TESTS.values()]
    assert any({True, False} <= set(cases) for cases in seen), "both, side by side in one file"


@pytest.mark.parametrize("alert", ALERTS)
def test_nothing_fires_in_a_cluster_that_is_well(alert):
    states = [[case["alertname"] for case in test["alert_rule_test"]] for test in TESTS["quiet.yml"]["tests"]]
    assert states and all(alert in checked for checked in states)
    assert not any(expectations(alert, TESTS["quiet.yml"]))


@pytest.mark.parametrize("alert", ALERTS)
def test_every_alert_says_how_bad_it_is_and_what_to_do(alert):
    rule = ALERTS[alert]
    assert rule["labels"]["severity"] in {"critical", "warning"}
    assert set(rule["annotations"]) == {"summary", "description", "runbook"}
    page = ROOT / rule["annotations"]["runbook"]
    assert page.parent == ROOT / "runbooks"
    assert f"`{alert}`" in page.read_text().partition("## Look")[0], "its page names it among the symptoms"


@pytest.mark.parametrize("rule", [*RULES, *ALERTS.values()], ids=lambda rule: rule.get("record") or rule["alert"])
def test_rules_ask_for_what_exists(rule):
    assert unknown_in(rule["expr"]) == set()


@pytest.mark.parametrize("record", [rule["record"] for rule in RULES])
def test_a_record_is_named_after_its_level_its_metric_and_what_was_done(record):
    assert re.fullmatch(r"[a-z_]+:gpu_orchestrator_[a-z_]+:[a-z0-9_]+", record)


# Each check is able to fail.


def test_what_does_not_exist_is_seen():
    assert unknown_in("rate(gpu_orchestrator_jobs_burnt_total[5m])") == {"gpu_orchestrator_jobs_burnt_total"}
    assert unknown_in("type:gpu_orchestrator_jobs_burnt:rate5m > 1") == {"type:gpu_orchestrator_jobs_burnt:rate5m"}


def test_parts_of_a_histogram_are_that_histogram():
    assert metrics_in("rate(gpu_orchestrator_duty_seconds_bucket[5m])") == {"gpu_orchestrator_duty_seconds"}


def test_a_case_that_does_not_come_true_is_seen(promtool, tmp_path):
    text = (FOLDER / "tests" / "admission.yml").read_text().replace("../", f"{FOLDER}/")
    (tmp_path / "wrong.yml").write_text(text.replace("45%", "46%"))
    with pytest.raises(AssertionError, match="46%"):
        run(promtool, "test", "rules", str(tmp_path / "wrong.yml"))


def test_there_is_something_to_check():
    assert len(ALERTS) > 20 and len(RULES) > 30 and len(TESTS) > 5
