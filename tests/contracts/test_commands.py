"""The command line as a whole: its names, and what every command has in common, wherever it was added."""

import io
import logging
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from orchestrator.cli import COMMANDS, gpuorch, run

#: What programs and people rely on: these names stay.
NAMES = """
dev serve worker drain-worker scaler migrate check-config doctor duty leader top
jobs: submit get list wait cancel retry events explain import
queue: stats pause resume retry-failed run
leases: list release
pools: create list show scale drain evict
workers: list
dlq: list show redrive purge
policy: get set
audit: tail
workflows: create show list cancel retry-failed
keys: create list revoke
"""
#: Groups that this version may not have yet; once they are there, they are whole.
LATER = {"keys"}
#: Programs that run on, and those whose output is not about data.
WITHOUT_JSON = {("dev",), ("serve",), ("worker",), ("drain-worker",), ("scaler",), ("run",), ("completion",)}
#: Words that a command needs besides those that its parameters tell.
WORDS = {
    ("jobs", "import"): ["-"],
    ("jobs", "priority"): ["x", "1"],
    ("nodes", "drain"): ["--all"],
    ("nodes", "resume"): ["--all"],
    ("pools", "scale"): ["x", "1"],
    ("pools", "swap"): ["x", "--model", "m"],
    ("policy", "set"): ["agent", "x", "rate=1"],
    ("policy", "get"): ["agent", "x"],
    ("policy", "history"): ["agent", "x"],
    ("policy", "rollback"): ["agent", "x", "--version", "1"],
    ("policy", "delete"): ["agent", "x"],
    ("workflows", "create"): ["-"],
    ("workflows", "add"): ["x", "-"],
    ("duty",): ["publish", "--once"],
    ("run",): ["--min-memory-mb", "1", "true"],
    ("dlq", "redrive"): ["--yes"],
    ("dlq", "purge"): ["--yes"],
    ("queue", "retry-failed"): ["--yes"],
    ("queue", "run"): ["--drain", "--redis-url", "redis://127.0.0.1:1"],
}
#: These outlive servers that are away, or report them.
PATIENT = {("worker",), ("scaler",), ("dev",), ("doctor",), ("check-config",)}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Commands work where they are started, and configure logging for the process."""
    monkeypatch.chdir(tmp_path)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def leaves(group: click.Group = gpuorch, *path: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name in group.list_commands(click.Context(group)):
        found = group.get_command(click.Context(group), name)
        assert found is not None
        if isinstance(found, click.Group):
            yield from leaves(found, *path, name)
            if found.invoke_without_command:
                yield (*path, name), found
        else:
            yield (*path, name), found


TREE = dict(leaves())


def flags(command: click.Command) -> set[str]:
    return {flag for parameter in command.params for flag in parameter.opts}


def words_for(path: tuple[str, ...], command: click.Command) -> list[str]:
    """Arguments that make sense of a command, so that it gets as far as asking its server."""
    arguments = [one for one in command.params if isinstance(one, click.Argument) and one.required]
    return WORDS.get(path, ["x"] * len(arguments))


def promised() -> Iterator[tuple[str, ...]]:
    for line in NAMES.strip().splitlines():
        group, colon, rest = line.partition(":")
        if not colon:
            yield from ((name,) for name in line.split())
        elif group in COMMANDS or group not in LATER:
            yield from ((group, name) for name in rest.split())


@pytest.mark.parametrize("path", list(promised()), ids=" ".join)
def test_every_promised_command_is_there(path):
    assert path in TREE


@pytest.mark.parametrize("path", list(TREE), ids=" ".join)
def test_every_command_and_flag_says_what_it_does(path):
    shown = CliRunner().invoke(gpuorch, [*path, "--help"])
    assert shown.exit_code == 0 and shown.output.startswith("Usage:")
    command = TREE[path]
    assert command.help, "no help"
    assert command.get_short_help_str(limit=1000).strip(), "no short help"


@pytest.mark.parametrize("path", list(TREE), ids=" ".join)
def test_every_command_can_answer_a_program(path):
    assert ("--json" in flags(TREE[path])) == (path not in WITHOUT_JSON)


@pytest.mark.parametrize(
    "path", [path for path, one in TREE.items() if "--url" in flags(one) and path not in PATIENT], ids=" ".join
)
def test_a_server_that_is_away_is_3_and_the_message_helps(path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b'{"job_id": "x", "type": "echo", "payload": {}}')))
    url = "http://127.0.0.1:1"
    code = run([*path, "--url", url, *words_for(path, TREE[path])])
    told = capsys.readouterr().err
    assert code == 3, told
    assert url in told and "gpuorch dev" in told and "GPUORCH_URL" in told and "Traceback" not in told


@pytest.mark.parametrize(
    "path", [path for path, one in TREE.items() if "--database-url" in flags(one) and path not in PATIENT], ids=" ".join
)
def test_a_database_that_is_away_is_3_and_named(path, capsys):
    url = "mysql+pymysql://me:hunter2@127.0.0.1:1/jobs"
    code = run([*path, "--database-url", url, *words_for(path, TREE[path])])
    told = capsys.readouterr().err
    assert code == 3, told
    assert "mysql+pymysql://me:***@127.0.0.1:1/jobs" in told and "hunter2" not in told and "Traceback" not in told


@pytest.mark.parametrize("path", list(TREE), ids=" ".join)
def test_wrong_usage_is_2(path, capsys):
    assert run([*path, "--no-such-flag"]) == 2 or path == ("run",)
    assert "Error" in (told := capsys.readouterr().err) or "--no-such-flag" in told


def test_there_is_something_to_check():
    assert len(TREE) > 50
    assert sum("--url" in flags(command) for command in TREE.values()) > 35
