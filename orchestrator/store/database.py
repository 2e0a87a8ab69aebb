"""Connections and transactions: `write` runs a function in one transaction, `read` outside of any."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from contextlib import suppress
from enum import Enum, auto
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

from orchestrator.errors import DatabaseUnavailable, PayloadTooLarge
from orchestrator.settings import Settings, safe_url
from orchestrator.store.dialect import LeaderLock, dialect_of, largest_statement

T = TypeVar("T")

#: Runs of one transaction before contention is given up on and reported.
MAX_RUNS = 8
#: A broken connection is tried again at once, a few times: a restarted server leaves many dead ones in the pool.
MAX_RECONNECTS = 3
#: Seconds; less than sessions wait for a row (a second at least), so that the first wait that was in vain is the last.
ONE_WAIT_S = 0.5
#: Seconds for which a transaction that waits for no row is tried again: others hold theirs until they commit, and only
#: who holds one for longer than that is in the way.
MOMENT_S = 0.1
#: Bytes of a statement beside the payload in it: its other columns at their largest.
BESIDE_PAYLOAD = 65_536


#: What our code makes of a row that it does not expect.
BUGS = (LookupError, AttributeError, ArithmeticError, AssertionError)
#: Errors about what was to be written, or that our code makes of it: the same write would fail again. All others are
#: about the server, or now.
CONTENT_ERRORS = (
    PayloadTooLarge,
    DataError,
    IntegrityError,
    ProgrammingError,
    InterfaceError,
    TypeError,
    ValueError,  # of Unicode, too
    *BUGS,
)


class RowsHeld(DatabaseUnavailable):
    """Others hold some of the rows and did not let go in time; what they do not hold can be written without those."""


class TookTooLong(DatabaseUnavailable):
    """The server did not answer within `db_timeout_s`: it is slow, or this connection died in silence."""


class DatabaseRefuses(DatabaseUnavailable):
    """The server is there and will not serve us before an operator changes what the message says."""


class Waiting(Enum):
    """How long a transaction waits for a row that others hold."""

    #: As long as sessions do, once.
    ONCE = auto()
    #: For a second, in the row's queue: whoever only tries does not get a row for which others queue all the time.
    BRIEFLY = auto()
    #: It tries for a moment, as long as others take to commit.
    MOMENT = auto()
    NOT = auto()


class Database:
    """One process's access to the database. Thread-safe; open it after fork, once.

    Unless `again_when_late`, nothing is run again after it got no answer within `db_timeout_s` (TookTooLong). With
    `silence_s`, a transaction that got none for so long runs again if the server is not at work for it.
    """

    def __init__(self, settings: Settings, *, again_when_late: bool = True, silence_s: float | None = None) -> None:
        self.settings = settings
        self._again_when_late = again_when_late
        self._dialect = dialect_of(settings.database_url)
        self.engine: Engine = self._dialect.engine(settings)
        self._reader: Engine = self._dialect.engine(settings, autocommit=True)
        self._vigil = None if silence_s is None else self._dialect.vigil(self.engine, settings, silence_s)

    def write(self, work: Callable[[Connection], T], patience_s: float = math.inf) -> T:
        """Run `work` in one transaction, again from its start when rows were contended or the connection broke.

        After `patience_s` seconds it is not run again for contended rows (RowsHeld).

        A connection that breaks during COMMIT leaves it unknown whether the work was done; `work` is written to
        find its own traces then. Raises DatabaseUnavailable when the server cannot serve now, PayloadTooLarge when it
        takes no statement as large as this; any other error is about the statement or one of its rows, and is passed
        on as it is.
        """
        return self._run(self.engine, work, transaction=True, patience_s=patience_s)

    def write_waiting_once(self, work: Callable[[Connection], T]) -> T:
        """Like `write`, but a row that somebody does not let go is waited for once (RowsHeld); deadlocks run again."""
        return self._run(self.engine, work, transaction=True, wait_s=ONE_WAIT_S)

    def write_at_once(self, work: Callable[[Connection], T], patience_s: float = 0.0, wait_s: int = 0) -> T:
        """Like `write`, but wait for no row (RowsHeld when others hold one), or for `wait_s` seconds in its queue.

        For `patience_s` seconds it is tried again.
        """

        def unwilling(conn: Connection) -> T:
            with self._dialect.waiting(conn, wait_s):
                return work(conn)

        return self.write(unwilling, patience_s)

    def write_batch(self, work: Callable[[Connection], T], waiting: Waiting = Waiting.ONCE) -> T:
        """Like `write`, for work that others wait for meanwhile: it waits for held rows as told. Raises RowsHeld."""
        match waiting:
            case Waiting.ONCE:
                return self.write_waiting_once(work)
            case Waiting.BRIEFLY:
                return self.write_at_once(work, wait_s=1)
            case Waiting.MOMENT:
                return self.write_at_once(work, MOMENT_S)
            case Waiting.NOT:
                return self.write_at_once(work)

    def write_apart(self, conn: Connection, work: Callable[[Connection], T]) -> T:
        """Run one statement that is committed at once, whatever becomes of the transaction around it on `conn`.

        Its connection is one of those for reads, or transactions could wait in a circle for connections. Where one
        transaction writes at a time it is a part of that. It waits for a row once.
        """
        if not self._dialect.locks_rows:
            return work(conn)
        try:
            return self._run(self._reader, work, transaction=False, wait_s=ONE_WAIT_S)
        except RowsHeld:
            conn.invalidate()  # it idled for as long as we waited, and the server has ended it, or is about to
            raise

    def read(self, work: Callable[[Connection], T]) -> T:
        """Run `work` on a connection where every statement stands alone; again when the connection broke.

        But not when an answer took longer than `db_timeout_s`: whoever asks has waited long enough, and all the others
        wait for this thread and this connection.
        """
        return self._run(self._reader, work, transaction=False, again_when_late=False)

    def ping(self) -> None:
        """Raises DatabaseUnavailable when the database does not answer."""
        self.read(lambda conn: conn.execute(text("SELECT 1")).scalar())

    def version(self) -> tuple[str, tuple[int, ...]]:
        """The kind of server and its version. Raises DatabaseUnavailable.

        The library asks for it first thing. A server may be too old for what we say to each session then: that error is
        left to whoever asks next, for here the version is the answer. Empty where even that is not known.
        """
        with suppress(DBAPIError):
            self.ping()
        dialect = self._reader.dialect
        return dialect.name, tuple(getattr(dialect, "server_version_info", None) or ())

    def obstacle(self) -> str | None:
        """What an operator must change before this server takes our writes. Raises DatabaseUnavailable."""
        return self.read(self._dialect.obstacle)

    def needed_packet(self) -> int:
        """Bytes that a statement with a payload of the largest size may have: each of its own may be escaped."""
        return 2 * self.settings.payload_max_bytes + BESIDE_PAYLOAD

    def largest_statement(self) -> int | None:
        """The bytes that the server takes less than in one statement; None: it says no number."""
        return self.read(largest_statement)

    def leader_lock(self) -> LeaderLock | None:
        return self._guard(lambda: self._dialect.leader_lock(self._reader, self.settings))

    def close(self) -> None:
        if self._vigil is not None:
            self._vigil.close()
        self.engine.dispose()
        self._reader.dispose()

    def _run(
        self,
        engine: Engine,
        work: Callable[[Connection], T],
        *,
        transaction: bool,
        patience_s: float = math.inf,
        wait_s: float = math.inf,
        again_when_late: bool = True,
    ) -> T:
        reconnects, began = 0, time.monotonic()
        for run in range(1, MAX_RUNS + 1):
            try:
                with engine.begin() if transaction else engine.connect() as connection:
                    return work(connection)
            except DBAPIError as error:
                if self._dialect.is_too_large(error) and error.orig is not None:
                    raise PayloadTooLarge(str(error.orig.args[-1])) from error
                late = self._dialect.is_late(error)
                broken = (again_when_late and self._again_when_late) if late else error.connection_invalidated
                patient_s = min(patience_s, wait_s) if self._dialect.is_held(error) else patience_s
                if run < MAX_RUNS and broken and reconnects < MAX_RECONNECTS:
                    reconnects += 1
                elif run < MAX_RUNS and self._dialect.is_contention(error) and time.monotonic() - began < patient_s:
                    time.sleep(random.uniform(0, 0.005 * 2**run))
                elif self._dialect.is_away(error):
                    raise self.unavailable(error) from error
                elif self._dialect.is_content(error) and error.orig is not None:
                    raise DataError(error.statement, error.params, error.orig, hide_parameters=True) from error
                else:
                    raise
            except PoolTimeout as error:
                raise self.unavailable(error) from error
        raise AssertionError  # the last run returns or raises

    def _guard(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except SQLAlchemyError as error:
            raise self.unavailable(error) from error

    def unavailable(self, error: SQLAlchemyError) -> DatabaseUnavailable:
        """What it is called that this server could not serve."""
        where = safe_url(self.settings.database_url)
        if not isinstance(error, DBAPIError):
            return DatabaseUnavailable(f"{where}: {error}")
        remedy = self._dialect.remedy(error)
        return self._kind(error)(f"{where}: {error.orig}{f'; {remedy}' if remedy else ''}")

    def _kind(self, error: DBAPIError) -> type[DatabaseUnavailable]:
        if self._dialect.remedy(error):
            return DatabaseRefuses
        if self._dialect.locks_rows and self._dialect.is_contention(error):
            return RowsHeld
        return TookTooLong if self._dialect.is_late(error) else DatabaseUnavailable
