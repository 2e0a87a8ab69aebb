"""What the commands of `make chaos` are told is what they run."""

import dataclasses
import importlib

import pytest

from tests.chaos.faults import FAULTS
from tests.chaos.options import chosen

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


def test_only_those_that_are_named():
    first, second = FAULTS[0], FAULTS[1]
    assert chosen(f"{second.name},{first.name}", FAULTS) == (first, second)
    assert chosen(None, FAULTS) == tuple(FAULTS)
    with pytest.raises(SystemExit, match="unknown: nonsense; known: "):
        chosen(f"{first.name},nonsense", FAULTS)
