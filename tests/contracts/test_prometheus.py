"""Rules and alerts in deploy/prometheus: they load, each alert was seen to fire and to keep quiet, and has its page."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.promql import RECORD, metrics_in, unknown_in

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "prometheus"


def read(path: Path) -> Any:
    """By the loader in C where there is one, ten times as fast: all tests wait while this file is collected."""
    return yaml.load(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 - both are safe


GROUPS = {name: read(FOLDER / name)["groups"] for name in ("rules.yml", "alerts.yml")}
RULES = [rule for group in GROUPS["rules.yml"] for rule in group["rules"]]
ALERTS = {rule["alert"]: rule for group in GROUPS["alerts.yml"] for rule in group["rules"]}
#: Its cases name every alert, so it needs every rule.
WHOLE = "quiet.yml"
TESTS = {path.name: read(path) for path in sorted((FOLDER / "tests").glob("*.yml"))}


def run(promtool: str, *arguments: str) -> str:
    """What it says. Raises AssertionError with that when it is not content."""
    environment = {**os.environ, "GOGC": "400"}  # it has memory enough, and spends a fifth of its time on saving some
    done = subprocess.run(
        [promtool, *arguments], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
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


def named(rule: dict[str, Any]) -> str:
    return str(rule.get("record") or rule["alert"])


def looked_at(tests: dict[str, Any]) -> set[str]:
    """The alerts and records that a file has cases of, and the records that these are made of."""
    names = {case["alertname"] for test in tests["tests"] for case in test.get("alert_rule_test", [])}
    texts = [case["expr"] for test in tests["tests"] for case in test.get("promql_expr_test", [])]
    new = names | set(RECORD.findall(" ".join(texts)))
    while new:
        names |= new
        made_of = [rule["expr"] for rule in [*RULES, *ALERTS.values()] if named(rule) in new]
        new = set(RECORD.findall(" ".join(made_of))) - names
    return names


def narrowed(name: str, folder: Path) -> Path:
    """The tests of a file with the rules that their cases look at.

    promtool works out every rule every 15 seconds of every test, which takes most of its time, and compares what the
    cases name.
    """
    names, kept = looked_at(TESTS[name]), []
    for file, groups in GROUPS.items():
        shorter = [group | {"rules": [rule for rule in group["rules"] if named(rule) in names]} for group in groups]
        shorter = [group for group in shorter if group["rules"]]
        kept += [group["name"] for group in shorter]
        (folder / file).write_text(yaml.safe_dump({"groups": shorter}))
    head = {key: value for key, value in TESTS[name].items() if key != "tests"}
    head |= {"rule_files": list(GROUPS), "group_eval_order": [one for one in head["group_eval_order"] if one in kept]}
    # As it is written: to YAML for Python, the values 0x40 are the number 64.
    cases = (FOLDER / "tests" / name).read_text().partition("\ntests:\n")[2]
    assert cases
    (folder / name).write_text(f"{yaml.safe_dump(head)}\ntests:\n{cases}")
    return folder / name


@pytest.mark.parametrize("name", TESTS)
def test_rules_and_alerts_do_what_their_tests_say(promtool, tmp_path, name):
    whole = FOLDER / "tests" / name
    run(promtool, "test", "rules", str(whole if name == WHOLE else narrowed(name, tmp_path)))


@pytest.mark.parametrize("name", TESTS)
def test_all_files_are_about_the_same_rules_in_the_same_order(name):
    """So that what one of them is run with shows that all can be, with all rules, as they stand there."""
    head = {key: value for key, value in TESTS[name].items() if key != "tests"}
    assert head == {key: value for key, value in TESTS[WHOLE].items() if key != "tests"}
    assert head["rule_files"] == [f"../{file}" for file in GROUPS]
    assert head["group_eval_order"] == [group["name"] for groups in GROUPS.values() for group in groups]


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


@pytest.mark.parametrize("rule", [*RULES, *ALERTS.values()], ids=named)
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
    wrong = narrowed("admission.yml", tmp_path)
    wrong.write_text(wrong.read_text().replace("45%", "46%"))
    with pytest.raises(AssertionError, match="46%"):
        run(promtool, "test", "rules", str(wrong))


def test_a_rule_that_is_left_out_is_missed(promtool, tmp_path, monkeypatch):
    """None of those that cases look at may be left out: without its records an alert does not fire."""
    monkeypatch.setitem(GROUPS, "rules.yml", [])
    with pytest.raises(AssertionError, match="FAILED"):
        run(promtool, "test", "rules", str(narrowed("admission.yml", tmp_path)))


def test_there_is_something_to_check():
    assert len(ALERTS) > 20 and len(RULES) > 30 and len(TESTS) > 5
