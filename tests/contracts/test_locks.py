"""The lock files name what an installation gets exactly, within its ranges, and not where it comes from."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
#: lock → the ranges that it was made of
LOCKS = {
    "requirements.lock": [*PROJECT["dependencies"], *EXTRAS["build"]],
    "requirements-dev.lock": [*PROJECT["dependencies"], *(line for extra in EXTRAS.values() for line in extra)],
}
PIN = re.compile(r"(?P<name>[a-z0-9][a-z0-9.-]*)==(?P<version>[0-9][A-Za-z0-9.+!]*)( ; [^;#@]+)?")


def strangers(text: str) -> list[str]:
    """Lines that are neither a pin nor a comment: an index, a file or a URL would decide where packages come from."""
    return [line for line in text.splitlines() if not line.lstrip().startswith("#") and not PIN.fullmatch(line)]


def pins(text: str) -> set[tuple[str, str]]:
    """Names and versions; a name may have two, for different machines."""
    return {(pin["name"], pin["version"]) for line in text.splitlines() if (pin := PIN.fullmatch(line))}


def out_of_range(ranges: list[str], text: str) -> list[str]:
    """What the project needs and the lock does not pin, or pins to a version that the project does not take."""
    found = []
    for need in map(Requirement, ranges):
        versions = {version for name, version in pins(text) if name == canonicalize_name(need.name)}
        ours = need.name == PROJECT["name"]  # one extra that includes others
        if not ours and (not versions or not all(map(need.specifier.contains, versions))):
            found.append(f"{need}: {sorted(versions)}")
    return found


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_holds_exact_versions_and_nothing_else(name):
    text = (ROOT / name).read_text()
    assert strangers(text) == []
    assert len(pins(text)) > 20


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_is_within_the_ranges_of_the_project(name):
    assert out_of_range(LOCKS[name], (ROOT / name).read_text()) == []


def test_what_is_tested_is_what_runs():
    runtime, dev = (pins((ROOT / name).read_text()) for name in LOCKS)
    assert runtime <= dev


@pytest.mark.parametrize(
    "line",
    [
        "--index-url https://example.org/simple",
        "--find-links /tmp",
        "-r other.txt",
        "click>=8",
        "click @ https://example.org/click.whl",
        "click==8.3.0 @ https://example.org/click.whl",
        "https://example.org/click.whl",
        "click==8.*",
        "click==8.3.0 --hash=sha256:00",
        "",
    ],
)
def test_a_line_that_is_no_pin_is_seen(line):
    assert strangers(f"# made by make lock\nclick==8.3.0\n    # via us\n{line}\n") == [line]


@pytest.mark.parametrize("text", ["", "click==7.0.0", "click==8.3.0 ; a\nclick==9.0.0 ; b"])
def test_a_version_out_of_range_is_seen(text):
    assert len(out_of_range(["click>=8.3,<9"], text)) == 1
