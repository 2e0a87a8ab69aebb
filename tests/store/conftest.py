"""Databases that a busy machine does not hurry: what no test of this folder waits for may take its time."""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
from sqlalchemy import Connection, text

from orchestrator.settings import Settings
from orchestrator.store.database import Database
from tests.conftest import SHORT

T = TypeVar("T")

#: By these a session waits ten seconds for a row, or for the next statement of a transaction, and not one. Tests of
#: such a wait give times of their own.
PATIENT: dict[str, Any] = SHORT | {"db_timeout_s": 20.0, "worker_timeout_s": 30.0}


@pytest.fixture
def settings() -> Callable[..., Settings]:
    return lambda **given: Settings(**(PATIENT | given))


@pytest.fixture(scope="session")
def mariadb_with_tables(mariadb_with_tables: Database) -> Iterator[Database]:
    database = Database(Settings(**PATIENT, database_url=mariadb_with_tables.settings.database_url))
    yield database
    database.close()


@pytest.fixture
def unhindered(maria_db: Database) -> Callable[[Callable[[], T]], T]:
    """`unhindered(call)`: what it returns; whoever holds rows meanwhile, it must wait for none."""
    counted = text("SHOW GLOBAL STATUS LIKE 'Innodb_row_lock_waits'")

    def waits() -> int:
        return maria_db.read(lambda conn: int(conn.execute(counted).one()[1]))

    def run(call: Callable[[], T]) -> T:
        before = waits()
        answer = call()
        assert waits() == before, "it waited for a row"
        return answer

    return run


@pytest.fixture
def beside(maria_db: Database, unhindered: Callable[..., Any]) -> Callable[..., Any]:
    """`beside(open_work, other_work)`: run the second while the first is open; it must not wait for it."""

    def run(open_work: Callable[[Connection], object], other_work: Callable[[], Any]) -> Any:
        with maria_db.engine.connect() as connection:
            open_work(connection)
            answer = unhindered(other_work)
            connection.rollback()
        return answer

    return run
