"""Migrations and schema.py describe the same tables, and any number of instances may migrate at once."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from alembic.script import ScriptDirectory
from sqlalchemy import inspect, text
from sqlalchemy.exc import DBAPIError

from orchestrator.errors import DatabaseUnavailable
from orchestrator.settings import Settings
from orchestrator.store import migrate, revisions
from orchestrator.store.database import Database
from orchestrator.store.schema import metadata
from tests.servers import MariaDB

UPGRADE = """
import sys
from orchestrator.settings import Settings
from orchestrator.store import migrate
from orchestrator.store.database import Database
db = Database(Settings(database_url=sys.argv[1]))
print("ready", flush=True)
input()
migrate.upgrade(db)
"""


@pytest.fixture(params=["mariadb", "sqlite"])
def empty_database(request, tmp_path) -> Iterator[Callable[[str], Database]]:
    """`empty_database("name")`: a new one of that name, on both databases in turn."""
    opened: list[Database] = []

    def address(name: str) -> str:
        if request.param == "sqlite":
            return f"sqlite:///{tmp_path / name}.db"
        server: MariaDB = request.getfixturevalue("mariadb")
        with server.connect() as connection, connection.cursor() as cursor:
            cursor.execute(f"DROP DATABASE IF EXISTS {name}")
        return server.create_database(name)

    def open_database(name: str) -> Database:
        opened.append(Database(Settings(database_url=address(name))))
        return opened[-1]

    yield open_database
    for db in opened:
        db.close()


def reflected(db: Database) -> dict:
    inspector = inspect(db.engine)
    return {
        table: {
            "columns": {
                column["name"]: {**column, "type": repr(column["type"])} for column in inspector.get_columns(table)
            },
            "key": inspector.get_pk_constraint(table),
            "indexes": sorted(inspector.get_indexes(table), key=lambda index: index["name"]),
            "checks": sorted(inspector.get_check_constraints(table), key=lambda check: check["name"]),
            "options": inspector.get_table_options(table),
        }
        for table in inspector.get_table_names()
        if table != "alembic_version"
    }


def statements(db: Database) -> dict[str, list[str]]:
    """SHOW CREATE TABLE, sorted: a column added later stands last, and nobody asks for columns by their place."""

    def read(conn):
        found = {}
        for table in metadata.tables:
            shown = conn.execute(text(f"SHOW CREATE TABLE {table}")).one()[1]
            lines = re.sub(r" AUTO_INCREMENT=\d+", "", shown).replace(",\n", "\n").splitlines()
            found[table] = sorted(lines)
        return found

    return db.read(read)


def test_a_migrated_database_is_the_one_of_schema_py(empty_database):
    migrated, created = empty_database("migrated"), empty_database("created")
    migrate.upgrade(migrated)
    metadata.create_all(created.engine)

    assert reflected(migrated) == reflected(created)
    assert set(reflected(migrated)) == set(metadata.tables)
    if migrated.engine.dialect.name != "sqlite":
        assert statements(migrated) == statements(created)


def test_the_scripts_are_known_by_their_file_names():
    directory = ScriptDirectory(str(revisions.directory()))
    assert revisions.known() == [script.revision for script in directory.walk_revisions()][::-1]
    assert revisions.head() == directory.get_current_head()


def test_microseconds_and_constraints_arrive(empty_database):
    db = empty_database("migrated")
    migrate.upgrade(db)
    columns = {column["name"]: column["type"] for column in inspect(db.engine).get_columns("orchestrator_jobs")}
    assert getattr(columns["created_at"], "fsp", 6) == 6
    with pytest.raises(DBAPIError, match="ck_caps_in_use"), db.engine.begin() as connection:
        connection.execute(text("INSERT INTO concurrency_caps VALUES ('key', -1)"))


def test_upgrading_twice_changes_nothing(empty_database):
    db = empty_database("migrated")
    assert revisions.current(db) is None
    assert revisions.pending(db)
    migrate.upgrade(db)
    before = reflected(db)
    migrate.upgrade(db)
    assert reflected(db) == before
    assert revisions.current(db) == revisions.head()
    assert not revisions.pending(db)


def test_a_migration_that_was_killed_half_way_continues(empty_database):
    db = empty_database("migrated")
    with db.engine.begin() as connection:
        metadata.tables["lanes"].create(connection)
    migrate.upgrade(db)
    assert set(reflected(db)) == set(metadata.tables)


def test_a_database_of_a_later_version_is_left_alone(empty_database):
    db = empty_database("migrated")
    migrate.upgrade(db)
    db.write(lambda conn: conn.execute(text("UPDATE alembic_version SET version_num = '9999'")))
    assert not revisions.pending(db)
    migrate.upgrade(db)
    assert revisions.current(db) == "9999"


def test_processes_that_upgrade_at_once_all_succeed(empty_database):
    db = empty_database("migrated")
    command = [sys.executable, "-c", UPGRADE, db.settings.database_url]
    upgrades = [
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for _ in range(3)
    ]
    for process in upgrades:  # all have imported everything before the first begins
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in upgrades:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    ends = [(process.communicate(timeout=60)[1], process.returncode) for process in upgrades]
    assert [code for _, code in ends] == [0, 0, 0], ends
    assert not revisions.pending(db)


def test_a_database_that_is_away_is_named_without_its_password():
    db = Database(Settings(database_url="mysql+pymysql://me:hunter2@127.0.0.1:1/jobs", db_timeout_s=1.0))
    for operation in (migrate.upgrade, revisions.pending):
        with pytest.raises(DatabaseUnavailable, match=r"me:\*\*\*@127\.0\.0\.1") as away:
            operation(db)
        assert "hunter2" not in str(away.value)
    db.close()
