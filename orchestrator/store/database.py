"""Connections and transactions: `write` runs a function in one transaction, `read` outside of any."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import (
    DataError,
    DBAPIError,
    IntegrityError,
    InterfaceError,
    ProgrammingError,
    SQLAlchemyError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeout

from orchestrator.errors import DatabaseUnavailable
from orchestrator.settings import Settings, safe_url
from orchestrator.store.dialect import LeaderLock, dialect_of

T = TypeVar("T")

#: Runs of one transaction before contention is given up on and reported.
MAX_RUNS = 8
#: A broken connection is tried again at once, a few times: a restarted server leaves many dead ones in the pool.
MAX_RECONNECTS = 3


#: Errors about what was to be written: the same write would fail again. All others are about the server, or now.
CONTENT_ERRORS = (DataError, IntegrityError, ProgrammingError, InterfaceError, UnicodeError, TypeError, ValueError)


class RowsHeld(DatabaseUnavailable):
    """Others hold some of the rows and did not let go in time; what they do not hold can be written without those."""


class Database:
    """One process's access to the database. Thread-safe; open it after fork, once."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._dialect = dialect_of(settings.database_url)
        self.engine: Engine = self._dialect.engine(settings)
        self._reader: Engine = self._dialect.engine(settings, autocommit=True)

    def write(self, work: Callable[[Connection], T], patience_s: float = math.inf) -> T:
        """Run `work` in one transaction, again from its start when rows were contended or the connection broke.

        After `patience_s` seconds it is not run again for contended rows (RowsHeld).

        A connection that breaks during COMMIT leaves it unknown whether the work was done; `work` is written to
        find its own traces then. Raises DatabaseUnavailable when the server cannot serve now; any other error is about
        the statement or one of its rows, and is passed on as it is.
        """
        return self._run(self.engine, work, transaction=True, patience_s=patience_s)

    def write_at_once(self, work: Callable[[Connection], T]) -> T:
        """The same, but wait for no row. Raises RowsHeld when others hold one, where `write` would after a while."""

        def unwilling(conn: Connection) -> T:
            with self._dialect.without_waiting(conn):
                return work(conn)

        return self.write(unwilling, patience_s=0.0)

    def write_apart(self, conn: Connection, work: Callable[[Connection], T]) -> T:
        """Run one statement that is committed at once, whatever becomes of the transaction around it on `conn`.

        Its connection is one of those for reads, or transactions could wait in a circle for connections. Where one
        transaction writes at a time it is a part of that.
        """
        return self.read(work) if self._dialect.locks_rows else work(conn)

    def read(self, work: Callable[[Connection], T]) -> T:
        """Run `work` on a connection where every statement stands alone."""
        return self._run(self._reader, work, transaction=False, patience_s=math.inf)

    def ping(self) -> None:
        """Raises DatabaseUnavailable when the database does not answer."""
        self.read(lambda conn: conn.execute(text("SELECT 1")).scalar())

    def leader_lock(self) -> LeaderLock | None:
        return self._guard(lambda: self._dialect.leader_lock(self._reader, self.settings))

    def close(self) -> None:
        self.engine.dispose()
        self._reader.dispose()

    def _run(self, engine: Engine, work: Callable[[Connection], T], *, transaction: bool, patience_s: float) -> T:
        reconnects = 0
        give_up_at = time.monotonic() + patience_s
        for run in range(1, MAX_RUNS + 1):
            try:
                with engine.begin() if transaction else engine.connect() as connection:
                    return work(connection)
            except DBAPIError as error:
                if run < MAX_RUNS and error.connection_invalidated and reconnects < MAX_RECONNECTS:
                    reconnects += 1
                elif run < MAX_RUNS and self._dialect.is_contention(error) and time.monotonic() < give_up_at:
                    time.sleep(random.uniform(0, 0.005 * 2**run))
                elif self._dialect.is_away(error):
                    raise self._unavailable(error) from error
                elif self._dialect.is_content(error) and error.orig is not None:
                    raise DataError(error.statement, error.params, error.orig, hide_parameters=True) from error
                else:
                    raise
            except PoolTimeout as error:
                raise self._unavailable(error) from error
        raise AssertionError  # the last run returns or raises

    def _guard(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except SQLAlchemyError as error:
            raise self._unavailable(error) from error

    def _unavailable(self, error: SQLAlchemyError) -> DatabaseUnavailable:
        cause = error.orig if isinstance(error, DBAPIError) else error
        held = isinstance(error, DBAPIError) and self._dialect.locks_rows and self._dialect.is_contention(error)
        return (RowsHeld if held else DatabaseUnavailable)(f"{safe_url(self.settings.database_url)}: {cause}")
