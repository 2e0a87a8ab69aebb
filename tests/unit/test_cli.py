"""The command line: what it takes, what it prints, and how it ends."""

import io
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import closing, suppress
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from orchestrator.cli import COMMANDS, dev, gpuorch, output, run, servers, versions
from orchestrator.cli import audit as audit_command
from orchestrator.cli import fleet as fleet_command
from orchestrator.cli import jobs as jobs_command
from orchestrator.cli import pools as pools_command
from orchestrator.cli import workflows as workflows_command
from orchestrator.cli.describing import FLAGS
from orchestrator.cli.schema import opened
from orchestrator.cli.servers import stop_on_sigterm, undisturbed
from orchestrator.cli.versions import Version
from orchestrator.client.api import Api
from orchestrator.client.errors import ServerUnreachable
from orchestrator.embedded.directory import DataDir
from orchestrator.embedded.valkey import Valkey
from orchestrator.errors import ConfigError, OrchestratorError, RedisUnavailable
from orchestrator.jobs import JobSpec
from orchestrator.placement import Ask, GpuView, too_large_for_all
from orchestrator.schedules import NOT_RECURRING
from orchestrator.settings import Settings
from orchestrator.store import revisions, schema
from tests.factories import rows, submit
from tests.receiver import receiving
from tests.waiting import wait_until
from worker.answers import trace

SECRET_URL = "mysql+pymysql://me:hunter2@127.0.0.1:1/jobs"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Each test has a directory of its own as the current one: defaults are relative to it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GPUORCH_URL", raising=False)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers  # commands configure logging for the process, and write to the captured stderr
    root.setLevel(level)


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "orchestrator", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


# --- Ctrl-C ---


IN_A_CLASS = """
class Field:
    def __set_name__(self, owner, name):
        raise KeyboardInterrupt

class Made:
    field = Field()
"""


@pytest.mark.parametrize("module", ["raise KeyboardInterrupt", IN_A_CLASS])
def test_ctrl_c_while_its_libraries_are_imported_is_quiet(tmp_path, module):
    (tmp_path / "click.py").write_text(module)
    ended = command("dev", PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


@pytest.fixture
def unwinding(monkeypatch):
    """Signals as programs that serve have them, until the end of the test."""
    monkeypatch.setattr(servers, "_heard", [])
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    stop_on_sigterm()
    yield
    for one, handler in before.items():
        signal.signal(one, handler)


@pytest.mark.usefixtures("unwinding")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_for_the_end_of_what_must_not_be_disturbed(number):
    finished = False
    with pytest.raises(KeyboardInterrupt), undisturbed():
        signal.raise_signal(number)
        finished = True
    assert finished
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(number)


@pytest.mark.usefixtures("unwinding")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_got_lost_while_it_starts_ends_it_once_it_has(number, monkeypatch):
    """Python lets no exception out of some callbacks: it tells of it, and goes on."""
    ready: list[str] = []
    ended: list[int] = []

    def serve(_settings, ready, _stopping):
        with suppress(KeyboardInterrupt):
            signal.raise_signal(number)
        for one in (signal.SIGINT, signal.SIGTERM):  # as the HTTP server does
            signal.signal(one, lambda number, _frame: ended.append(number))
        ready("http://here")

    monkeypatch.setattr("orchestrator.api.server.serve", serve)
    servers.run_api(Settings(), ready.append)
    assert (ready, ended) == (["http://here"], [number])


def test_an_error_inside_comes_before_the_signal():
    with pytest.raises(ValueError, match="first"), undisturbed():
        signal.raise_signal(signal.SIGINT)
        raise ValueError("first")


# --- usage ---


def all_commands(group: click.Group, *path: str):
    for name in group.list_commands(click.Context(group)):
        found = group.get_command(click.Context(group), name)
        assert found is not None
        yield (*path, name)
        if isinstance(found, click.Group):
            yield from all_commands(found, *path, name)


def test_every_command_has_help():
    found = list(all_commands(gpuorch))
    assert {path[0] for path in found} == set(COMMANDS)
    for path in found:
        result = CliRunner().invoke(gpuorch, [*path, "--help"])
        assert result.exit_code == 0, (path, result.output)
        assert result.output.startswith("Usage: gpuorch") or "Usage:" in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["no-such-command"],
        ["jobs", "submit"],
        ["jobs", "submit", "echo", "--payload", "{"],
        ["jobs", "submit", "echo", "--payload", "@missing.json"],
        ["jobs", "list", "--status", "unheard-of"],
        ["jobs", "list", "--limit", "0"],
        ["jobs", "list", "--limit", "1e3"],
        ["jobs", "get", "a", "--wait", "-1"],
        ["jobs", "wait", "a", "--timeout", "soon"],
        ["jobs", "submit", "echo", "--min-memory-mb", "2GB"],
        ["gpus", "--url", "nonsense"],
        ["gpus", "--url", ""],
        ["gpus", "--url", "http://"],
        ["gpus", "--url", "ftp://127.0.0.1"],
        ["gpus", "--url", "http://host\n"],
        ["gpus", "--url", "http://127.0.0.1:port"],
        ["duty", "publish"],
        ["dlq", "redrive", "--rate", "0"],
        ["dlq", "purge", "--max", "0"],
        ["dlq", "purge", "--rate", "1"],
        ["dlq", "list", "--limit", "501"],
        ["dlq", "show"],
        ["pools", "create", "p", "--workers", "-1"],
        ["pools", "create", "p", "--metadata", "{"],
        ["pools", "create", "p", "--provider", "aws"],
        ["pools", "scale", "p"],
        ["pools", "scale", "p", "many"],
        ["pools", "swap", "p"],
        ["pools", "drain"],
        ["pools", "drain", "p", "--timeout", "-1"],
        ["pools", "delete"],
        ["nodes", "drain"],
        ["nodes", "drain", "n", "--all"],
        ["nodes", "resume"],
        ["serve", "--port", "many"],
        ["check-config", "--no-such-flag"],
    ],
)
def test_wrong_usage_is_2(arguments, capsys):
    assert run(arguments) == 2
    assert "Error" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["job", "get", "x"], "No such command 'job'. Did you mean 'jobs'?"),
        (["work"], "No such command 'work'. Did you mean 'worker' or 'workers' or 'workflows'?"),
        (["xyzzy"], "No such command 'xyzzy'."),
        (["--job"], "No such option '--job'."),
    ],
)
def test_a_command_that_does_not_exist_names_those_like_it(arguments, told, capsys):
    assert run(arguments) == 2
    assert capsys.readouterr().err.endswith(f"Error: {told}\n")


def test_as_a_program():
    version, wrong = command("--version"), command("nonsense")
    assert (version.returncode, version.stdout) == (0, "gpuorch, version 0.1.0\n")
    assert wrong.returncode == 2 and "nonsense" in wrong.stderr


def test_named_errors_end_as_one_line_and_1(monkeypatch, capsys):
    @click.command()
    def broken():
        raise OrchestratorError("the message")

    monkeypatch.setattr(gpuorch, "get_command", lambda _ctx, _name: broken)
    assert run(["broken"]) == 1
    assert capsys.readouterr().err == "gpuorch: the message\n"


def test_ctrl_c_is_130_and_quiet(monkeypatch, capsys):
    @click.command()
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(gpuorch, "get_command", lambda _ctx, _name: interrupted)
    assert run(["interrupted"]) == 130
    assert capsys.readouterr().err.strip() == ""


# --- settings ---


def test_check_config_shows_value_and_source_without_passwords(tmp_path, capsys, monkeypatch):
    (tmp_path / "file.toml").write_text('worker_slots = 7\nredis_url = "redis://:sesame@127.0.0.1/0"\n')
    monkeypatch.setenv("ORCH_DATABASE_URL", SECRET_URL)
    monkeypatch.setenv("ORCH_WORKER_SLOTS", "3")
    assert run(["check-config", "--config", "file.toml", "--port", "9000"]) == 0
    shown = capsys.readouterr().out
    lines = {line.split()[0]: line for line in shown.splitlines()}
    assert lines["port"].split() == ["port", "9000", "flag"]
    assert lines["worker_slots"].split() == ["worker_slots", "7", "file", "file.toml"]
    assert lines["database_url"].split()[-2:] == ["environment", "ORCH_DATABASE_URL"]
    assert lines["host"].split() == ["host", "127.0.0.1", "default"]
    assert "hunter2" not in shown and "sesame" not in shown and "***" in shown
    assert len({line.rindex(line.split("  ")[-1].strip()) for line in shown.splitlines()[1:4]}) == 1


def test_check_config_as_json(capsys):
    arguments = ["check-config", "--json", "--handlers", "one,two", "--handlers", "three", "--gpus", "1x100"]
    assert run(arguments) == 0
    rows = {row["field"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["worker_handlers"]["value"] == "one,two,three"
    assert rows["gpu_backend"] == {**rows["gpu_backend"], "value": "sim:1x100", "source": "flag"}
    assert all(row["description"] for row in rows.values())


def test_check_config_lists_every_problem(capsys, monkeypatch):
    monkeypatch.setenv("ORCH_PROT", "1")
    monkeypatch.setenv("ORCH_DATABASE_URL", "mysql://me:hunter2@[/x")
    assert run(["check-config", "--port", "70000"]) == 1
    errors = capsys.readouterr().err
    assert "3 problems" in errors and "did you mean ORCH_PORT" in errors and "70000" in errors
    assert "hunter2" not in errors


@pytest.mark.parametrize(
    ("flags", "variables"),
    [
        (["--port", "65536"], {"ORCH_PORT": "65536"}),
        (["--workers", "0"], {"ORCH_WORKER_SLOTS": "0"}),
        (["--gpus", "abc"], {"ORCH_GPU_BACKEND": "abc"}),
    ],
)
def test_a_value_that_a_flag_may_not_have_is_wrong_usage(flags, variables, capsys, monkeypatch):
    assert run(["dev", *flags]) == 2
    told = capsys.readouterr().err
    assert "(flag)" in told and "gpuorch dev --help" in told
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert run(["dev"]) == 1, "the operator's, not the caller's"
    assert "(environment ORCH_" in capsys.readouterr().err


def test_serve_refuses_a_network(tmp_path, capsys):
    """There are no keys yet."""
    assert run(["serve", "--host", "0.0.0.0"]) == 2  # noqa: S104 - to refuse it
    told = capsys.readouterr().err
    assert "host" in told and "loopback" in told and "no authentication yet" in told and "Traceback" not in told
    assert list(tmp_path.iterdir()) == []


# --- database ---


NEEDS_TABLES = [["migrate", "--check"], ["serve"], ["worker"], ["leader"], ["duty", "publish", "--once"]]


@pytest.mark.parametrize("arguments", [*NEEDS_TABLES, ["doctor", "--gpus", "none"]])
def test_where_no_database_is_none_is_made(arguments, tmp_path, capsys):
    assert run(arguments) == 1
    told = "".join(capsys.readouterr())
    assert (
        f"there is no database at {tmp_path}/.data/orchestrator.db; name yours with ORCH_DATABASE_URL, ORCH_DATA_DIR"
        in told
    )
    assert (
        all(way in told for way in ("--config", "gpuorch dev; a new one: gpuorch migrate")) and "Traceback" not in told
    )
    assert list(tmp_path.iterdir()) == []


def test_migrate_and_what_refuses_to_run_before(tmp_path, capsys):
    (tmp_path / ".data").mkdir()
    (tmp_path / ".data" / "orchestrator.db").touch()
    for arguments in NEEDS_TABLES:
        assert run(arguments) == 1, arguments
        assert "is empty, this version needs" in (told := capsys.readouterr().err) and "run: gpuorch migrate" in told
    assert run(["migrate"]) == 0
    assert "schema: empty → " in capsys.readouterr().out
    assert run(["migrate", "--check"]) == 0
    assert run(["leader"]) == 0
    assert "nobody leads" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "text", "enough"),
    [
        ("mysql", "10.6.0", True),
        ("mysql", "11.4.2", True),
        ("mysql", "10.5.29", False),
        ("mysql", "8.4.6", False),  # no MariaDB
        ("redis", "7.0.15", True),
        ("redis", "8.0-rc1", True),
        ("redis", "255.255.255", True),  # built from its main branch
        ("redis", "6.2.21", False),
        ("valkey", "7.2.5", True),
        ("sqlite", "3.34.1", False),
        ("redis", "unknown", True),
        ("mysql", "", True),
    ],
)
def test_which_versions_are_new_enough(kind, text, enough):
    assert Version(kind, text).new_enough is enough


@pytest.fixture
def unstarted(monkeypatch):
    """What would run for ever returns at once."""
    monkeypatch.setattr("worker.supervisor.run", lambda _settings: 0)
    monkeypatch.setattr("orchestrator.api.server.serve", lambda *_: None)
    monkeypatch.setattr("orchestrator.cli.servers.stop_on_sigterm", lambda: None)
    monkeypatch.setattr(sys, "path", sys.path[:])


@pytest.mark.usefixtures("unstarted")
@pytest.mark.parametrize("arguments", [["serve"], ["worker"]])
def test_servers_that_are_too_old_are_refused_at_the_start(arguments, valkey_server, capsys, monkeypatch):
    run(["migrate"])
    here = [*arguments, "--redis-url", valkey_server.url]
    assert run(here) == 0
    monkeypatch.setitem(versions.OLDEST, "valkey", ("Valkey", (99, 1)))
    capsys.readouterr()
    assert run(here) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"gpuorch: {valkey_server.url} has version ") and "needs Valkey 99.1 or later;" in told
    assert "redis_url" in told
    assert run(arguments) == 0  # nobody answers there, and nobody is judged
    monkeypatch.setitem(versions.OLDEST, "sqlite", ("SQLite", (99, 0)))
    assert run(arguments) == 1
    assert "needs SQLite 99.0 or later; upgrade it, or name another: database_url" in capsys.readouterr().err


@pytest.mark.usefixtures("unstarted")
def test_what_a_running_dev_holds_is_served_by_nobody_with_another_redis(capsys):
    run(["migrate"])
    theirs, others = [["serve"], ["worker"]], ["queue", "run", "--redis-url", "redis://127.0.0.1:1/0"]
    held = DataDir(Path(".data"))
    own = ["--redis-url", "redis://:secret@127.0.0.1:1/0"]
    for arguments in (*theirs, others, ["serve", *own], ["serve", "--database-url", "sqlite:///.data/orchestrator.db"]):
        assert run(arguments) == 1, arguments
        told = capsys.readouterr().err
        assert told.startswith(f"gpuorch: data_dir .data is in use by process {os.getpid()}; stop that one, or ")
    Path(".data/valkey.conf").write_text("port 1\nrequirepass secret\n")
    for arguments in theirs:
        assert run(arguments) == 1
        assert run([*arguments, *own]) == 0, "its own worker"
    shutil.copyfile(".data/orchestrator.db", ".data/other.db")
    assert run(["serve", "--database-url", "sqlite:///.data/other.db"]) == 0
    held.close()
    assert [run(arguments) for arguments in theirs] == [0, 0], "nobody holds it any more"


@pytest.mark.usefixtures("unstarted")
def test_no_table_is_made_in_a_database_that_is_too_old(capsys, monkeypatch):
    monkeypatch.setitem(versions.OLDEST, "sqlite", ("SQLite", (99, 0)))
    for arguments in (["migrate"], ["serve", "--migrate"]):
        assert run(arguments) == 1
        assert "needs SQLite 99.0 or later" in capsys.readouterr().err
    with opened(Settings(), create=True) as db:
        assert revisions.current(db) is None


@pytest.mark.parametrize("more", [[], ["--drain"], ["--data-dir", "elsewhere"]])
def test_where_nobody_ever_worked_a_queue_has_nothing_to_run_and_nothing_is_made(more, tmp_path, capsys):
    assert run(["queue", "run", *more]) == 1
    told = capsys.readouterr().err
    assert f"nothing to run: no database is at {tmp_path}/" in told and "--data-dir" in told
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [["worker"], ["dev"], ["queue", "run", "--drain"]])
def test_handlers_that_do_not_exist_are_refused_before_anything_starts(arguments, tmp_path, capsys):
    assert run([*arguments, "--handlers", "no_such_module"]) == 1
    told = capsys.readouterr()
    assert told.err.startswith("gpuorch: worker_handlers = 'no_such_module': there is no module") and not told.out
    assert not list(tmp_path.iterdir())


def test_handlers_beside_the_person_who_starts_a_worker_are_found(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path[:])
    (tmp_path / "beside_me.py").write_text("raise RuntimeError('a supervisor imports no handlers')\n")
    assert run(["worker", "--handlers", "beside_me"]) == 1
    assert "gpuorch migrate" in capsys.readouterr().err  # it came as far as the database


def test_a_database_that_is_away_is_3_and_keeps_its_password(capsys):
    assert run(["migrate", "--database-url", SECRET_URL]) == 3
    errors = capsys.readouterr().err
    assert errors.startswith("gpuorch: mysql+pymysql://me:***@127.0.0.1:1/jobs") and "hunter2" not in errors


def test_unknown_duty_names_those_there_are(capsys):
    run(["migrate"])
    assert run(["duty", "dance", "--once"]) == 2
    assert "reclaim" in capsys.readouterr().err


def test_a_duty_by_hand(valkey_server, capsys):
    valkey_server.flush()
    run(["migrate"])
    capsys.readouterr()
    assert run(["duty", "reclaim", "--once", "--json", "--redis-url", valkey_server.url]) == 0
    assert json.loads(capsys.readouterr().out) == {"duty": "reclaim", "count": 0, "epoch": 1}


def test_a_duty_beside_a_running_dev_is_done_in_its_redis(capsys, monkeypatch):
    monkeypatch.setenv("ORCH_DATA_DIR", "elsewhere")
    run(["migrate"])
    publish, database_url = ["duty", "publish", "--once"], "sqlite:///elsewhere/orchestrator.db"
    refused = [*publish, "--redis-url", "redis://127.0.0.1:1/0"]
    with opened(Settings(database_url=database_url)) as db, closing(DataDir(Path("elsewhere"))) as held:
        valkey = Valkey(held)
        valkey.start()
        submit(db)
        for arguments in (refused, [*publish, "--database-url", database_url]):
            assert run(arguments) == 1
            assert f"data_dir elsewhere is in use by process {os.getpid()};" in capsys.readouterr().err
        assert run(publish) == 0, capsys.readouterr()
        assert "publish: 1 done" in capsys.readouterr().out
        valkey.stop()
        submit(db)
        told = [row.event_type for row in rows(db, schema.audit)]
    assert told.count("duty.run") == 1, "what is refused did not run"
    assert run(refused) == 3, "nobody holds it: who names a Redis means it"


def test_what_a_command_changes_by_itself_names_its_user(valkey_server, capsys, monkeypatch):
    monkeypatch.setattr("getpass.getuser", lambda: "ann")
    valkey_server.flush()
    run(["migrate"])
    assert run(["duty", "retention", "--once", "--redis-url", valkey_server.url]) == 0
    with opened(Settings()) as db:
        told = [(row.event_type, row.actor) for row in rows(db, schema.audit)]
    # Nobody led: the duty made itself a leader for a moment.
    assert [told[0], told[-1]] == [("schema.migrated", "cli:ann"), ("duty.run", "cli:ann")]
    assert [event for event, _ in told] == ["schema.migrated", "leader.elected", "duty.run"]


def test_doctor(valkey_server, capsys):
    healthy = ["doctor", "--redis-url", valkey_server.url, "--gpus", "none"]
    assert run(healthy) == 1
    assert capsys.readouterr().out.splitlines()[1].startswith("✓ redis: ")  # that there is no database hides nothing
    with opened(Settings(), create=True) as db:
        db.ping()
    assert run(healthy) == 1
    assert "✗ schema: revision none" in capsys.readouterr().out
    run(["migrate"])
    capsys.readouterr()
    assert run(healthy) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("✓ ") for line in lines) and len(lines) == 7, lines


def test_a_redis_that_may_evict_or_forget_is_told(valkey_server, capsys, caplog):
    settings = Settings(redis_url=valkey_server.url)
    servers.require_redis(settings)
    assert caplog.records == []
    with valkey_server.client() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        client.config_set("appendonly", "no")
        try:
            servers.require_redis(settings)
            run(["doctor", "--redis-url", valkey_server.url, "--gpus", "none"])
        finally:
            client.config_set("maxmemory-policy", "noeviction")
            client.config_set("appendonly", "yes")
    (record,) = caplog.records
    assert (record.levelname, record.getMessage()) == ("WARNING", "redis endangers delivery")
    assert "allkeys-lru; set it to noeviction" in record.reason
    shown = capsys.readouterr().out
    assert "✓ appendonly: no; " in shown and "loses events of ingest_events that are no jobs yet" in shown
    servers.require_redis(Settings(redis_url="redis://127.0.0.1:1"))  # one that is away is waited for


def test_doctor_tries_where_spans_should_go(valkey_server, capsys, monkeypatch):
    with receiving() as receiver:
        monkeypatch.setenv("ORCH_OTLP_ENDPOINT", receiver.url)
        run(["doctor", "--redis-url", valkey_server.url, "--gpus", "none"])
        assert f"✓ tracing: {receiver.url}/v1/traces takes spans" in capsys.readouterr().out
        receiver.broken = True
        assert run(["doctor", "--redis-url", valkey_server.url, "--gpus", "none"]) == 1
        assert f"✗ tracing: {receiver.url}/v1/traces does not take spans" in capsys.readouterr().out


def test_doctor_where_dev_has_run_says_that_it_does_not(capsys, monkeypatch):
    def refused(settings):
        raise RedisUnavailable("Connection refused")

    def told(*flags):
        assert run(["doctor", "--json", "--gpus", "none", *flags]) == 1
        return [found["detail"] for found in json.loads(capsys.readouterr().out) if "dev" in found["detail"]]

    monkeypatch.setattr("orchestrator.stream.server.describe", refused)
    with opened(Settings(), create=True) as db:
        db.ping()
    assert told() == []
    (Settings().data_dir / "valkey.conf").write_text("")
    (detail,) = told()
    assert detail.endswith("Connection refused; `gpuorch dev` does not run here: start it, or set ORCH_REDIS_URL")
    assert told("--redis-url", "redis://127.0.0.1:1") == []


def test_doctor_says_what_is_broken(capsys):
    arguments = [
        "doctor",
        "--json",
        "--database-url",
        SECRET_URL,
        "--redis-url",
        "redis://127.0.0.1:1",
        "--gpus",
        "none",
    ]
    assert run(arguments) == 1
    shown = capsys.readouterr().out
    assert {item["check"]: item["ok"] for item in json.loads(shown)} == {
        "database": False,
        "clock": False,
        "schema": False,
        "redis": False,
        "gpus": True,
    }
    assert "hunter2" not in shown


# --- HTTP ---


class FakeServer(ThreadingHTTPServer):
    """Answers what the test puts into `answers`, and remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), FakeHandler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.answers: list[tuple[int, object]] = []
        self.asked: list[tuple[str, str, object]] = []


class FakeHandler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.asked.append((self.command, self.path, json.loads(body) if body else None))
        status, answer = self.server.answers.pop(0)
        text = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_POST = do_PATCH = do_PUT = do_DELETE = do_GET  # noqa: N815 - the names that the library looks for

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with FakeServer() as fake:
        thread = threading.Thread(target=fake.serve_forever, args=[0.01])
        thread.start()
        yield fake
        fake.shutdown()
        thread.join()


def test_an_unreachable_server_is_3_and_says_what_to_try(capsys):
    url = "http://127.0.0.1:1"
    for arguments in (
        ["gpus"],
        ["jobs", "get", "a"],
        ["jobs", "submit", "echo"],
        ["leases", "list", "--json"],
        ["jobs", "cancel", "a"],
        ["jobs", "retry", "a"],
        ["dlq", "list"],
        ["dlq", "show", "a"],
        ["dlq", "purge", "--yes"],
        ["pools", "list"],
        ["pools", "drain", "p", "--wait"],
        ["pools", "delete", "p"],
        ["nodes", "drain", "--all"],
    ):
        assert run([*arguments, "--url", url]) == 3
        errors = capsys.readouterr().err
        assert url in errors and "gpuorch dev" in errors and "GPUORCH_URL" in errors


def test_a_proxy_is_not_asked_for_this_machine(server, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("GPUORCH_URL", server.url)
    server.answers = [(200, {"gpus": []})]
    assert run(["gpus"]) == 0


def test_submit_sends_what_was_given_and_nothing_else(server, capsys, tmp_path):
    server.answers = [(202, {"job_id": "j", "status": "pending", "created": True})] * 2
    assert run(["jobs", "submit", "echo", "--url", server.url]) == 0
    (tmp_path / "payload.json").write_text('{"a": 1}')
    flags = ["--payload", "@payload.json", "--priority", "high", "--min-memory-mb", "5", "--job-id", "j"]
    assert run(["jobs", "submit", "echo", *flags, "--url", server.url]) == 0
    bodies = [body for _, _, body in server.asked]
    # An id of its own, so that it can be sent again.
    assert bodies[0].pop("job_id") and bodies[0] == {"type": "echo", "payload": {}}
    assert bodies[1] == {
        "type": "echo",
        "payload": {"a": 1},
        "priority": "HIGH",
        "min_memory_mb": 5,
        "job_id": "j",
    }
    assert capsys.readouterr().out == "j  pending\n" * 2


#: A value for each field of a job's body, as it is typed and as it is sent.
TYPED: dict[str, tuple[list[str], object]] = {
    "payload": (['{"a": 1}'], {"a": 1}),
    "job_id": (["j"], "j"),
    "agent": (["me"], "me"),
    "pool_id": (["chat"], "chat"),
    "model_id": (["llama"], "llama"),
    "priority": (["-5"], -5),
    "min_memory_mb": (["0"], 0),
    "gpu_count": (["2"], 2),
    "cpu_fallback": ([], True),
    "cost_units": (["0"], 0),
    "constraints": (["quiet"], {"quiet": True}),
    "workflow_id": (["w"], "w"),
    "expected_duration_sec": (["1.5"], 1.5),
    "earliest_start_at": (["2030-01-31T12:00:00Z"], "2030-01-31T12:00:00Z"),
    "deadline_at": (["2030-01-31T13:00:00+02:00"], "2030-01-31T13:00:00+02:00"),
    "max_runtime_sec": (["60"], 60),
    "max_attempts": (["3"], 3),
    "retry_base_sec": (["1"], 1),
    "retry_cap_sec": (["5"], 5),
    "concurrency_keys": (["host:a", "host:b"], ["host:a", "host:b"]),
    "tags": (["x", "y"], ["x", "y"]),
}


def typed(fields: Iterable[str]) -> list[str]:
    """The flags that give each of these fields its value."""
    words = []
    for name in fields:
        flag, _ = FLAGS[name]
        values, _ = TYPED[name]
        words += [word for value in values for word in (flag, value)] or [flag]
    return words


def test_every_field_of_a_job_has_a_flag(server):
    fields = [name for name in JobSpec.model_fields if name != "type"]
    server.answers = [(202, {"job_id": "j", "status": "pending"}), (201, SCHEDULE)]
    assert run(["jobs", "submit", "echo", *typed(fields), "--url", server.url]) == 0
    assert server.asked[0][2] == {"type": "echo"} | {name: TYPED[name][1] for name in fields}
    fields = [name for name in fields if name not in NOT_RECURRING]
    assert run(["schedules", "set", "s", "echo", "--every", "5", *typed(fields), "--url", server.url]) == 0
    assert server.asked[1][2]["job"] == {"type": "echo"} | {name: TYPED[name][1] for name in fields}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["no spaces"], "TYPE"),
        (["echo", "--gpu-count", "65"], "1<=x<=64"),
        (["echo", "--max-runtime", "0"], "0<x<="),
        (["echo", "--deadline", "tomorrow"], "--deadline"),
        (["echo", "--deadline", "2030-01-31T12:00:00"], "--deadline"),
        (["echo", "--priority", "urgent"], "--priority: must be LOW, NORMAL, HIGH or a whole number of -100…100\n"),
        (["echo", "--constraint", "loud"], "--constraint: must be 'quiet'\n"),
        (["echo", "--concurrency-key", "pool:a"], "--concurrency-key"),
        (["echo", *(["--tag", "a"] * 33)], "--tag: must have at most"),
        (["echo", "--tag", "a", "--tag", ""], "--tag: must have at least 1 characters\n"),
        (["echo", "--payload", "[]"], "--payload"),
    ],
)
def test_a_job_that_no_server_would_take_is_wrong_usage(words, told, server, capsys):
    for command in (["jobs", "submit", *words], ["schedules", "set", "s", *words]):
        if "--deadline" not in words or command[0] == "jobs":
            assert run([*command, "--url", server.url]) == 2
            assert told in capsys.readouterr().err
    assert server.asked == []


@pytest.mark.parametrize(
    ("payload", "told"),
    [
        ('{"x": NaN}', "it is not JSON: it has no NaN"),
        ('{"x": -Infinity}', "it is not JSON: it has no -Infinity"),
        ('{"x": 1e400}', "it is not plain JSON: it has no NaN, and no number beyond 1.7e308"),
        ('{"x": "\\ud800"}', "it is not plain JSON: a text has half of a character (a lone surrogate)"),
        ('{"x": "\udcff"}', "it is not UTF-8"),
        ('{"x": %s}' % ("9" * 5000), "it has a whole number of thousands of digits"),
        ('{"x": 1, "x": 2}', "it is ambiguous: an object has the same key twice"),
        ('{"x":' * 100_000, "it is nested too deeply"),
        ("{", "it is not JSON: "),
        ("@absent.json", "absent.json: No such file or directory"),
    ],
    ids=["nan", "infinity", "1e400", "escaped half", "half", "digits", "twice", "deep", "cut", "absent"],
)
@pytest.mark.parametrize("how", ["flag", "file", "input"])
def test_a_payload_that_no_server_would_read_is_wrong_usage(payload, told, how, server, capsys, monkeypatch, tmp_path):
    raw, given = os.fsencode(payload), payload
    if payload.startswith("{") and how != "flag":
        (tmp_path / "payload.json").write_bytes(raw)
        given = f"@{tmp_path / 'payload.json'}" if how == "file" else "-"
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))
    assert run(["jobs", "submit", "echo", "--payload", given, "--url", server.url]) == 2
    assert f"Invalid value for --payload: {told}" in capsys.readouterr().err
    assert server.asked == []


def test_arguments_that_are_no_text(server, capsys):
    """What a shell passes that is not UTF-8 arrives as halves of characters."""
    server.answers = [(404, {"code": "job_not_found", "detail": "no"})] * 2
    assert run(["pools", "show", "a\udcff/..", "--url", server.url]) == 1
    assert run(["jobs", "list", "--cursor", "\udcff", "--url", server.url]) == 1
    one, page = (path for _, path, _ in server.asked)
    assert one == "/workers/pool/a%3F%2F.." and "cursor=%3F" in page


def test_submit_says_for_how_long_it_tries(server, capsys):
    paused = {"code": "paused", "detail": "pool:p is paused; \x1b resume it", "retry_after": 0.01}
    server.answers = [(503, paused), (503, paused), (202, {"job_id": "j", "status": "pending"})]
    assert run(["jobs", "submit", "echo", "--patience", "90.5", "--url", server.url]) == 0
    why = "503 paused: pool:p is paused; \N{REPLACEMENT CHARACTER} resume it"
    assert capsys.readouterr().err == f"waiting: {why}; trying for up to 90.5 s (--patience)\n"


def test_a_refusal_is_1_with_the_server_s_words(server, capsys):
    server.answers = [(409, {"code": "job_conflict", "detail": "use a new job_id"}), (502, b"<html>")]
    assert run(["jobs", "submit", "echo", "--url", server.url]) == 1
    assert capsys.readouterr().err == "gpuorch: 409 job_conflict: use a new job_id\n"
    assert run(["gpus", "--url", server.url]) == 1
    assert "is this a gpuorch server?" in capsys.readouterr().err


@pytest.mark.parametrize("body", [b"[]", b"null", b'"ok"', b"hello"])
def test_what_answers_otherwise_is_no_server_of_ours(server, body, capsys):
    server.answers = [(200, body)]
    assert run(["jobs", "list", "--url", server.url]) == 1
    assert "is this a gpuorch server?" in capsys.readouterr().err


@pytest.mark.parametrize(("status", "code"), [("done", 0), ("skipped", 0), ("failed", 1), ("dead_letter", 1)])
def test_wait_polls_until_the_end_and_tells_how_it_ended(server, status, code, capsys):
    server.answers = [(200, {"job_id": "a:b", "status": state}) for state in ("claimed", "running", status)]
    assert run(["jobs", "wait", "a:b", "--json", "--url", server.url]) == code
    assert json.loads(capsys.readouterr().out)["status"] == status
    assert {path.split("?")[0] for _, path, _ in server.asked} == {"/jobs/a%3Ab"}
    assert all("wait=" in path for _, path, _ in server.asked)


def test_wait_tells_what_keeps_the_job_waiting_unless_that_passes_by_itself(server, capsys):
    def explained(message, **lasts):
        return (200, {"job_id": "a", "message": message} | lasts)

    pending = (200, {"job_id": "a", "status": "pending"})
    handler = explained("no live worker has a handler\x1b[31m", lasts=True)
    said = [
        handler,
        handler,
        explained("3 jobs are before it", lasts=False),
        explained("a server of an older version does not say it"),
        (500, {"code": "internal", "detail": "a bug in explaining costs no wait"}),
        explained("an operator paused it", lasts=True),
    ]
    server.answers = [one for why in said for one in (pending, why)]
    server.answers += [(200, {"job_id": "a", "status": state}) for state in ("running", "done")]
    assert run(["jobs", "wait", "a", "--json", "--url", server.url]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["status"] == "done"
    told = ["no live worker has a handler\N{REPLACEMENT CHARACTER}[31m", "an operator paused it"]
    assert shown.err.splitlines() == [f"waiting: {why}" for why in told]
    paths = [path for _, path, _ in server.asked]
    assert paths[:3] == ["/jobs/a?wait=3.000", "/jobs/a/explain", "/jobs/a?wait=25.000"]
    assert all("explain" not in path for path in paths[-2:]), "it runs"


def test_a_submitted_job_may_be_waited_for(server, capsys):
    submitted = (202, {"job_id": "a", "status": "pending", "created": True})
    for flags, out in (([], "a  pending\njob_id  a\nstatus  failed\n"), (["--json"], None)):
        server.answers = [submitted, (200, {"job_id": "a", "status": "failed"})]
        assert run(["jobs", "submit", "echo", "--wait", *flags, "--url", server.url]) == 1
        shown = capsys.readouterr()
        assert shown.out == out if out else json.loads(shown.out) == {"job_id": "a", "status": "failed"}
        assert shown.err == ("" if out else "a\n"), "its id, for whoever does not wait to the end"
    server.answers = [submitted, (200, {"job_id": "a", "status": "done"})]
    assert run(["jobs", "submit", "echo", "--wait", "--url", server.url]) == 0


def test_an_import_that_begins_behind_the_end_of_its_file_says_so(server, capsys):
    """Right behind it nothing is wrong: an import that was stopped there is gone on with so."""
    Path("jobs.jsonl").write_text('{"type": "echo"}\n' * 5)
    for line, code in (("512001", 1), ("7", 1), ("6", 0)):
        assert run(["jobs", "import", "jobs.jsonl", "--from-line", line, "--url", server.url]) == code
        told = "" if code == 0 else f"gpuorch: there are only 5 lines: none can be read from line {line} on\n"
        shown = capsys.readouterr()
        assert (shown.err, server.asked) == (told, []) and bool(shown.out) is (code == 0)


def test_wait_says_when_its_time_is_over(server, capsys):
    server.answers = [(200, {"job_id": "a", "status": "running"})]
    assert run(["jobs", "wait", "a", "--timeout", "0", "--url", server.url]) == 1
    shown = capsys.readouterr()
    assert shown.out == "job_id  a\nstatus  running\n"
    assert shown.err == "gpuorch: a has not ended within 0 s; it goes on\n"


def test_get_without_wait_asks_once(server, capsys):
    server.answers = [(200, {"job_id": "a", "status": "pending", "last_error": None, "result": {}})]
    assert run(["jobs", "get", "a", "--url", server.url]) == 0
    assert server.asked == [("GET", "/jobs/a", None)]
    assert capsys.readouterr().out == "job_id  a\nstatus  pending\nresult  {}\n"


def test_listings(server, capsys):
    server.answers = [
        (200, {"jobs": [{"job_id": "a", "status": "done"}], "next_cursor": "more"}),
        (200, {"events": [{"ts": "t", "event_type": "job.done", "details": {"a": 1}}]}),
        (200, {"leases": []}),
        (200, {"workers": [{"worker_id": "w"}]}),
    ]
    some = ["jobs", "list", "--status", "done", "--limit", "1"]
    for arguments in (some, ["jobs", "events", "a"], ["leases", "list"]):
        assert run([*arguments, "--url", server.url]) == 0
    shown = capsys.readouterr()
    assert "JOB_ID" in shown.out and "job.done" in shown.out and "no leases" in shown.out
    assert "--cursor more" in shown.err
    assert server.asked[0][1] == "/jobs?status=done&limit=1"
    assert run(["workers", "list", "--json", "--url", server.url]) == 0
    assert json.loads(capsys.readouterr().out) == {"workers": [{"worker_id": "w"}]}


@pytest.mark.parametrize("how", [[], ["--json"]])
def test_a_list_of_jobs_goes_on_over_pages_that_are_short_or_empty(server, capsys, how):
    pages = [["a"], [], ["b", "c"], []]
    server.answers = [
        (200, {"jobs": [{"job_id": name} for name in names], "next_cursor": f"at-{n}" if n < 3 else None})
        for n, names in enumerate(pages)
    ]
    assert run(["jobs", "list", "--type", "rare", "--limit", "3", *how, "--url", server.url]) == 0
    shown = capsys.readouterr()
    if how:
        assert json.loads(shown.out) == {"jobs": [{"job_id": name} for name in "abc"], "next_cursor": "at-2"}
    else:
        assert "more: --cursor at-2" in shown.err
        assert [line.split()[0] for line in shown.out.splitlines()[1:]] == ["a", "b", "c"]
    assert [path for _, path, _ in server.asked] == [
        "/jobs?type=rare&limit=3",
        "/jobs?type=rare&limit=2&cursor=at-0",
        "/jobs?type=rare&limit=2&cursor=at-1",
    ]
    server.answers = [(200, {"jobs": [], "next_cursor": at}) for at in ("on", None)]
    assert run(["jobs", "list", "--type", "none", "--tag", "a b/ü", "--url", server.url]) == 0
    assert server.asked[-1][1] == "/jobs?type=none&tag=a+b%2F%C3%BC&limit=50&cursor=on"
    assert capsys.readouterr().out == "no jobs\n"


@pytest.mark.parametrize(
    ("path", "noun", "key"), [("dlq", "dead_letters", "job_id"), ("workflows", "workflows", "workflow_id")]
)
def test_dead_letters_and_workflows_go_on_likewise(server, capsys, path, noun, key):
    rows = [{key: name, "progress": {}} for name in "abc"]
    pages = zip(("x", "y", None), ([], rows[:1], rows[1:]), strict=True)
    server.answers = [(200, {noun: some, "total": 3, "at_least": True, "next_cursor": at}) for at, some in pages]
    assert run([path, "list", "--agent", "ann", "--limit", "3", "--url", server.url]) == 0
    shown = capsys.readouterr()
    assert [line.split()[0] for line in shown.out.splitlines()[1:]] == ["a", "b", "c"]
    assert path == "workflows" or "3 of at least 3" in shown.err
    assert [asked.split("?")[1] for _, asked, _ in server.asked] == [
        "agent=ann&limit=3",
        "agent=ann&limit=3&cursor=x",
        "agent=ann&limit=2&cursor=y",
    ]


@pytest.mark.parametrize(("noun", "key"), [("leases", "job_id"), ("workers", "worker_id")])
def test_lists_of_what_is_alive_are_whole(server, capsys, noun, key):
    pages = [(200, {noun: [{key: name}], "next_cursor": at}) for name, at in (("a", "x"), ("b", "y"), ("c", None))]
    server.answers = pages * 2
    assert run([noun, "list", "--url", server.url]) == 0
    assert [set("abc") & set(line.split()) for line in capsys.readouterr().out.splitlines()[1:]] == [
        {"a"},
        {"b"},
        {"c"},
    ]
    assert [path for _, path, _ in server.asked] == [f"/{noun}", f"/{noun}?cursor=x", f"/{noun}?cursor=y"]
    assert run([noun, "list", "--json", "--url", server.url]) == 0
    assert json.loads(capsys.readouterr().out) == {noun: [{key: name} for name in "abc"], "next_cursor": None}


def test_a_lease_is_listed_with_all_its_gpus(server, capsys):
    held = [{"gpu_uuid": "GPU-a", "gpu_index": 3}, {"gpu_uuid": "GPU-b", "gpu_index": 5}]
    lost = [{"gpu_uuid": "GPU-c", "gpu_index": None}]
    rows = [{"agent_name": name, "gpus": gpus} for name, gpus in (("two", held), ("gone", lost), ("none", []))]
    server.answers = [(200, {"leases": rows, "next_cursor": None})]
    assert run(["leases", "list", "--url", server.url]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    at = lines[0].index("GPUS")
    assert [line[at] for line in lines[1:]] == ["3,5", "GPU-c", "-"]


def test_cancel_and_retry(server, capsys):
    server.answers = [
        (202, {"job_id": "a:b", "status": "running", "cancel_requested": True}),
        (200, {"job_id": "a:b", "status": "cancelled", "cancel_requested": True}),
        (200, {"job_id": "a:b", "status": "pending", "redrives": 1}),
        (409, {"code": "redrive_limit", "detail": "too often"}),
        (200, {"job_id": "a:b", "status": "cancelled", "cancel_requested": True}),
    ]
    assert run(["jobs", "cancel", "a:b", "--url", server.url]) == 0
    assert run(["jobs", "cancel", "a:b", "--url", server.url]) == 0
    assert run(["jobs", "retry", "a:b", "--url", server.url]) == 0
    assert run(["jobs", "retry", "a:b", "--url", server.url]) == 1
    shown = capsys.readouterr()
    assert shown.out == "a:b  running (its worker was asked to stop it)\na:b  cancelled\na:b  pending\n"
    assert shown.err == "gpuorch: 409 redrive_limit: too often\n"
    assert run(["jobs", "cancel", "a:b", "--json", "--url", server.url]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "cancelled"
    assert [path for _, path, _ in server.asked[:3]] == ["/jobs/a%3Ab/cancel"] * 2 + ["/jobs/a%3Ab/retry"]
    assert {body for _, _, body in server.asked} == {None}


def test_several_are_cancelled_or_retried_each_with_its_own_verdict(server, capsys):
    answers = [
        (200, {"job_id": "a", "status": "cancelled"}),
        (409, {"code": "job_ended", "detail": "it is done"}),
        (202, {"job_id": "c", "status": "running"}),
    ]
    server.answers = answers * 2
    assert run(["jobs", "cancel", "a", "b", "a", "c", "--url", server.url]) == 1
    shown = capsys.readouterr()
    assert shown.out == "a  cancelled\nc  running (its worker was asked to stop it)\n"
    assert shown.err == "gpuorch: b: 409 job_ended: it is done\n"
    assert [path for _, path, _ in server.asked] == [f"/jobs/{name}/cancel" for name in "abc"]
    assert run(["jobs", "retry", "a", "b", "c", "--json", "--url", server.url]) == 1
    assert json.loads(capsys.readouterr().out) == {
        "jobs": [
            {"job_id": "a", "status": "cancelled"},
            {"job_id": "b", "error": {"status": 409, "code": "job_ended", "detail": "it is done"}},
            {"job_id": "c", "status": "running"},
        ]
    }
    server.answers = [(200, {"job_id": name, "status": "pending"}) for name in "ab"]
    assert run(["jobs", "retry", "a", "b", "--url", server.url]) == 0
    assert capsys.readouterr().out == "a  pending\nb  pending\n"
    assert run(["jobs", "retry"]) == run(["jobs", "cancel"]) == 2


@pytest.mark.parametrize(("verb", "done"), [("redrive", "redriven"), ("purge", "purged")])
def test_ids_that_are_no_dead_letters_are_named(server, capsys, verb, done):
    answer = {"matched": 1, done: 1, "dry_run": False}
    server.answers = [(200, answer | {"unknown": unknown}) for unknown in (["b", "c\x1b"], ["b", "c"], ["b"], [])]
    command = ["dlq", verb, "a", "b", "c", "--yes", "--url", server.url]
    assert run(command) == 1
    shown = capsys.readouterr()
    assert shown.err == "gpuorch: b: no dead letter\ngpuorch: c\ufffd: no dead letter\n"
    assert "unknown" not in shown.out and done in shown.out
    assert run([*command, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["unknown"] == ["b", "c"]
    assert run([*command, "--type", "echo"]) == 1
    assert capsys.readouterr().err == "gpuorch: b: no dead letter that the flags mean\n"
    assert run(command) == 0


@pytest.mark.parametrize("wrong", ["", "a/b", "..%2f", "a\udcff", "a" * 129])
def test_what_cannot_be_a_job_id_is_wrong_usage(server, capsys, wrong):
    for words in (
        ["jobs", "cancel", "a", wrong],
        ["jobs", "retry", "a", wrong],
        ["jobs", "get", wrong],
        ["jobs", "wait", wrong],
        ["jobs", "events", wrong],
        ["jobs", "explain", wrong],
        ["jobs", "priority", wrong, "HIGH"],
        ["dlq", "show", wrong],
        ["dlq", "redrive", "a", wrong],
        ["dlq", "purge", "a", wrong, "--yes"],
    ):
        assert run([*words, "--url", server.url]) == 2, words
        assert "not a job id: " in capsys.readouterr().err
    assert server.asked == []


def test_what_was_cancelled_before_the_server_left_is_told(server, capsys, monkeypatch):
    asked = Api.post

    def answering_once(api, path, *rest):
        if server.asked:
            raise ServerUnreachable(server.url, "gone")
        return asked(api, path, *rest)

    monkeypatch.setattr(Api, "post", answering_once)
    server.answers = [(200, {"job_id": "a", "status": "cancelled"})]
    assert run(["jobs", "cancel", "a", "b", "c", "--json", "--url", server.url]) == 3
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {"jobs": [{"job_id": "a", "status": "cancelled"}]}
    assert "cannot reach" in shown.err


@pytest.mark.parametrize(("given", "sent"), [("high", "HIGH"), ("-50", -50), ("7", 7)])
def test_priority(server, capsys, given, sent):
    server.answers = [(200, {"job_id": "a", "status": "pending", "priority": 7, "before": 0})]
    assert run(["jobs", "priority", "a", given, "--url", server.url]) == 0
    assert capsys.readouterr().out == "a  pending  priority 0 → 7\n"
    ((_, path, body),) = server.asked
    assert (path, body) == ("/jobs/a/priority", {"priority": sent})


# --- schedules ---

SCHEDULE = {"schedule_id": "s", "cron": "0 3 * * *", "enabled": True, "last_error": None, "next_fire_at": "2030Z"}


def test_a_schedule_is_set_shown_fired_and_deleted(server, capsys):
    server.answers = [
        (201, SCHEDULE),
        (200, SCHEDULE),
        (200, {"schedules": [SCHEDULE], "next_cursor": "s"}),
        (202, {"schedule_id": "s", "job_id": "schedule:s:x", "status": "pending"}),
        (200, {"schedule_id": "s", "deleted": True}),
        (404, {"code": "schedule_not_found", "detail": "no schedule"}),
    ]
    flags = ["--cron", "0 3 * * *", "--timezone", "Europe/Berlin", "--payload", '{"a": 1}', "--priority", "high"]
    assert run(["schedules", "set", "s", "embed", *flags, "--pool", "big", "--disabled", "--url", server.url]) == 0
    for command in (["show", "s", "--json"], ["list"], ["fire", "s"], ["delete", "s"]):
        assert run(["schedules", *command, "--url", server.url]) == 0
    assert run(["schedules", "show", "s", "--url", server.url]) == 1
    shown = capsys.readouterr()
    assert "schedule:s:x  pending\ns is deleted\n" in shown.out and "more: --cursor s" in shown.err
    assert [(method, path.partition("?")[0]) for method, path, _ in server.asked[:5]] == [
        ("PUT", "/schedules/s"),
        ("GET", "/schedules/s"),
        ("GET", "/schedules"),
        ("POST", "/schedules/s/fire"),
        ("DELETE", "/schedules/s"),
    ]
    assert server.asked[0][2] == {
        "cron": "0 3 * * *",
        "timezone": "Europe/Berlin",
        "enabled": False,
        "job": {"type": "embed", "pool_id": "big", "priority": "HIGH", "payload": {"a": 1}},
    }


# --- workflows ---

PROGRESS = {"completed": 1, "total": 2, "done": 1, "failed": 0, "cancelled": 0}
FLOW = {"workflow_id": "w", "name": "two", "status": "running", "progress": PROGRESS, "reason": None}
TASK = {"name": "b", "job_id": "w.b", "type": "echo", "status": "pending", "depends_on": ["a"], "attempts": 0}


def test_a_workflow_is_created_shown_stopped_and_started_over(server, capsys, tmp_path):
    with_tasks = FLOW | {"tasks": [TASK], "next_cursor": "more"}
    server.answers = [
        (202, with_tasks | {"created": True}),
        (200, with_tasks | {"created": False}),
        (202, {"workflow_id": "w", "added": ["c"]}),
        (200, {"workflows": [FLOW], "next_cursor": None}),
        (200, with_tasks),
        (200, {"events": [{"ts": "2030Z", "event_type": "workflow.created"}]}),
        (200, {"workflow_id": "w", "status": "cancelled"}),
        (200, with_tasks),
        (200, with_tasks | {"restarted": 2}),
        (404, {"code": "workflow_not_found", "detail": "no workflow"}),
    ]
    file = tmp_path / "flow.json"
    file.write_text('{"tasks": []}')
    actions = (["create"], ["create"], ["add", "w"])
    for action in actions:
        assert run(["workflows", *action, str(file), "--url", server.url]) == 0
    for action in (["list", "--status", "running"], ["show", "w"], ["events", "w"], ["cancel", "w"]):
        assert run(["workflows", *action, "--url", server.url]) == 0
    for action in (["retry-failed", "w", "--json"], ["rerun", "w", "b"]):
        assert run(["workflows", *action, "--url", server.url]) == 0
    assert run(["workflows", "show", "x", "--url", server.url]) == 1
    shown = capsys.readouterr()
    assert "w  running\nw  running (was created before)\nw  added c\n" in shown.out
    assert "1 of 2 (1 done)" in shown.out and "w.b" in shown.out and "w  cancelled\n" in shown.out
    assert "more: --cursor more" in shown.err
    assert [(method, path.partition("?")[0]) for method, path, _ in server.asked] == [
        ("POST", "/workflows"),
        ("POST", "/workflows"),
        ("POST", "/workflows/w/tasks"),
        ("GET", "/workflows"),
        ("GET", "/workflows/w"),
        ("GET", "/workflows/w/events"),
        ("POST", "/workflows/w/cancel"),
        ("POST", "/workflows/w/retry_failed"),
        ("POST", "/workflows/w/rerun"),
        ("GET", "/workflows/x"),
    ]
    assert server.asked[8][2] == {"task": "b"}


@pytest.mark.parametrize(
    ("counts", "told"),
    [
        (
            {"completed": 4, "total": 6, "done": 1, "failed": 2, "cancelled": 1},
            "4 of 6 (1 done, 2 failed, 1 cancelled)",
        ),
        ({"completed": 1, "total": 6, "done": 0, "failed": 1, "cancelled": 0}, "1 of 6 (1 failed)"),
        ({"completed": 0, "total": 6, "done": 0, "failed": 0, "cancelled": 0}, "0 of 6\n"),
    ],
)
def test_a_workflow_tells_how_its_tasks_ended(counts, told, server, capsys):
    server.answers = [(200, FLOW | {"progress": counts, "tasks": [TASK], "next_cursor": None})]
    assert run(["workflows", "show", "w", "--url", server.url]) == 0
    assert told in capsys.readouterr().out


@pytest.mark.parametrize("text", ["nonsense", "[]"])
def test_a_file_that_is_no_workflow_is_wrong_usage(tmp_path, capsys, text):
    (tmp_path / "flow.json").write_text(text)
    assert run(["workflows", "create", "flow.json", "--url", "http://127.0.0.1:1"]) == 2
    assert "JSON" in capsys.readouterr().err


# --- dead letters ---

LETTER = {"job_id": "j", "type": "echo", "reason": "timeout", "last_error": "\x1b[31mred"}


def test_dead_letters_are_listed(server, capsys):
    server.answers = [
        (200, {"dead_letters": [LETTER], "total": 7, "next_cursor": "more"}),
        (200, {"dead_letters": [], "total": 0, "next_cursor": None}),
        (200, {"dead_letters": [LETTER], "total": 1, "next_cursor": None}),
    ]
    flags = ["--type", "echo", "--agent", "ann", "--pool", "gold", "--reason", "timeout", "--limit", "1"]
    assert run(["dlq", "list", *flags, "--url", server.url]) == 0
    shown = capsys.readouterr()
    assert "timeout" in shown.out and "\x1b" not in shown.out
    assert "1 of 7" in shown.err and "--cursor more" in shown.err
    assert set(server.asked[0][1].split("?")[1].split("&")) == {
        *("type=echo", "agent=ann", "pool_id=gold", "reason=timeout", "limit=1"),
    }
    assert run(["dlq", "list", "--url", server.url]) == 0
    assert "no dead letters" in capsys.readouterr().out
    assert run(["dlq", "list", "--json", "--url", server.url]) == 0
    assert json.loads(capsys.readouterr().out)["total"] == 1


def test_a_dead_letter_is_shown_with_its_record_and_history(server, capsys):
    found = [
        (200, {"dead_letters": [LETTER], "total": 1, "next_cursor": None}),
        (200, {"job_id": "j", "status": "dead_letter", "payload": {"a": 1}}),
        (200, {"events": [{"ts": "t", "event_type": "job.dead_letter"}]}),
    ]
    server.answers = [*found, *found]
    assert run(["dlq", "show", "j", "--url", server.url]) == 0
    shown = capsys.readouterr().out
    assert "timeout" in shown and '{"a": 1}' in shown and "job.dead_letter" in shown
    assert [path for _, path, _ in server.asked] == ["/dlq?job_id=j", "/jobs/j", "/jobs/j/events"]
    assert run(["dlq", "show", "j", "--json", "--url", server.url]) == 0
    assert json.loads(capsys.readouterr().out).keys() == {"dead_letter", "job", "events"}


def test_a_job_that_is_no_dead_letter_says_what_it_is(server, capsys):
    server.answers = [
        (200, {"dead_letters": [], "total": 0, "next_cursor": None}),
        (200, {"job_id": "j", "status": "done"}),
        (200, {"dead_letters": [], "total": 0, "next_cursor": None}),
        (404, {"code": "job_not_found", "detail": "no job"}),
    ]
    assert run(["dlq", "show", "j", "--url", server.url]) == 1
    assert "is done, not a dead letter" in capsys.readouterr().err
    assert run(["dlq", "show", "nobody", "--url", server.url]) == 1
    assert "job_not_found" in capsys.readouterr().err


REDRIVEN = (200, {"matched": 5, "exhausted": 1, "redriven": 4, "dry_run": False})
PURGED = (200, {"matched": 5, "purged": 5, "dry_run": False})


def test_redrive_and_purge_send_what_was_meant(server, capsys):
    server.answers = [REDRIVEN, REDRIVEN, PURGED]
    assert run(["dlq", "redrive", "--type", "echo", "--rate", "2.5", "--max", "9", "--url", server.url]) == 0
    assert run(["dlq", "redrive", "a", "b", "--url", server.url]) == 0
    assert run(["dlq", "purge", "--yes", "--url", server.url]) == 0
    assert [(path, body) for _, path, body in server.asked] == [
        ("/dlq/redrive", {"filter": {"type": "echo"}, "dry_run": False, "max": 9, "rate": 2.5}),
        ("/dlq/redrive", {"filter": {"job_ids": ["a", "b"]}, "dry_run": False, "max": 1000}),
        ("/dlq/purge", {"filter": {}, "dry_run": False, "max": 1000}),
    ]
    shown = capsys.readouterr().out
    assert "redriven   4" in shown and "exhausted  1" in shown and "purged   5" in shown


@pytest.mark.parametrize(
    ("arguments", "asks"),
    [
        (["redrive"], True),
        (["redrive", "--rate", "1"], True),
        (["redrive", "--agent", "ann"], False),
        (["redrive", "--dry-run"], False),
        (["redrive", "--yes"], False),
        (["purge"], True),
        (["purge", "--agent", "ann"], True),
        (["purge", "a"], True),
        (["purge", "--dry-run"], False),
        (["purge", "a", "--yes"], False),
    ],
)
def test_what_may_hurt_is_asked_about_or_needs_yes(server, capsys, monkeypatch, arguments, asks):
    answer = {"matched": 5, "exhausted": 1, "dry_run": "--dry-run" in arguments, "redriven": 0, "purged": 0}
    server.answers = [(200, answer)] * 2
    # Nobody is there: refused as wrong usage, nothing is sent.
    assert run(["dlq", *arguments, "--url", server.url]) == (2 if asks else 0)
    assert ("--yes" in capsys.readouterr().err) == asks
    assert len(server.asked) == (0 if asks else 1)
    # Somebody is: no is no, yes is yes.
    if asks:
        monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
        for reply, code, sent in ((False, 1, 0), (True, 0, 1)):
            monkeypatch.setattr(click, "confirm", lambda _text, reply=reply: reply)
            assert run(["dlq", *arguments, "--url", server.url]) == code
            assert len(server.asked) == sent


def test_a_dry_run_says_so(server, capsys):
    looked = {"matched": 5, "exhausted": 0, "redriven": 0, "dry_run": True, "would_be": 5, "sample": ["a"]}
    server.answers = [(200, looked), (200, looked)]
    assert run(["dlq", "redrive", "--dry-run", "--url", server.url]) == 0
    assert "none, this was a dry run" in capsys.readouterr().out
    assert run(["dlq", "redrive", "--dry-run", "--json", "--url", server.url]) == 0
    assert json.loads(capsys.readouterr().out) == looked


# --- pools and nodes ---


def pool(status="running", **fields):
    base = {"pool_id": "p", "status": status, "status_reason": None, "running": 0, "ready_slots": 0, "workers": 0}
    times = {"oldest_running_seconds": None, "drain_seconds_left": None}
    size = {"spawned_workers": 0, "desired_workers": 2, "min_workers": 0, "max_workers": None}
    return base | times | size | {"members": [], "assignments": []} | fields


@pytest.fixture
def quick(monkeypatch):
    """Looks at a pool follow one another at once."""
    monkeypatch.setattr(pools_command, "LOOK_EVERY_S", 0)


def test_what_pools_commands_send(server, capsys):
    flags = ["--workers", "3", "--type", "answer", "--model", "llama", "--adapter", "lora", "--variant", "fp8"]
    flags += ["--slots", "2", "--min-memory-mb", "0", "--gpu-count", "2", "--min", "1", "--max", "4", "--hold", "60"]
    flags += ["--agent", "ann", "--provider", "external", "--metadata", '{"a": 1}', "--autosize"]
    sent = {"desired_workers": 3, "type": "answer", "model_id": "llama", "adapter": "lora", "variant": "fp8"}
    sent |= {"slots": 2, "min_memory_mb": 0, "gpu_count": 2, "min_workers": 1, "max_workers": 4, "hold_seconds": 60}
    sent |= {"agent_name": "ann", "provider": "external", "metadata": {"a": 1}, "autosize": True}
    for arguments, asked in (
        (["create", "p", *flags], ("POST", "/workers/pool", {"pool_id": "p"} | sent)),
        (["create"], ("POST", "/workers/pool", {})),
        (["scale", "p", "0"], ("PATCH", "/workers/pool/p", {"desired_workers": 0})),
        (
            ["scale", "p", "--min", "1", "--no-autosize"],
            ("PATCH", "/workers/pool/p", {"min_workers": 1, "autosize": False}),
        ),
        (
            ["swap", "p", "--model", "m2", "--adapter", ""],
            ("PATCH", "/workers/pool/p", {"model_id": "m2", "adapter": None}),
        ),
        (["drain", "p"], ("POST", "/control/drain_pool", {"pool_id": "p"})),
        (["drain", "p", "--timeout", "0"], ("POST", "/control/drain_pool", {"pool_id": "p", "timeout_seconds": 0.0})),
        (["evict", "p"], ("POST", "/control/evict_pool", {"pool_id": "p"})),
        (["delete", "a/b"], ("DELETE", "/workers/pool/a%2Fb", None)),
    ):
        server.answers = [(200, pool() | {"waiting": 0})]
        assert run(["pools", *arguments, "--url", server.url]) == 0, arguments
        assert server.asked[-1] == asked
    out, err = capsys.readouterr()
    assert "a/b is forgotten" in out and not err


def test_deleting_a_pool_tells_of_the_jobs_that_it_leaves_behind(server, capsys):
    server.answers = [(200, {"pool_id": "p", "deleted": True, "waiting": 3})]
    assert run(["pools", "delete", "p", "--url", server.url]) == 0
    out, err = capsys.readouterr()
    assert out == "p is forgotten\n"
    assert "3 of its jobs still wait" in err and "gpuorch jobs list --pool p --status pending" in err


def test_scaling_tells_what_was_set_and_what_is_there(server, capsys):
    size = {"desired_workers": 400, "spawned_workers": 2, "min_workers": 1, "max_workers": 512}
    far = pool(status_reason="no room for 398 workers", **size)
    server.answers = [(200, far), (200, far), (200, pool())]
    assert run(["pools", "scale", "p", "400", "--url", server.url]) == 0
    told = "p  running  no room for 398 workers\n400 workers wanted, 2 there (at least 1, at most 512)\n"
    assert capsys.readouterr().out == told
    assert run(["pools", "scale", "p", "400", "--json", "--url", server.url]) == 0
    assert json.loads(capsys.readouterr().out)["desired_workers"] == 400
    assert run(["pools", "scale", "p", "--min", "0", "--url", server.url]) == 0
    assert capsys.readouterr().out.endswith("\n2 workers wanted, 0 there\n")
    assert run(["pools", "scale", "p", "4097", "--url", server.url]) == 2
    assert "0<=x<=4096" in capsys.readouterr().err


def test_pools_and_nodes_are_listed_and_shown(server, capsys):
    member = {"worker_id": "w", "node_id": "n", "trouble": "\x1b[31mred"}
    shown = pool(members=[member], assignments=[{"node_id": "n", "revision": 1, "workers": 2}])
    server.answers = [(200, {"pools": [pool(status_reason="cold")], "next_cursor": "p"}), (200, shown), (200, shown)]
    assert run(["pools", "list", "--limit", "1", "--cursor", "o", "--url", server.url]) == 0
    listed = capsys.readouterr()
    assert "cold" in listed.out and "--cursor p" in listed.err
    assert server.asked[0][1] == "/workers/pool?limit=1&cursor=o"
    assert run(["pools", "show", "p", "--url", server.url]) == 0
    text = capsys.readouterr().out
    assert "WORKER_ID" in text and "REVISION" in text and "\x1b" not in text
    assert run(["pools", "show", "p", "--json", "--url", server.url]) == 0
    assert json.loads(capsys.readouterr().out) == shown
    server.answers = [(200, {"pools": [], "next_cursor": None})]
    assert run(["pools", "list", "--url", server.url]) == 0
    assert "no pools" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("running", "until", "state"),
    [
        (3, None, "open"),
        (3, "2999-01-02T03:04:05Z", "draining until 2999-01-02T03:04:05Z"),
        (0, "2999-01-02T03:04:05Z", "drained"),
        (3, "2001-01-02T03:04:05Z", "draining"),
        (0, "2001-01-02T03:04:05Z", "drained"),
    ],
)
def test_nodes_are_listed_with_whether_they_take_jobs(server, capsys, running, until, state):
    server.answers = [(200, {"nodes": [{"node_id": "n", "running": running, "drain_until": until}]})]
    assert run(["nodes", "list", "--url", server.url]) == 0
    title, line = capsys.readouterr().out.splitlines()
    assert title.split()[:2] == ["NODE_ID", "STATE"] and " ".join(line.split()).startswith(f"n {state} ")
    assert ("until" in line) == ("until" in state)


def test_a_refusal_about_a_pool_is_1(server, capsys):
    server.answers = [(409, {"code": "pool_busy", "detail": "drain it"})]
    assert run(["pools", "delete", "p", "--url", server.url]) == 1
    assert capsys.readouterr().err == "gpuorch: 409 pool_busy: drain it\n"


def test_waiting_for_a_drain_tells_of_each_change_once(server, capsys, quick):
    two = pool("draining", running=2, oldest_running_seconds=41.6, drain_seconds_left=250.2)
    one = two | {"running": 1, "oldest_running_seconds": 44.0}
    server.answers = [
        (202, {"pool_id": "p", "status": "draining"}),
        *[(200, two)] * 3,
        (200, one),
        (200, pool("stopped")),
    ]
    assert run(["pools", "drain", "p", "--wait", "--url", server.url]) == 0
    shown = capsys.readouterr()
    assert shown.out == "p  stopped\n"
    assert shown.err.splitlines() == [
        "2 running, oldest 42 s, handed back in 250 s",
        "1 running, oldest 44 s, handed back in 250 s",
    ]


@pytest.mark.parametrize(
    ("arguments", "status", "said", "told"),
    [
        (["drain", "p"], "draining", {"already": False}, "p  draining\n"),
        (["drain", "p"], "stopped", {"already": True}, "p  stopped already\n"),
        (["drain", "p"], "evicted", {"already": True}, "p  evicted already\n"),
        (["drain", "p", "--wait"], "evicted", {"already": True}, "p  evicted already\n"),
        (["evict", "p"], "evicted", {"already": False}, "p  evicted\n"),
        (["evict", "p"], "evicted", {"already": True}, "p  evicted already\n"),
        (["evict", "p"], "stopped", {"already": True}, "p  stopped already\n"),
        (["evict", "p"], "stopped", {}, "p  stopped\n"),  # by a server of an older version
    ],
)
def test_what_a_pool_was_already_is_told_as_that(server, capsys, arguments, status, said, told):
    server.answers = [(200, {"pool_id": "p", "status": status} | said), (200, pool(status))]
    assert run(["pools", *arguments, "--url", server.url]) == 0
    assert capsys.readouterr().out == told


def test_on_a_terminal_waiting_is_a_bar_that_fits(server, capsys, quick, monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    draining = [(200, pool("draining", running=n, oldest_running_seconds=9.0)) for n in (4, 1)]
    server.answers = [(202, {"pool_id": "p", "status": "draining"}), *draining, (200, pool("stopped"))]
    assert run(["pools", "drain", "p", "--wait", "--url", server.url]) == 0
    lines = capsys.readouterr().err.split("\r")[1:]
    assert [line.split("]")[0].count("#") for line in lines] == [0, 15]
    assert all(len(line.rstrip("\n")) <= 49 for line in lines) and lines[-1].endswith("\n")
    assert "1 running, oldest 9 s" in lines[-1]


def test_ctrl_c_leaves_a_drain_going_and_says_so(server, capsys, monkeypatch):
    def interrupt(_seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupt)
    server.answers = [(202, {"pool_id": "p", "status": "draining"}), (200, pool("draining", running=1))]
    assert run(["pools", "drain", "p", "--wait", "--url", server.url]) == 130
    assert "p goes on draining; see gpuorch pools show p" in capsys.readouterr().err
    assert [method for method, _, _ in server.asked] == ["POST", "GET"]


@pytest.mark.parametrize(("end", "code"), [("running", 0), ("draining", 1), ("evicted", 1)])
def test_waiting_for_a_new_pool(server, capsys, quick, end, code):
    cold = pool("starting", status_reason="0 of 2 workers are ready")
    server.answers = [(201, pool("starting")), (200, cold), (200, pool(end))]
    assert run(["pools", "create", "p", "--wait", "--json", "--url", server.url]) == code
    shown = capsys.readouterr()
    assert json.loads(shown.out)["status"] == end
    told = "waiting until p is running; Ctrl-C ends the wait, and --timeout SECONDS would: the pool stays"
    assert shown.err.splitlines() == [told, "0 of 2 workers are ready"]
    server.answers = [(200, pool()), (200, pool())]
    assert run(["pools", "create", "p", "--wait", "--url", server.url]) == 0
    assert capsys.readouterr().err == "", "it runs already"


def test_a_new_pool_that_no_node_could_ever_hold_is_not_what_was_waited_for(server, capsys, quick):
    known = [GpuView("GPU-0", "n", 0, usable_mb=1000, leased_mb=0, foreign_mb=0)]
    for ask in (Ask(99999, 1), Ask(99999, 2), Ask(500, 2)):
        why = too_large_for_all(ask, known)
        server.answers = [(201, pool("starting")), (200, pool(status_reason=why))]
        assert run(["pools", "create", "p", "--wait", "--url", server.url]) == 1
        assert f"p  running  {why}" in capsys.readouterr().out
    for passes in ("1 of 2 workers are ready", "needs 500 MB; n/0: 100 of 1000 MB free"):
        server.answers = [(201, pool("starting")), (200, pool(status_reason=passes))]
        assert run(["pools", "create", "p", "--wait", "--url", server.url]) == 0


def test_waiting_for_a_new_pool_may_end_before_it_runs(server, capsys, quick):
    cold = pool("starting", status_reason="no node has a handler for 'nothing'")
    server.answers = [(201, pool("starting")), (200, cold)]
    assert run(["pools", "create", "p", "--wait", "--timeout", "0", "--url", server.url]) == 1
    shown = capsys.readouterr()
    assert shown.out == "p  starting  no node has a handler for 'nothing'\n"
    assert shown.err.startswith("waiting until p is running, 0 s at most; Ctrl-C ends the wait: the pool stays\n")
    assert run(["pools", "create", "p", "--timeout", "5", "--url", server.url]) == 2
    assert [method for method, _, _ in server.asked] == ["POST", "GET"]


def test_nodes_are_drained_and_resumed(server, capsys):
    for arguments, path, body in (
        (["drain", "n", "--timeout", "5"], "/control/drain_node", {"node_id": "n", "timeout_seconds": 5.0}),
        (["drain", "--all"], "/control/drain_node", {"all": True}),
        (["resume", "n"], "/control/resume_node", {"node_id": "n"}),
        (["resume", "--all", "--json"], "/control/resume_node", {"all": True}),
    ):
        server.answers = [(200, {"nodes": 1})]
        assert run(["nodes", *arguments, "--url", server.url]) == 0
        assert server.asked[-1] == ("POST", path, body)
    assert capsys.readouterr().out.startswith("nodes told to drain: 1\n")


# --- tables ---


def test_tables_fit_the_terminal_and_carry_no_escapes(monkeypatch, capsys):
    row = {"name": "n" * 80, "error": "\x1b[31mred\a" + "e" * 80, "size": 5}
    output.print_table(["name", "size", "error"], [row])
    assert "n" * 80 in capsys.readouterr().out  # a pipe: nothing is cut
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    output.print_table(["name", "size", "error"], [row])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and all(len(line) <= 60 for line in lines)
    assert "\x1b" not in lines[1] and "…" in lines[1]


# --- the data directory ---


@pytest.mark.parametrize(
    ("backend", "told"),
    [
        ("sim:1x8192", "SIMULATED GPUs (1x8192 MB): no real one is used"),
        ("none", "no GPUs"),
        ("auto", "those that NVML shows here, if any: see gpuorch gpus"),
        ("nvml", "those that NVML shows here, if any: see gpuorch gpus"),
    ],
)
def test_dev_tells_which_gpus_it_uses(backend, told, capsys):
    announce = dev._announcer(Settings(gpu_backend=backend))
    announce("http://127.0.0.1:8008")
    assert f"GPUs    {told}\n" in capsys.readouterr().out


def test_dev_says_how_another_terminal_reaches_it_in_80_columns(monkeypatch, capsys):
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    monkeypatch.setattr(sys, "executable", "/opt/it/.venv/bin/python")
    announce = dev._announcer(Settings())
    announce("http://127.0.0.1:65432")
    told = capsys.readouterr().out
    assert 'export PATH="/opt/it/.venv/bin:$PATH"' in told and "export GPUORCH_URL=http://127.0.0.1:65432" in told
    assert all(len(line) <= 80 for line in told.splitlines() if not line.startswith("  data"))
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    announce("http://127.0.0.1:8008")
    assert "export" not in capsys.readouterr().out
    dev._announcer(Settings(data_dir=Path("/srv/my data")))("http://127.0.0.1:8008")
    assert "\n  export ORCH_DATA_DIR='/srv/my data'\n" in capsys.readouterr().out


def test_dev_and_the_readme_submit_the_same_job():
    assert dev.EXAMPLE in (Path(__file__).parents[2] / "README.md").read_text()


def test_a_data_directory_has_one_holder(tmp_path):
    program = """
import pathlib, sys
from orchestrator.embedded.directory import DataDir
held = DataDir(pathlib.Path(sys.argv[1]))
print("held", flush=True)
input()
"""
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "data")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=rf"in use by process {holder.pid};"):
            DataDir(tmp_path / "data")
        holder.send_signal(signal.SIGKILL)
    wait_until(lambda: holder.poll() is not None)
    DataDir(tmp_path / "data").close()


def test_a_data_directory_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="choose another"):
        DataDir(tmp_path / "file" / "data")


# --- the audit trail ---


def happened(n: int, **fields) -> dict:
    return {"id": n, "ts": "2026-11-17T07:00:00Z", "event_type": "job.done", "job_id": f"j-{n}", "details": {}} | fields


def page_of(*numbers: int, cursor=None, after=0) -> tuple[int, dict]:
    return 200, {"events": [happened(n) for n in numbers], "next_cursor": cursor, "next_after": after}


def test_the_tail_of_the_trail_is_shown_oldest_first(server, capsys):
    server.answers = [page_of(9, 8, cursor=8, after=9), page_of(7, 6, cursor=6, after=9)]
    flags = ["--event", "job.*", "--pool", "p", "--actor", "ann", "--worker", "w", "--job", "j"]
    assert run(["audit", "tail", "-n", "3", *flags, "--url", server.url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines[1:]] == ["j-7", "j-8", "j-9"]
    first, second = (path for _, path, _ in server.asked)
    for part in ("event_type=job.%2A", "pool_id=p", "actor=ann", "worker_id=w", "job_id=j", "limit=3"):
        assert part in first
    assert "limit=1" in second and "cursor=8" in second


def test_rare_events_are_looked_for_in_a_bounded_part(server, capsys, monkeypatch):
    monkeypatch.setattr(audit_command, "MOST_PAGES", 3)
    server.answers = [page_of(cursor=100 - n) for n in range(3)]
    assert run(["audit", "tail", "--url", server.url]) == 0
    shown = capsys.readouterr()
    assert shown.out == "no events\n" and "only the latest part" in shown.err


def test_following_tells_what_is_new_once(server, capsys, monkeypatch):
    def interrupt(_seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupt)
    # 8 committed late: the trail was complete up to 7 when it was looked at first. 6 is older than what was asked for.
    server.answers = [page_of(9, 7, after=7), page_of(8, 9, 10, after=10), page_of(after=10)]
    assert run(["audit", "tail", "--follow", "--json", "-n", "2", "--url", server.url]) == 130
    assert [json.loads(line)["id"] for line in capsys.readouterr().out.splitlines()] == [7, 9, 8, 10]
    assert ["after=7" in server.asked[1][1], "after=10" in server.asked[2][1]] == [True, True]


def test_lines_that_follow_fit_the_terminal(server, capsys, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda _seconds: (_ for _ in ()).throw(KeyboardInterrupt))
    monkeypatch.setenv("COLUMNS", "70")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    evil = happened(1, event_type="\x1b[31m" + "e" * 99, details={"long": "x" * 99})
    server.answers = [
        (200, {"events": [evil], "next_cursor": None, "next_after": 1}),
        (200, {"events": [], "next_cursor": None, "next_after": 1}),
    ]
    assert run(["audit", "tail", "-f", "--url", server.url]) == 130
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and all(len(line) <= 70 for line in lines) and "\x1b" not in lines[1]


# --- everything that failed ---


def test_what_failed_is_started_over(server, capsys):
    answer = {"matched": 5, "exhausted": 1, "redriven": 4, "dry_run": False}
    server.answers = [(200, answer), (200, answer | {"dry_run": True, "would_be": 4, "sample": []}), (200, answer)]
    flags = ["--type", "echo", "--status", "failed", "--error", "timeout", "--rate", "2", "--max", "9"]
    assert run(["queue", "retry-failed", *flags, "--url", server.url]) == 0
    assert run(["queue", "retry-failed", "--dry-run", "--url", server.url]) == 0
    shown = capsys.readouterr()
    assert "4 started over, of 5" in shown.out and "4 would be started over" in shown.out
    assert "as often as allowed" in shown.err
    assert run(["queue", "retry-failed", "--yes", "--json", "--url", server.url]) == 0
    assert json.loads(capsys.readouterr().out) == answer
    meant = {"type": "echo", "status": "failed", "error_kind": "timeout"}
    assert [body for _, _, body in server.asked] == [
        {"filter": meant, "dry_run": False, "max": 9, "rate": 2.0},
        {"filter": {}, "dry_run": True, "max": 1000},
        {"filter": {}, "dry_run": False, "max": 1000},
    ]


def test_starting_all_over_must_be_meant(server, capsys):
    assert run(["queue", "retry-failed", "--url", server.url]) == 2
    assert "--yes" in capsys.readouterr().err and server.asked == []


# --- completion ---


@pytest.mark.parametrize(
    ("shell", "part"), [("bash", "complete -o nosort -F"), ("zsh", "#compdef gpuorch"), ("fish", "complete --no-files")]
)
def test_completion_scripts(shell, part, capsys):
    assert run(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert part in script and f"_GPUORCH_COMPLETE={shell}_complete" in script


def completed(words: str, monkeypatch, capsys) -> list[str]:
    monkeypatch.setenv("_GPUORCH_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split(" ")) - 1))
    with pytest.raises(SystemExit):
        run([])
    return [line.partition(",")[2] for line in capsys.readouterr().out.splitlines() if line]


def test_names_are_completed_from_the_server(server, monkeypatch, capsys):
    monkeypatch.setenv("GPUORCH_URL", server.url)
    server.answers = [
        (200, {"jobs": [{"job_id": "a-1", "status": "done"}, {"job_id": "b-1", "status": "done"}]}),
        (200, {"pools": [{"pool_id": "chat", "status": "running"}]}),
        (500, b"oops"),
    ]
    assert completed("gpuorch jobs get a", monkeypatch, capsys) == ["a-1"]
    assert completed("gpuorch jobs list --pool c", monkeypatch, capsys) == ["chat"]
    assert completed("gpuorch nodes drain x", monkeypatch, capsys) == []  # an error is no name
    assert completed("gpuorch sche", monkeypatch, capsys) == ["schedules"]
    assert completed("gpuorch pools ev", monkeypatch, capsys) == ["evict"]
    assert completed("gpuorch duty recl", monkeypatch, capsys) == ["reclaim"]


def test_a_server_that_is_away_completes_nothing(monkeypatch, capsys):
    monkeypatch.setenv("GPUORCH_URL", "http://127.0.0.1:1")
    assert completed("gpuorch jobs get a", monkeypatch, capsys) == []


# --- narrow tables, and colour ---


def test_columns_that_have_no_room_leave(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    names = [f"column_{n}" for n in range(9)]
    output.print_table(names, [dict.fromkeys(names, "some text")] * 2)
    lines = [click.unstyle(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 3 and all(len(line) <= 30 for line in lines)
    assert lines[0].split() == ["COLUMN_0", "COLUMN_1"]


TRACE = (
    'Traceback (most recent call last):\n  File "a.py", line 1, in f\n\traise ValueError\nValueError: no such model\n\n'
)
LONG_ID = "9f12daed-7696-45f7-9a78-f70f2bacc48f"
LONG_AGO = "2020-01-02T08:52:11.123456Z"


def narrow(monkeypatch, capsys, names, *rows):
    """What a terminal of 80 columns shows."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    output.print_table(names, rows)
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    return [line.split("  ", 1)[0:1] + line.split()[1:] for line in lines]


@pytest.mark.parametrize("job_id", ["badspawn-1", LONG_ID])
def test_jobs_are_readable_in_80_columns(job_id, monkeypatch, capsys):
    row = {"job_id": job_id, "type": "badspawn", "status": "dead_letter", "agent": "alice", "pool_id": "default"}
    row |= {"priority": 0, "attempts": 3, "created_at": LONG_AGO, "last_error": TRACE}
    _, told = narrow(monkeypatch, capsys, jobs_command._LISTED, row)
    assert told[:5] == [job_id, "badspawn", "dead_letter", "alice", "default"]
    assert told[5:] == ([] if job_id == LONG_ID else ["0", "3", "2020-01-02"])


@pytest.mark.parametrize("job_id", ["badspawn-1", LONG_ID])
def test_the_audit_trail_is_readable_in_80_columns(job_id, monkeypatch, capsys):
    now = datetime.now(UTC)
    row = {"ts": f"{now:%Y-%m-%dT%H:%M:%S.%f}Z", "event_type": "job.dead_letter", "job_id": job_id, "attempt": 2}
    row |= {"worker_id": "vm:12345:0a1b2c3d", "details": {"error": TRACE, "kind": "transient"}}
    heading, told = narrow(monkeypatch, capsys, audit_command._LISTED, row)
    assert told[:4] in ([short, "job.dead_letter", job_id, "2"] for short in (f"{now:%H:%M:%S}", f"{now:%Y-%m-%d}"))
    assert "vm:12345:0a1b2c3d" in told or job_id == LONG_ID
    assert "POOL_ID" not in heading  # nobody has one


def test_workers_are_readable_in_80_columns(monkeypatch, capsys):
    row = {"worker_id": "vm:12345:0a1b2c3d", "kind": "native", "pool_id": "default", "status": "active", "slots": 4}
    row |= {"busy": 0, "jobs_done": 12345, "jobs_failed": 3, "heartbeat_age_seconds": 1.25, "version": "1.2.3"}
    _, told = narrow(monkeypatch, capsys, fleet_command._WORKERS, row)
    assert told == ["vm:12345:0a1b2c3d", "native", "default", "active", "4", "0", "12345", "3", "1.25"]
    _, told = narrow(monkeypatch, capsys, fleet_command._WORKERS, row | {"trouble": "cannot read jobs from Redis: …"})
    assert told[6:8] == ["cannot", "read…"]


@pytest.mark.parametrize("workflow_id", ["report-1", LONG_ID])
def test_workflows_are_readable_in_80_columns(workflow_id, monkeypatch, capsys):
    row = {"workflow_id": workflow_id, "status": "failed", "completed": 3, "total": 4, "failed": 1, "agent": "alice"}
    row |= {"created_at": LONG_AGO, "reason": "task right: the disk is full and nobody has time to empty it"}
    _, told = narrow(monkeypatch, capsys, workflows_command._LISTED, row)
    assert told[:6] == [workflow_id, "failed", "3", "4", "1", "alice"]
    assert told[6:8] == ([] if workflow_id == LONG_ID else ["2020-01-02", "task"])


def test_an_endless_id_leaves_room_for_the_status(monkeypatch, capsys):
    _, told = narrow(monkeypatch, capsys, ["job_id", "status"], {"job_id": "i" * 200, "status": "dead_letter"})
    assert told[1] == "dead_letter" and told[0].endswith("…")


def traced(error):
    try:
        raise error
    except Exception as raised:
        try:
            raise RuntimeError("size\n  is\n\ntwo") from raised
        except RuntimeError as last:
            return trace(last), trace(raised)


def test_the_line_of_an_error_that_says_what_went_wrong_is_shown():
    last, first = traced(ValueError("one\ntwo"))
    group = traced(ExceptionGroup("many", [ValueError("one\ntwo"), KeyError("k")]))[1]
    for text, line in (
        (first, "ValueError: one"),
        (last, "RuntimeError: size"),
        (f"…{last[30:]}", "RuntimeError: size"),  # as an audit row has it, whose beginning is cut
        (group, "ExceptionGroup: many (2 sub-exceptions)"),
        ("Permanent: one\ntwo", "Permanent: one"),
        ("\n \n", "\ufffd \ufffd"),
        ('x\n  File "a"\n  | \ny', "y"),  # whatever an HTTP worker says
        (first[: first.index("ValueError") - 1], "raise error"),  # the end is cut
    ):
        assert output.cell(text) == line, text


def test_an_error_is_one_line_in_a_table_and_all_of_them_in_a_record(capsys):
    output.print_table(
        ["job_id", "last_error", "details"], [{"job_id": "a", "last_error": TRACE, "details": {"error": TRACE}}]
    )
    assert capsys.readouterr().out.splitlines()[1].split(maxsplit=4) == [
        "a",
        "ValueError:",
        "no",
        "such",
        'model  {"error": "ValueError: no such model"}',
    ]
    output.print_record({"job_id": "a", "last_error": TRACE})
    assert capsys.readouterr().out.splitlines() == [
        "job_id      a",
        "last_error  Traceback (most recent call last):",
        '              File "a.py", line 1, in f',
        "                raise ValueError",
        "            ValueError: no such model",
    ]
    output.print_record({"note": "one\n\x1b[31mtwo"})
    assert capsys.readouterr().out == "note  one\n      \ufffd[31mtwo\n"


@pytest.mark.parametrize(
    ("terminal", "environment", "coloured"),
    [(True, {}, True), (True, {"NO_COLOR": "1"}, False), (True, {"TERM": "dumb"}, False), (False, {}, False)],
)
def test_colour_only_where_it_is_wanted(monkeypatch, capsys, terminal, environment, coloured):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    output.print_table(["job_id", "status"], [{"job_id": "a", "status": "failed"}])
    assert ("\x1b[31m" in capsys.readouterr().out) == coloured
