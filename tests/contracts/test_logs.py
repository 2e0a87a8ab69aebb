"""Log lines are made of constants: an event that is always the same text, and fields from one list (docs/logs.md)."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from orchestrator.telemetry import life

ROOT = Path(__file__).parents[2]
#: Libraries inside other people's programs, whose logs have a format of their own: sentences with their arguments.
ELSEWHERE = ("orchestrator/client/", "orchestrator/bounded/")
#: Has its events in a table, which is read instead.
TABLES = ("orchestrator/telemetry/life.py",)
LEVELS = {"debug", "info", "warning", "error", "exception", "critical", "log"}
#: Give fields to all lines of a block.
BINDERS = {"logs.bind", "logs.configure"}
#: What every file of interest has in its text: parsing the others takes longer than all the rest.
WORDS = re.compile(r"\blogs?\.")
#: Functions that make fields, and which.
MADE = {
    "about": {"job_id", "attempt", "trace_id"},
    "_about": {"job_id", "attempt"},
    "self._about": {"job_id", "attempt", "worker_id"},  # whatever a batcher's items are about
}


class Line(NamedTuple):
    place: str
    event: str | None
    fields: set[str] | None


@cache
def sources() -> dict[str, ast.AST]:
    paths = sorted(path for top in ("orchestrator", "worker") for path in (ROOT / top).rglob("*.py"))
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}
    return {
        name: ast.parse(text, name)
        for name, text in texts.items()
        if not name.startswith(ELSEWHERE) and WORDS.search(text)
    }


def calls(tree: ast.AST, names: set[str]) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and ast.unparse(node.func) in names:
            yield node


def named(value: ast.expr | None, tree: ast.AST) -> set[str] | None:
    """The fields of an `extra`; None when they cannot be read from the source."""
    if value is None:
        return set()
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.BitOr):
        left, right = named(value.left, tree), named(value.right, tree)
        return None if left is None or right is None else left | right
    if isinstance(value, ast.Call):
        return MADE.get(ast.unparse(value.func))
    if isinstance(value, ast.Name):
        return assigned(value.id, tree)
    if not isinstance(value, ast.Dict):
        return None
    found: set[str] = set()
    for key, inner in zip(value.keys, value.values, strict=True):
        if key is None:
            more = named(inner, tree)
            if more is None:
                return None
            found |= more
        elif isinstance(key, ast.Constant):
            found.add(str(key.value))
        else:
            return None
    return found


def assigned(name: str, tree: ast.AST) -> set[str] | None:
    """Of a variable that is given a literal, wherever in the module that is."""
    literals = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Dict)
        and any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
    ]
    found = [named(literal, tree) for literal in literals]
    return set().union(*[one or set() for one in found]) if found and None not in found else None


def lines(name: str, tree: ast.AST) -> list[Line]:
    made = []
    for call in calls(tree, {f"log.{level}" for level in LEVELS}):
        first = call.args[0]
        event = first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else None
        extra = next((keyword.value for keyword in call.keywords if keyword.arg == "extra"), None)
        fields = named(extra, tree)
        made.append(Line(f"{name}:{call.lineno}", event if len(call.args) == 1 else None, fields))
    return made


def bound(tree: ast.AST) -> set[str]:
    """Fields that a block gives to all its lines."""
    return {str(keyword.arg) for call in calls(tree, BINDERS) for keyword in call.keywords}


KINDS = {"jobs", "results", "workflows", "tasks", "events"}  # what `retention` counts


# Functions, since all tests wait while this file is collected.


@cache
def all_lines() -> list[Line]:
    return [line for name, tree in sources().items() if name not in TABLES for line in lines(name, tree)]


def events() -> set[str]:
    return {line.event for line in all_lines() if line.event} | {event for _, event in life.EVENTS.values()}


def fields() -> set[str]:
    of_lines = [line.fields or set() for line in all_lines()]
    return set().union(*of_lines, *map(bound, sources().values())) | KINDS | {"error_kind", "trace_id"}


def documented(heading: str) -> set[str]:
    text = (ROOT / "docs/logs.md").read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return {line.split("|")[1].strip(" `") for line in text.splitlines() if line.startswith("| `")}


def test_every_event_is_a_constant_without_formatting():
    wrong = [line.place for line in all_lines() if line.event is None or "%" in line.event or "\n" in line.event]
    assert wrong == []


def test_every_line_names_its_fields_in_the_source():
    unread = [line.place for line in all_lines() if line.fields is None]
    assert [place.rpartition(":")[0] for place in unread] == ["orchestrator/leader/retention.py"]  # KINDS


def test_the_fields_are_those_of_the_page_and_no_others():
    assert documented("Fields") == fields()


def test_the_events_are_those_of_the_page_and_no_others():
    assert documented("Events") == events()


def test_nothing_is_logged_that_may_hold_a_payload():
    assert not fields() & {"payload", "result", "token", "lease_token", "url_with_password", "headers", "body"}


def test_a_line_about_a_job_tells_the_attempt():
    about_jobs = [line for line in all_lines() if line.fields and "job_id" in line.fields]
    alone = {line.event for line in about_jobs if "attempt" not in (line.fields or ())}
    # Of the job, at whatever attempt it is, or before one could begin.
    assert alone == {"cancel asked", "a job cannot be claimed", "a job cannot even be put off"}


# Each check is able to fail.


@pytest.mark.parametrize(
    ("source", "event", "fields"),
    [
        ('log.info("a")', "a", set()),
        ('log.info(f"a {b}")', None, set()),
        ('log.info("a %s", b)', None, set()),
        ('log.info("a", extra={"b": 1, **c})', "a", None),
        ('x = {"d": 1}\nlog.info("a", extra={"b": 1} | x)', "a", {"b", "d"}),
        ('log.info("a", extra={name: 1})', "a", None),
        ('log.exception("a", extra=about(claim))', "a", MADE["about"]),
    ],
)
def test_a_line_is_read_as_it_is(source, event, fields):
    (line,) = lines("x.py", ast.parse(source))
    assert (line.event, line.fields) == (event, fields)


def test_there_is_something_to_check():
    assert len(all_lines()) > 60
