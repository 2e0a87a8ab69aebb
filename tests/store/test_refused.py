"""A database that is there and refuses: a wrong password, no such database, no rights, a log of statements."""

import json
import logging

import pytest

from orchestrator.cli import run, versions
from orchestrator.store import migrate
from orchestrator.store.database import DatabaseRefuses
from tests.servers import MariaDB

COMMANDS = [["serve"], ["worker"], ["migrate"], ["leader"]]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers  # commands configure logging for the process
    root.setLevel(level)


@pytest.fixture
def account(mariadb):
    """`account(DATABASE)`: the URL of a user of its own with the password hunter2, and all rights on one database."""
    mariadb.create_database("theirs")
    with mariadb.connect() as connection, connection.cursor() as cursor:
        cursor.execute("CREATE OR REPLACE USER ann IDENTIFIED BY 'hunter2'")
        cursor.execute("GRANT ALL ON theirs.* TO ann")
        yield lambda database="theirs": f"mysql+pymysql://ann:hunter2@127.0.0.1:{mariadb.port}/{database}"
        cursor.execute("DROP USER ann")


REFUSALS = [
    ("ann:wrong2", "theirs", 1045, "check the user and the password in database_url (ORCH_DATABASE_URL)"),
    ("root", "nowhere", 1049, "create the database, or name another in database_url (ORCH_DATABASE_URL)"),
    ("ann:hunter2", "nowhere", 1044, "create the database if there is none, grant this user all rights on it"),
]


def test_an_authority_that_cannot_be_read_is_one_line(account, capsys):
    for command in (["migrate"], ["leader"]):
        assert run([*command, "--database-url", f"{account()}?ssl_ca=/no/such.pem"]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert "ssl_ca=/no/such.pem: [Errno 2] No such file" in line and "check what ssl_… says in database_url" in line


def said_once(text, code, remedy):
    return f"({code}, " in text and remedy in text and not any(word in text for word in ("hunter2", "wrong2", "Trace"))


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize(("login", "database", "code", "remedy"), REFUSALS)
def test_what_is_refused_is_one_line_with_what_to_do(
    account, valkey_server, capsys, command, login, database, code, remedy
):
    redis = [] if command in (["migrate"], ["leader"]) else ["--redis-url", valkey_server.url]
    assert run([*command, "--database-url", account(database).replace("ann:hunter2", login), *redis]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gpuorch: mysql+pymysql://") and said_once(line, code, remedy)


@pytest.mark.parametrize(("login", "database", "code", "remedy"), REFUSALS)
def test_the_doctor_tells_it_and_looks_at_the_rest(account, valkey_server, capsys, login, database, code, remedy):
    url = account(database).replace("ann:hunter2", login)
    flags = ["--json", "--redis-url", valkey_server.url, "--gpus", "none"]
    assert run(["doctor", "--database-url", url, *flags]) == 1
    findings = {item["check"]: item for item in json.loads(capsys.readouterr().out)}
    assert not findings["database"]["ok"] and said_once(findings["database"]["detail"], code, remedy)
    assert findings["redis"]["ok"] and findings["gpus"]["ok"]


def test_who_lacks_a_right_hears_of_it_where_it_migrates_and_writes(account, mariadb, open_database):
    with mariadb.connect() as connection, connection.cursor() as cursor:
        cursor.execute("REVOKE ALL ON theirs.* FROM ann")
        cursor.execute("GRANT SELECT ON theirs.* TO ann")
    db = open_database(account())
    with pytest.raises(DatabaseRefuses, match=r"1142.*grant this user all rights"):
        migrate.upgrade(db)
    with pytest.raises(DatabaseRefuses, match=r"1142.*grant this user all rights"):
        db.write(lambda conn: conn.exec_driver_sql("CREATE TABLE mine (a INT)"))


def test_a_file_that_is_no_database_is_one_line_too(capsys, tmp_path):
    (tmp_path / "junk.db").write_text("not a database, but long enough to be looked at" * 100)
    for command in COMMANDS:
        assert run([*command, "--database-url", "sqlite:///junk.db"]) == 1, command
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("gpuorch: sqlite:///junk.db: file is not a database; name another file in database_url")
    assert run(["doctor", "--database-url", "sqlite:///junk.db", "--gpus", "none"]) == 1
    assert "✗ database: sqlite:///junk.db: file is not a database" in capsys.readouterr().out


class Logging(MariaDB):
    """With a binary log, as one that others replicate."""

    def command(self) -> list[str]:
        return [*super().command(), "--log-bin=binlog", "--server-id=1", "--binlog-format=ROW"]


@pytest.fixture
def logging_server(private_server):
    return private_server(Logging)


def log_statements(server):
    """Also for those who are connected, once they have come again."""
    with server.connect() as connection, connection.cursor() as cursor:
        cursor.execute("SET GLOBAL binlog_format = 'STATEMENT'")


def test_a_log_of_statements_is_refused_before_anything_starts(logging_server, valkey_server, capsys, monkeypatch):
    monkeypatch.setenv("ORCH_REDIS_URL", valkey_server.url)
    monkeypatch.setenv("ORCH_DATABASE_URL", logging_server.url)
    assert run(["migrate"]) == 0
    assert run(["doctor", "--gpus", "none"]) == 0
    log_statements(logging_server)
    capsys.readouterr()
    for command in (["serve"], ["worker"], ["migrate"]):
        assert run(command) == 1, command
        (line,) = capsys.readouterr().err.splitlines()
        assert "its binlog_format is STATEMENT; set binlog_format to ROW or MIXED" in line
    assert run(["doctor", "--gpus", "none"]) == 1
    told = capsys.readouterr().out
    assert "STATEMENT; set binlog_format to ROW or MIXED" in told and "✗ database: " in told and "✓ redis: " in told


def test_a_format_without_a_log_is_nobodys_matter(mariadb, mariadb_url, open_database):
    with mariadb.connect() as connection, connection.cursor() as cursor:
        cursor.execute("SET GLOBAL binlog_format = 'STATEMENT'")
        try:
            versions.require_database(open_database(mariadb_url))
        finally:
            cursor.execute("SET GLOBAL binlog_format = DEFAULT")
