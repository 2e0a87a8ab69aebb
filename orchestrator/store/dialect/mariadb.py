"""MariaDB: a server that others share, by sessions, locks of rows and numbered errors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from threading import Lock
from types import MappingProxyType
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from orchestrator.errors import DatabaseUnavailable
from orchestrator.settings import Settings
from orchestrator.store.dialect.contract import LeaderLock
from orchestrator.store.dialect.driver import WatchedConnection
from orchestrator.store.dialect.vigil import Vigil

#: Where an operator says which server, database and user are meant.
_URL = "database_url (ORCH_DATABASE_URL)"
_LOGIN = f"check the user and the password in {_URL}"
_RIGHTS = f"create the database if there is none, grant this user all rights on it, or name another in {_URL}"
_FROM_HERE = "let this user connect from this host, and the server know it"


class MariaDB:
    locks_rows = True
    #: 1213 deadlock, 1205 lock wait, 1020 row changed since read (innodb_snapshot_isolation).
    CONTENTION = frozenset({1213, 1205, 1020})
    LOCK_WAIT = 1205
    #: The server ended a statement of which the session's max_statement_time was over, and nothing else.
    TOOK_TOO_LONG = 1969
    #: Of `db_timeout_s`, how long a read may take.
    OF_THE_LIMIT = 0.9
    #: A CHECK refused the row.
    CONTENT = frozenset({4025})
    #: More than max_allowed_packet.
    TOO_LARGE = 1153
    READ_ONLY = frozenset({1290, 1792, 1836})
    #: In a log of statements there is no place for what we write under READ COMMITTED.
    UNLOGGED = 1665
    #: What lasts until an operator changes something: the error, and what.
    REMEDIES = MappingProxyType(
        dict.fromkeys((1045, 1251, 1275, 1524, 1698, 1820, 1862, 2059, 4151), _LOGIN)
        | dict.fromkeys((1044, 1142, 1143), _RIGHTS)
        | dict.fromkeys((1129, 1130), _FROM_HERE)
        | {
            1049: f"create the database, or name another in {_URL}",
            2026: f"check what ssl_… says in {_URL}",
            UNLOGGED: "set binlog_format to ROW or MIXED, now (SET GLOBAL) and in the server's configuration file",
        }
    )
    UNWILLING = READ_ONLY | REMEDIES.keys()
    #: Refused or broken connections, too many of them, shutting down, read-only after a failover; contention that did
    #: not end, and what took too long.
    AWAY = CONTENTION | UNWILLING | {TOOK_TOO_LONG, 1040, 1053, 1203, 1226, 1927, 2002, 2003, 2006, 2013, 2055, 4031}
    MIGRATION = "gpu_orchestrator_migration"
    #: Seconds to wait for another instance that migrates.
    MIGRATION_WAIT_S = 600
    #: Seconds a migration waits for a row, or may think between two statements.
    MIGRATION_PATIENCE_S = 60
    #: Seconds; less than heartbeats may be late.
    ALTER_WAIT_S = 3
    NOT_ON_GALERA = 1235
    #: Values that do not fit are refused instead of cut, and no table gets an engine without transactions. Added to
    #: the server's own modes, which stay: by those the library decided how to write statements.
    MODES = "STRICT_TRANS_TABLES,NO_ENGINE_SUBSTITUTION"

    def engine(self, settings: Settings, *, autocommit: bool = False) -> Engine:
        limit = settings.db_timeout_s
        engine = create_engine(
            settings.database_url,
            isolation_level="AUTOCOMMIT" if autocommit else "READ COMMITTED",
            hide_parameters=True,  # payloads, in the text of an error
            pool_size=settings.db_pool_size,
            max_overflow=settings.db_pool_size,
            pool_timeout=limit,
            pool_recycle=3600,
            # Every transaction here ends by commit or rollback; the pool's own rollback would be a round trip more.
            pool_reset_on_return=None,
            # Nor is there anything to roll back where every statement stands alone.
            skip_autocommit_rollback=autocommit,
            connect_args={"connect_timeout": limit, "read_timeout": limit, "write_timeout": limit},
        )
        # The server ends a transaction that idles for so long: its process may be frozen, with locks. They are gone
        # before its worker is declared dead, and nobody who waits for them misses a heartbeat too many.
        idle_s = settings.worker_timeout_s / 3
        # Whoever waits for a row hears that it is held before the connection counts as broken.
        wait_s = min(idle_s, limit / 2)
        event.listen(engine, "do_connect", lambda _dialect, _record, args, named: WatchedConnection(*args, **named))
        # A read that nobody waits for any more ends in the server too, a little before we give up the connection. What
        # is in a transaction may take as long as it takes: a duty, or what others wait for.
        statement_s = self.OF_THE_LIMIT * limit if autocommit else None
        prepare = partial(self._prepare_session, wait_s=wait_s, idle_s=idle_s, statement_s=statement_s)
        event.listen(engine, "connect", prepare)
        event.listen(engine, "handle_error", self._leave_the_unwilling)
        return engine

    def _leave_the_unwilling(self, context: ExceptionContext) -> None:
        """A server that became read-only was failed over: its name may lead to the new primary, its connections not.

        Nor is what an operator mends seen by sessions that are open already.
        """
        cause = context.original_exception
        if context.connection is not None and cause.args and cause.args[0] in self.UNWILLING:
            context.is_disconnect = True

    def is_contention(self, error: DBAPIError) -> bool:
        return self._code(error) in self.CONTENTION

    def is_held(self, error: DBAPIError) -> bool:
        return self._code(error) == self.LOCK_WAIT

    def is_away(self, error: DBAPIError) -> bool:
        return error.connection_invalidated or self._code(error) in self.AWAY

    def is_late(self, error: DBAPIError) -> bool:
        # To the driver that is a lost connection, as one found dead: only what it was raised for tells them apart.
        given_up = error.orig is not None and isinstance(error.orig.__context__, TimeoutError)
        return given_up or self._code(error) == self.TOOK_TOO_LONG

    def is_too_large(self, error: DBAPIError) -> bool:
        return self._code(error) == self.TOO_LARGE

    def is_content(self, error: DBAPIError) -> bool:
        return self._code(error) in self.CONTENT

    def remedy(self, error: DBAPIError) -> str | None:
        code = self._code(error)
        return self.REMEDIES.get(code) if isinstance(code, int) else None

    def obstacle(self, conn: Connection) -> str | None:
        """All that we read would be well meanwhile, and the first write fail."""
        unlogged = conn.execute(text("SELECT @@log_bin = 1 AND @@binlog_format = 'STATEMENT'")).scalar()
        return f"its binlog_format is STATEMENT; {self.REMEDIES[self.UNLOGGED]}" if unlogged else None

    @contextmanager
    def waiting(self, conn: Connection, seconds: int) -> Iterator[None]:
        usual = conn.execute(text("SELECT @@SESSION.innodb_lock_wait_timeout")).scalar()
        conn.execute(text("SET SESSION innodb_lock_wait_timeout = :seconds"), {"seconds": seconds})
        if not seconds:
            event.listen(conn, "before_cursor_execute", self._skip_safely, retval=True)
        try:
            yield
        finally:
            if not seconds:
                event.remove(conn, "before_cursor_execute", self._skip_safely)
            if not conn.invalidated:
                conn.execute(text("SET SESSION innodb_lock_wait_timeout = :usual"), {"usual": usual})

    @staticmethod
    def _skip_safely(_conn: Any, _cursor: Any, statement: str, parameters: Any, *_rest: Any) -> tuple[str, Any]:
        """With a limit of 0, what should pass over a held row fails (1180); it waits for none, whatever the limit."""
        skips = statement.endswith("SKIP LOCKED")
        return f"SET STATEMENT innodb_lock_wait_timeout = 1 FOR {statement}" if skips else statement, parameters

    def _code(self, error: DBAPIError) -> object:
        return error.orig.args[0] if error.orig is not None and error.orig.args else None

    def vigil(self, engine: Engine, settings: Settings, silence_s: float) -> Vigil:
        others = self.engine(settings.model_copy(update={"db_timeout_s": silence_s}), autocommit=True)
        return Vigil(engine, others, silence_s, settings.db_timeout_s)

    def leader_lock(self, engine: Engine, settings: Settings) -> LeaderLock | None:
        with engine.connect() as connection:
            # On Galera the lock is local to one server (or refused): only the fenced row may decide.
            galera = connection.execute(text("SHOW GLOBAL VARIABLES LIKE 'wsrep_on'")).fetchone()
            if galera is not None and galera[1] == "ON":
                return None
            return ServerLock(engine, lock_name(connection, settings.leader_lock), settings.leader_ttl_s)

    @contextmanager
    def migration_lock(self, engine: Engine) -> Iterator[Connection]:
        # A connection of its own, without a read timeout: altering a large table takes as long as it takes.
        patient = create_engine(engine.url, poolclass=NullPool, hide_parameters=True)
        prepare = partial(self._prepare_session, wait_s=self.MIGRATION_PATIENCE_S, idle_s=self.MIGRATION_PATIENCE_S)
        event.listen(patient, "connect", prepare)
        with patient.connect() as connection:
            # Whoever waits to alter a table that others use keeps all from it who come after.
            connection.execute(text("SET SESSION lock_wait_timeout = :wait"), {"wait": self.ALTER_WAIT_S})
            self._wait_to_migrate(connection)
            connection.commit()
            yield connection
            connection.commit()

    def _wait_to_migrate(self, connection: Connection) -> None:
        # It is free when the connection ends.
        lock = {"name": lock_name(connection, self.MIGRATION), "wait": self.MIGRATION_WAIT_S}
        try:
            taken = connection.execute(text("SELECT GET_LOCK(:name, :wait)"), lock).scalar()
        except DBAPIError as error:
            if isinstance(error.orig, Exception) and error.orig.args[:1] == (self.NOT_ON_GALERA,):
                return  # there is no such lock in a cluster: one operator migrates it, once
            raise
        if taken != 1:
            raise DatabaseUnavailable("another instance migrates for very long; try again when it is done")

    def _prepare_session(
        self, connection: Any, _record: Any, *, wait_s: float, idle_s: float, statement_s: float | None = None
    ) -> None:
        limit = "" if statement_s is None else f" max_statement_time = {statement_s},"
        with connection.cursor() as cursor:
            cursor.execute(
                f"SET time_zone = '+00:00', innodb_lock_wait_timeout = {max(1, int(wait_s))},"
                f" idle_transaction_timeout = {max(1, int(idle_s))},{limit}"
                f" sql_mode = CONCAT_WS(',', @@sql_mode, '{self.MODES}')"
            )
            cursor.execute("SELECT @@max_allowed_packet")
            (connection.max_packet,) = cursor.fetchone()


#: Characters of a lock's name, beyond which the server refuses it.
LOCK_NAME_MAX = 64


def lock_name(connection: Connection, ours: str) -> str:
    """A lock is the whole server's, and several deployments may have a database each there: its name has both."""
    named = f"{ours.lower()}_{_digest(connection.execute(text('SELECT DATABASE()')).scalar_one())}"
    if len(named) <= LOCK_NAME_MAX:
        return named
    digest = _digest(named)
    return f"{ours.lower()[: LOCK_NAME_MAX - len(digest) - 1]}_{digest}"


def _digest(name: str) -> str:
    return hashlib.md5(name.encode(), usedforsecurity=False).hexdigest()


class ServerLock:
    """MariaDB's GET_LOCK on a connection of its own, which no pool may recycle.

    The session's wait_timeout makes the server itself end a holder that is frozen. The lock is taken once and
    then only looked at: taking it again would stack, and one release would not free it.
    """

    def __init__(self, engine: Engine, name: str, ttl_s: float) -> None:
        self._engine = engine
        self._name = name
        self._idle_limit_s = max(1, round(ttl_s))
        self._connection: Connection | None = None
        self._asking = Lock()

    def acquire(self) -> bool:
        try:
            if self._connection is None:
                self._connection = self._engine.connect()
                self._connection.detach()
                self._connection.execute(text("SET SESSION wait_timeout = :limit"), {"limit": self._idle_limit_s})
            # NULL means error, not success.
            return self._ask(self._connection, "SELECT GET_LOCK(:name, 0)") == 1
        except SQLAlchemyError as error:
            self._disconnect()
            raise DatabaseUnavailable(f"leader lock {self._name}: {error}") from error

    def held(self) -> bool:
        if self._connection is None:
            return False
        try:
            return self._ask(self._connection, "SELECT IS_USED_LOCK(:name) = CONNECTION_ID()") == 1
        except SQLAlchemyError:
            self._disconnect()
            return False

    def release(self) -> None:
        """The next may have it when this returns: a connection that is closed keeps it until the server notices."""
        # Who closes us does not wait for ever for the thread that asks: then nobody may use its connection.
        if self._connection is not None and not self._asking.locked():
            with suppress(SQLAlchemyError):  # no answer: the lock ends with the connection, as soon as the server can
                self._ask(self._connection, "SELECT RELEASE_LOCK(:name)")
        self._disconnect()

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.invalidate()

    def _ask(self, connection: Connection, question: str) -> object:
        with self._asking:
            return connection.execute(text(question), {"name": self._name}).scalar()
