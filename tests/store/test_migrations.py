"""Migrations and schema.py describe the same tables, and any number of instances may migrate at once."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from alembic import command
from alembic.script import ScriptDirectory
from sqlalchemy import inspect, select, text

from orchestrator.errors import ConfigError, DatabaseUnavailable
from orchestrator.settings import Settings
from orchestrator.store import migrate, revisions
from orchestrator.store.database import Database
from orchestrator.store.dialect import mariadb
from orchestrator.store.schema import metadata
from tests.factories import rows
from tests.servers import MariaDB
from tests.store.test_constraints import SOUND

#: Three processes, forked when all is imported, that begin when all are there: then the pipe is closed.
UPGRADE = """
import os, sys
from orchestrator.settings import Settings
from orchestrator.store import migrate
from orchestrator.store.database import Database
wait, begin = os.pipe()
children = []
for _ in range(3):
    if child := os.fork():
        children.append(child)
    else:
        os.close(begin)
        os.read(wait, 1)
        migrate.upgrade(Database(Settings(database_url=sys.argv[1])))
        sys.exit()
os.close(begin)
print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
"""


@pytest.fixture(scope="module", params=["mariadb", "sqlite"])
def empty_database(request, tmp_path_factory) -> Iterator[Callable[[str], Database]]:
    """`empty_database("name")`: a new one of that name, on both databases in turn."""
    opened: list[Database] = []
    folder = tmp_path_factory.mktemp("migrations")

    def address(name: str) -> str:
        if request.param == "sqlite":
            return f"sqlite:///{folder / name}.db"
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


@pytest.fixture(scope="module")
def migrated(empty_database) -> Database:
    """Upgraded once for all who look at it, and left as it was."""
    db: Database = empty_database("migrated")
    migrate.upgrade(db)
    return db


def reflected(db: Database) -> dict:
    inspector = inspect(db.engine)
    return {
        table: {
            "columns": {
                column["name"]: {**column, "type": repr(column["type"])} for column in inspector.get_columns(table)
            },
            "key": inspector.get_pk_constraint(table),
            "indexes": sorted(inspector.get_indexes(table), key=lambda index: index["name"]),
            "checks": sorted(inspector.get_check_constraints(table), key=lambda check: check["sqltext"]),
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


def test_a_migrated_database_is_the_one_of_schema_py(migrated, empty_database):
    created = empty_database("created")
    metadata.create_all(created.engine)

    found = reflected(migrated)
    assert found == reflected(created)
    assert set(found) == set(metadata.tables)
    if migrated.engine.dialect.name != "sqlite":
        assert statements(migrated) == statements(created)


def test_the_scripts_are_known_by_their_file_names():
    directory = ScriptDirectory(str(revisions.directory()))
    assert revisions.known() == [script.revision for script in directory.walk_revisions()][::-1]
    assert revisions.head() == directory.get_current_head()


#: What those who read the tables themselves were promised first; no migration may take it from them.
PROMISED = {
    "orchestrator_leases": "token agent_name gpu_index mode created_at expires_at last_heartbeat metadata",
    "worker_pools": (
        "pool_id agent_name model_id adapter desired_workers spawned_workers started_at last_heartbeat status"
        " hold_seconds metadata"
    ),
    "orchestrator_jobs": "job_id type payload status owner_pool attempts created_at updated_at last_error",
    "orchestrator_audit": "id ts event_type details",
}


def test_the_promised_columns_are_there(migrated):
    inspector = inspect(migrated.engine)
    for table, promised in PROMISED.items():
        assert {column["name"] for column in inspector.get_columns(table)} >= set(promised.split()), table


@pytest.mark.parametrize("empty_database", ["mariadb"], indirect=True)
def test_moments_have_microseconds_and_end_in_no_year(migrated):
    """A TIMESTAMP ends in 2038 and is shown in the session's zone; without a precision a DATETIME is cut to seconds."""
    moments = text(
        "SELECT DISTINCT data_type, datetime_precision FROM information_schema.columns"
        " WHERE table_schema = DATABASE() AND data_type IN ('timestamp', 'datetime', 'date', 'time')"
    )
    assert migrated.read(lambda conn: conn.execute(moments).all()) == [("datetime", 6)]


def test_upgrading_twice_changes_nothing(migrated):
    before = reflected(migrated)
    migrate.upgrade(migrated)
    assert reflected(migrated) == before
    assert revisions.current(migrated) == revisions.head()
    assert not revisions.pending(migrated)


def test_a_migration_that_was_killed_half_way_continues_and_keeps_all_rows(empty_database):
    db = empty_database("half_way")
    assert revisions.current(db) is None
    assert revisions.pending(db)
    with db.engine.begin() as connection:
        metadata.tables["lanes"].create(connection)
    with migrate._locked(db) as connection:
        command.upgrade(migrate._config(connection), "0010")
        for table, row in SOUND.items():
            connection.execute(table.insert().values(row))
    before = {table: rows(db, table) for table in SOUND}
    migrate.upgrade(db)
    assert set(reflected(db)) == set(metadata.tables)
    assert {table: rows(db, table)[:1] for table in SOUND} == before  # the audit tells of the migration, too


#: Where the checks begin, what an editor writes into a sound row, what is said of it, and what is meant.
EDITED = {
    "0010": (
        "UPDATE worker_pools SET provider = 'locl'",
        r"worker_pools has provider = 'locl'.+pool_id 'sound'.+'local', 'external', 'kubernetes'",
        "UPDATE worker_pools SET provider = 'local'",
    ),
    "0011": (
        "UPDATE worker_pools SET gpu_count = 1, slots = 0",
        r"worker_pools has slots = 0.+pool_id 'sound'.+slots BETWEEN 1 AND 512, and migrate again",
        "UPDATE worker_pools SET slots = 1",
    ),
}


@pytest.mark.parametrize("revision", EDITED)
def test_a_row_that_a_check_would_refuse_is_named_before_anything_changes(empty_database, revision):
    """Once the check is there, that row could be neither changed nor ended; only its editor knows what was meant."""
    edit, told, mend = EDITED[revision]
    db = empty_database(f"edited_{revision}")
    with migrate._locked(db) as connection:
        command.upgrade(migrate._config(connection), revision)
        for table, row in SOUND.items():
            connection.execute(table.insert().values(row))
        connection.execute(text(edit))
    before = reflected(db)
    with pytest.raises(ConfigError, match=told):
        migrate.upgrade(db)
    assert reflected(db) == before
    db.write(lambda conn: conn.execute(text(mend)))
    migrate.upgrade(db)
    assert not revisions.pending(db)


@pytest.mark.parametrize("empty_database", ["mariadb"], indirect=True)
def test_checks_come_to_tables_of_any_size_at_once(empty_database):
    """Nobody can write to a table while all of its rows are copied."""
    db = empty_database("instant")
    with migrate._locked(db) as connection:
        command.upgrade(migrate._config(connection), "0010")
        connection.execute(text("SET SESSION alter_algorithm = 'NOCOPY'"))
        command.upgrade(migrate._config(connection), "head")
    assert not revisions.pending(db)


@pytest.mark.parametrize("empty_database", ["mariadb"], indirect=True)
def test_a_migration_waits_for_nobodys_transaction_while_all_wait_for_it(empty_database, monkeypatch):
    """A table that is to change is used by somebody; whoever comes behind a change that waits, waits too."""
    monkeypatch.setattr(mariadb.MariaDB, "ALTER_WAIT_S", 1)
    db = empty_database("in_use")
    with migrate._locked(db) as connection:
        command.upgrade(migrate._config(connection), "0010")
    with db.engine.connect() as somebody:
        somebody.execute(select(metadata.tables["gpus"]))
        with pytest.raises(DatabaseUnavailable, match="end it, and migrate again"):
            migrate.upgrade(db)
        somebody.rollback()
    migrate.upgrade(db)
    assert not revisions.pending(db)


def test_a_database_of_a_later_version_is_left_alone(migrated):
    def version(number):
        change = text("UPDATE alembic_version SET version_num = :number")
        migrated.write(lambda conn: conn.execute(change, {"number": number}))

    version("9999")
    try:
        assert not revisions.pending(migrated)
        migrate.upgrade(migrated)
        assert revisions.current(migrated) == "9999"
    finally:
        version(revisions.head())


def test_processes_that_upgrade_at_once_all_succeed(empty_database):
    db = empty_database("at_once")
    ended = subprocess.run(
        [sys.executable, "-c", UPGRADE, db.settings.database_url],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=120,
        check=False,
    )
    assert ended.stdout == "[0, 0, 0]\n", ended.stderr
    assert not revisions.pending(db)


def test_a_database_that_is_away_is_named_without_its_password():
    db = Database(Settings(database_url="mysql+pymysql://me:hunter2@127.0.0.1:1/jobs", db_timeout_s=1.0))
    for operation in (migrate.upgrade, revisions.pending):
        with pytest.raises(DatabaseUnavailable, match=r"me:\*\*\*@127\.0\.0\.1") as away:
            operation(db)
        assert "hunter2" not in str(away.value)
    db.close()
