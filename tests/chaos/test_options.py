"""What the commands of `make chaos` are told is what they run."""

import dataclasses
import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.chaos.checker import Violation
from tests.chaos.faults import FAULTS
from tests.chaos.options import chosen, performed
from tests.chaos.showing import show_jobs_report, show_report

COMMANDS = ("tests.chaos", "tests.chaos.leases", "tests.chaos.pools")


def plan(command: str, *arguments: str) -> dict[str, object]:
    main = importlib.import_module(f"{command}.__main__")
    return dataclasses.asdict(main.plan_of(main.options_of([*arguments, "--seed", "7"])))


@pytest.mark.parametrize("command", COMMANDS)
def test_without_options_it_is_the_plan_by_default(command):
    by_default = dataclasses.asdict(importlib.import_module(f"{command}.run").Plan(seed=7))
    assert plan(command) == by_default


@pytest.mark.parametrize(
    ("command", "option", "said", "meant"),
    [
        ("tests.chaos", "jobs", "50", 50),
        ("tests.chaos", "faults", "3", 3),
        ("tests.chaos.leases", "operations", "50", 50),
        ("tests.chaos.leases", "clients", "3", 3),
        ("tests.chaos.leases", "orchestrators", "2", 2),
        ("tests.chaos.pools", "minutes", "0.5", 0.5),
        ("tests.chaos.pools", "pools", "2", 2),
        ("tests.chaos.pools", "nodes", "2", 2),
        ("tests.chaos.pools", "gpus", "sim:1x16384", "sim:1x16384"),
    ],
)
def test_an_option_changes_what_it_names_and_nothing_else(command, option, said, meant):
    assert plan(command, f"--{option}", said) == plan(command) | {option: meant}


@pytest.mark.parametrize("command", COMMANDS)
def test_all_of_them_run_a_broken_build_into_a_folder(command):
    main = importlib.import_module(f"{command}.__main__")
    options = main.options_of(["--break", "status-guard", "--folder", "kept", "--json"])
    plan, folder = performed(lambda plan, _tell, folder: (plan, folder), main.plan_of(options), options)
    assert plan.build != main.plan_of(options).build and folder == Path("kept") and options.json


@pytest.mark.parametrize("show", [show_report, show_jobs_report])
def test_a_violation_is_shown_and_is_exit_code_1(show, capsys):
    lost = Violation("INV-1", "j", "is lost")
    history = SimpleNamespace(of=lambda job_id: f"what became of {job_id}")
    report = SimpleNamespace(plan=SimpleNamespace(seed=7), figures={"jobs": 1}, traces={"boom": (2, "trace")})
    for violations, code, verdict in (([], 0, "every invariant held"), ([lost], 1, "1 violations")):
        report.violations, report.history = violations, history
        assert show(report, as_json=False) == code
        assert capsys.readouterr().out.endswith(f"seed 7: {verdict}\n")
        assert show(report, as_json=True) == code
        told = json.loads(capsys.readouterr().out)
        assert (told["seed"], told["figures"], told["violations"]) == (7, {"jobs": 1}, [str(one) for one in violations])


def test_a_run_of_jobs_has_their_histories(capsys):
    history = SimpleNamespace(of=lambda job_id: f"what became of {job_id}")
    report = SimpleNamespace(plan=SimpleNamespace(seed=7), figures={}, traces={"boom": (2, "trace")}, history=history)
    report.violations = [Violation("INV-1", "j", "is lost")]
    show_jobs_report(report, as_json=False)
    assert "what became of j\n1 jobs concerned\n" in capsys.readouterr().out
    show_jobs_report(report, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert (told["histories"], told["exceptions"]) == ({"j": ["what became of j"]}, {"boom": 2})


def test_only_those_that_are_named():
    first, second = FAULTS[0], FAULTS[1]
    assert chosen(f"{second.name},{first.name}", FAULTS) == (first, second)
    assert chosen(None, FAULTS) == tuple(FAULTS)
    with pytest.raises(SystemExit, match="unknown: nonsense; known: "):
        chosen(f"{first.name},nonsense", FAULTS)
