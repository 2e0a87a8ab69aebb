"""Every difference between MariaDB and SQLite: types, clock, connections, errors, the leader's lock.

Elsewhere in the store the same statements run on both. A difference is a construct that compiles per database
(`utc_now`, `utc_shift`) or a method of `Dialect`, never a condition at the place of use.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from sqlalchemy import (
    BigInteger,
    Connection,
    DateTime,
    Engine,
    Float,
    Integer,
    Row,
    Select,
    String,
    Table,
    Text,
    Update,
    create_engine,
    event,
    literal_column,
    make_url,
    select,
    text,
)
from sqlalchemy.dialects import mysql, sqlite
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.pool import NullPool
from sqlalchemy.sql import ColumnElement
from sqlalchemy.sql.functions import FunctionElement

from orchestrator.errors import ConfigError, DatabaseUnavailable
from orchestrator.settings import Settings
from orchestrator.store.driver import QuickConnection

LongText = Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb")
#: SQLite counts rows only in a column that is exactly INTEGER.
CountingId = BigInteger().with_variant(Integer, "sqlite")
#: Names compare byte by byte: job "A" is not job "a", on either database.
TABLE_OPTIONS: dict[str, Any] = {
    "mysql_engine": "InnoDB",
    "mysql_charset": "utf8mb4",
    "mysql_collate": "utf8mb4_bin",
}
#: Microseconds on MariaDB; SQLite keeps text in the same shape, so both sort and compare.
UtcDateTime = DateTime().with_variant(mysql.DATETIME(fsp=6), "mysql", "mariadb")


class utc_now(FunctionElement[Any]):  # noqa: N801 - reads as the SQL function it is
    """The database's clock, UTC, microseconds."""

    type = DateTime()
    inherit_cache = True


def clock(conn: Connection) -> datetime:
    """The same, asked for by itself."""
    now: datetime = conn.execute(select(utc_now())).scalar_one()
    return now


class utc_shift(FunctionElement[Any]):  # noqa: N801
    """`utc_shift(seconds)`: the database's clock moved by a bound number of seconds."""

    type = DateTime()
    inherit_cache = True


@compiles(utc_now, "mysql", "mariadb")
def _now_mysql(_element: utc_now, _compiler: Any, **_kw: Any) -> str:
    return "utc_timestamp(6)"


@compiles(utc_now, "sqlite")
def _now_sqlite(_element: utc_now, _compiler: Any, **_kw: Any) -> str:
    return "(strftime('%Y-%m-%d %H:%M:%f000', 'now'))"


@compiles(utc_shift, "mysql", "mariadb")
def _shift_mysql(element: utc_shift, compiler: Any, **kw: Any) -> str:
    return f"(utc_timestamp(6) + INTERVAL (1000000 * {compiler.process(element.clauses, **kw)}) MICROSECOND)"


@compiles(utc_shift, "sqlite")
def _shift_sqlite(element: utc_shift, compiler: Any, **kw: Any) -> str:
    seconds = compiler.process(element.clauses, **kw)
    return f"strftime('%Y-%m-%d %H:%M:%f000', 'now', printf('%+.3f seconds', {seconds}))"


class earlier(FunctionElement[Any]):  # noqa: N801
    """`earlier(moment, seconds)`: a column's moment, so many seconds before."""

    type = DateTime()
    inherit_cache = True


@compiles(earlier, "mysql", "mariadb")
def _earlier_mysql(element: earlier, compiler: Any, **kw: Any) -> str:
    moment, seconds = (compiler.process(clause, **kw) for clause in element.clauses)
    return f"({moment} - INTERVAL (1000000 * {seconds}) MICROSECOND)"


@compiles(earlier, "sqlite")
def _earlier_sqlite(element: earlier, compiler: Any, **kw: Any) -> str:
    moment, seconds = (compiler.process(clause, **kw) for clause in element.clauses)
    return f"strftime('%Y-%m-%d %H:%M:%f000', {moment}, printf('-%.3f seconds', {seconds}))"


Keyed = TypeVar("Keyed", Select[Any], Update)


def by_key(statement: Keyed, *tables: Table) -> Keyed:
    """Find rows by their tables' primary keys, even if the planner would rather scan a small table.

    A scan that locks waits for the rows of all other transactions, and two of them deadlock.
    """
    hint, server = "FORCE INDEX (PRIMARY)", "mysql"
    if isinstance(statement, Update):
        return statement.with_hint(hint, dialect_name=server)
    for table in tables:
        statement = statement.with_hint(table, hint, server)
    return statement


def upsert(
    conn: Connection, table: Table, rows: Sequence[dict[str, Any]], computed: Callable[[Any], dict[str, Any]]
) -> None:
    """Insert rows by one statement; those that exist take all new values, but for what `computed` makes of both."""
    key = [column.name for column in table.primary_key]
    if conn.dialect.name == "sqlite":
        added = sqlite.insert(table).values(rows)
        new = {name: added.excluded[name] for name in rows[0] if name not in key}
        conn.execute(added.on_conflict_do_update(index_elements=key, set_=new | computed(added.excluded)))
    else:
        given = mysql.insert(table).values(rows)
        new = {name: given.inserted[name] for name in rows[0] if name not in key}
        conn.execute(given.on_duplicate_key_update(new | computed(given.inserted)))


def upsert_returning(
    conn: Connection,
    table: Table,
    rows: list[dict[str, Any]],
    computed: Callable[[Any], dict[str, Any]],
    returned: Sequence[str],
) -> Sequence[Row[Any]]:
    """The same, and what the rows are after it. Their order is not said."""
    key = [column.name for column in table.primary_key]
    columns = [table.c[name] for name in returned]
    # One row is written as one: the text of that is known already, that of several is made each time.
    values: Any = rows if len(rows) > 1 else rows[0]
    if conn.dialect.name == "sqlite":
        added = sqlite.insert(table).values(values)
        change: Any = added.on_conflict_do_update(index_elements=key, set_=computed(added.excluded))
    else:
        given = mysql.insert(table).values(values)
        change = given.on_duplicate_key_update(computed(given.inserted))
    return conn.execute(change.returning(*columns)).all()


def largest(*values: ColumnElement[Any]) -> ColumnElement[Any]:
    return _Largest(*values)


class _Largest(FunctionElement[Any]):
    inherit_cache = True


@compiles(_Largest, "mysql", "mariadb")
def _largest_mysql(element: _Largest, compiler: Any, **kw: Any) -> str:
    return f"greatest({compiler.process(element.clauses, **kw)})"


@compiles(_Largest, "sqlite")
def _largest_sqlite(element: _Largest, compiler: Any, **kw: Any) -> str:
    return f"max({compiler.process(element.clauses, **kw)})"


def in_order(statement: Select[Any]) -> Select[Any]:
    """Join the tables as they are written: the small one leads, and an index of the large one must not tempt.

    The other database joins in this order by itself, having no statistics to be tempted by.
    """
    return statement.prefix_with("STRAIGHT_JOIN", dialect="mysql")


def walking(statement: Keyed, table: Table, index: str) -> Keyed:
    """Go through the table along an index: as far as the limit rather than sort all of it, or in order of its locks."""
    hint, server = f"FORCE INDEX ({index})", "mysql"
    if isinstance(statement, Update):
        return statement.with_hint(hint, dialect_name=server)
    return statement.with_hint(table, hint, server)


class LeaderLock(Protocol):
    """A mutual-exclusion hint: quick to notice a dead holder, never the proof of leadership."""

    def acquire(self) -> bool:
        """Take it without waiting; True when this process now holds it."""

    def held(self) -> bool:
        """Whether it is certainly still ours. Doubt is False."""

    def release(self) -> None: ...


class Dialect(Protocol):
    #: Whether those who write other rows are in nobody's way.
    locks_rows: bool

    def engine(self, settings: Settings, *, autocommit: bool = False) -> Engine:
        """Connections for transactions; with `autocommit`, for single reads that stand alone and take no locks."""

    def is_contention(self, error: DBAPIError) -> bool:
        """Whether the same transaction may succeed when simply run again."""

    def is_away(self, error: DBAPIError) -> bool:
        """Whether the server cannot serve now, whatever is asked of it."""

    def is_content(self, error: DBAPIError) -> bool:
        """Whether it is about what was to be written, although the driver calls it trouble of the server."""

    def without_waiting(self, conn: Connection) -> AbstractContextManager[object]:
        """Meanwhile what others hold is contention at once."""

    def leader_lock(self, engine: Engine, settings: Settings) -> LeaderLock | None:
        """The lock, on an autocommit engine; None where it proves nothing and only the row may decide."""

    def migration_lock(self, engine: Engine) -> AbstractContextManager[Connection]:
        """A connection to change the schema with; meanwhile other processes wait for theirs."""


#: The file of a scratch database, in its directory: it may be copied while nobody has it open.
SCRATCH = "scratch.db"


def scratch_url(directory: str) -> str:
    """A database that needs no server, for a moment."""
    return f"sqlite:///{directory}/{SCRATCH}"


def dialect_of(url: str) -> Dialect:
    name = make_url(url).get_backend_name()
    if name == "sqlite":
        return SQLite()
    if name in {"mysql", "mariadb"}:
        return MariaDB()
    message = f"database_url: {name!r} is not supported; use mysql+pymysql:// or sqlite://"
    raise ConfigError(message)


class MariaDB:
    locks_rows = True
    #: 1213 deadlock, 1205 lock wait, 1020 row changed since read (innodb_snapshot_isolation).
    CONTENTION = frozenset({1213, 1205, 1020})
    #: A CHECK refused the row.
    CONTENT = frozenset({4025})
    READ_ONLY = frozenset({1290, 1792, 1836})
    #: Refused or broken connections, too many of them, shutting down, read-only after a failover; and contention
    #: that did not end.
    AWAY = CONTENTION | READ_ONLY | {1040, 1053, 1203, 1927, 2002, 2003, 2006, 2013, 2055, 4031}
    #: Seconds to wait for another instance that migrates.
    MIGRATION_WAIT_S = 600
    #: Seconds a migration waits for a row, or may think between two statements.
    MIGRATION_PATIENCE_S = 60
    NOT_ON_GALERA = 1235

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
        patience = max(1, int(settings.worker_timeout_s / 3))
        event.listen(engine, "do_connect", lambda _dialect, _record, args, named: QuickConnection(*args, **named))
        event.listen(engine, "connect", partial(self._prepare_session, patience_s=patience))
        event.listen(engine, "handle_error", self._leave_the_demoted)
        return engine

    def _leave_the_demoted(self, context: ExceptionContext) -> None:
        """A server that became read-only was failed over: its name may lead to the new primary, its connections not."""
        cause = context.original_exception
        if cause.args and cause.args[0] in self.READ_ONLY:
            context.is_disconnect = True

    def is_contention(self, error: DBAPIError) -> bool:
        return self._code(error) in self.CONTENTION

    def is_away(self, error: DBAPIError) -> bool:
        return error.connection_invalidated or self._code(error) in self.AWAY

    def is_content(self, error: DBAPIError) -> bool:
        return self._code(error) in self.CONTENT

    @contextmanager
    def without_waiting(self, conn: Connection) -> Iterator[None]:
        usual = conn.execute(text("SELECT @@SESSION.innodb_lock_wait_timeout")).scalar()
        conn.execute(text("SET SESSION innodb_lock_wait_timeout = 0"))
        try:
            yield
        finally:
            if not conn.invalidated:
                conn.execute(text("SET SESSION innodb_lock_wait_timeout = :usual"), {"usual": usual})

    def _code(self, error: DBAPIError) -> object:
        return error.orig.args[0] if error.orig is not None and error.orig.args else None

    def leader_lock(self, engine: Engine, settings: Settings) -> LeaderLock | None:
        with engine.connect() as connection:
            # On Galera the lock is local to one server (or refused): only the fenced row may decide.
            galera = connection.execute(text("SHOW GLOBAL VARIABLES LIKE 'wsrep_on'")).fetchone()
        if galera is not None and galera[1] == "ON":
            return None
        return ServerLock(engine, settings.leader_lock, settings.leader_ttl_s)

    @contextmanager
    def migration_lock(self, engine: Engine) -> Iterator[Connection]:
        # A connection of its own, without a read timeout: altering a large table takes as long as it takes.
        patient = create_engine(engine.url, poolclass=NullPool, hide_parameters=True)
        event.listen(patient, "connect", partial(self._prepare_session, patience_s=self.MIGRATION_PATIENCE_S))
        with patient.connect() as connection:
            self._wait_to_migrate(connection)
            connection.commit()
            yield connection
            connection.commit()

    def _wait_to_migrate(self, connection: Connection) -> None:
        # The lock's name is the server's, a schema is one database's. It is free when the connection ends.
        lock = "SELECT GET_LOCK(CONCAT('gpu_orchestrator_migration_', MD5(DATABASE())), :wait)"
        try:
            taken = connection.execute(text(lock), {"wait": self.MIGRATION_WAIT_S}).scalar()
        except DBAPIError as error:
            if isinstance(error.orig, Exception) and error.orig.args[:1] == (self.NOT_ON_GALERA,):
                return  # there is no such lock in a cluster: one operator migrates it, once
            raise
        if taken != 1:
            raise DatabaseUnavailable("another instance migrates for very long; try again when it is done")

    def _prepare_session(self, connection: Any, _record: Any, *, patience_s: int) -> None:
        with connection.cursor() as cursor:
            cursor.execute(
                f"SET time_zone = '+00:00', innodb_lock_wait_timeout = {patience_s},"
                f" idle_transaction_timeout = {patience_s}"
            )


class SQLite:
    locks_rows = False

    def engine(self, settings: Settings, *, autocommit: bool = False) -> Engine:
        path = make_url(settings.database_url).database
        if not path or path == ":memory:":
            message = "database_url: SQLite needs a file, since several processes share it"
            raise ConfigError(message)
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"database_url: {Path(path).parent}: {error.strerror}") from None
        engine = create_engine(
            settings.database_url,
            hide_parameters=True,  # payloads, in the text of an error
            pool_size=settings.db_pool_size,
            max_overflow=settings.db_pool_size,
            connect_args={"timeout": settings.db_timeout_s},
            **({"isolation_level": "AUTOCOMMIT"} if autocommit else {}),
        )
        event.listen(engine, "connect", self._prepare_session)
        if not autocommit:
            event.listen(engine, "begin", self._begin_immediate)
        return engine

    def is_contention(self, error: DBAPIError) -> bool:
        return isinstance(error, OperationalError) and "locked" in str(error.orig)

    def is_content(self, _error: DBAPIError) -> bool:
        return False

    def without_waiting(self, _conn: Connection) -> AbstractContextManager[object]:
        return nullcontext()  # there are no rows to wait for: the one writer has them all

    def is_away(self, error: DBAPIError) -> bool:
        signs = ("locked", "unable to open", "disk", "readonly")
        return error.connection_invalidated or any(sign in str(error.orig) for sign in signs)

    def leader_lock(self, engine: Engine, settings: Settings) -> LeaderLock | None:
        return FileLock(Path(f"{engine.url.database}.{settings.leader_lock}"))

    def migration_lock(self, engine: Engine) -> AbstractContextManager[Connection]:
        return engine.begin()  # the one writer; the tables appear all at once or not at all

    def _prepare_session(self, connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # the driver's own BEGIN would be a deferred one
        for pragma in ("journal_mode=WAL", "synchronous=FULL"):
            connection.execute(f"PRAGMA {pragma}")

    def _begin_immediate(self, connection: Connection) -> None:
        # A transaction that reads first and writes later could not be upgraded when another wrote in between.
        connection.exec_driver_sql("BEGIN IMMEDIATE")


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

    def acquire(self) -> bool:
        try:
            if self._connection is None:
                self._connection = self._engine.connect()
                self._connection.detach()
                self._connection.execute(text("SET SESSION wait_timeout = :limit"), {"limit": self._idle_limit_s})
            # NULL means error, not success.
            return self._ask(self._connection, "SELECT GET_LOCK(:name, 0)") == 1
        except SQLAlchemyError as error:
            self.release()
            raise DatabaseUnavailable(f"leader lock {self._name}: {error}") from error

    def held(self) -> bool:
        if self._connection is None:
            return False
        try:
            return self._ask(self._connection, "SELECT IS_USED_LOCK(:name) = CONNECTION_ID()") == 1
        except SQLAlchemyError:
            self.release()
            return False

    def release(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.invalidate()

    def _ask(self, connection: Connection, question: str) -> object:
        return connection.execute(text(question), {"name": self._name}).scalar()


class FileLock:
    """flock on a file beside the database: the kernel frees it when the process ends, however it ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    def acquire(self) -> bool:
        fd = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        self._fd = fd
        return True

    def held(self) -> bool:
        return self._fd is not None

    def release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def seconds_since(column: ColumnElement[Any]) -> ColumnElement[Any]:
    """Age of a timestamp in seconds by the database's clock."""
    return _SecondsSince(column)


class _SecondsSince(FunctionElement[Any]):
    inherit_cache = True


@compiles(_SecondsSince, "mysql", "mariadb")
def _since_mysql(element: _SecondsSince, compiler: Any, **kw: Any) -> str:
    return f"(timestampdiff(MICROSECOND, {compiler.process(element.clauses, **kw)}, utc_timestamp(6)) / 1000000)"


@compiles(_SecondsSince, "sqlite")
def _since_sqlite(element: _SecondsSince, compiler: Any, **kw: Any) -> str:
    return f"((julianday('now') - julianday({compiler.process(element.clauses, **kw)})) * 86400.0)"


def seconds_between(start: ColumnElement[Any], end: ColumnElement[Any]) -> ColumnElement[Any]:
    """From one timestamp to a later one."""
    return _SecondsBetween(start, end)


class _SecondsBetween(FunctionElement[Any]):
    type = Float()
    inherit_cache = True


@compiles(_SecondsBetween, "mysql", "mariadb")
def _between_mysql(element: _SecondsBetween, compiler: Any, **kw: Any) -> str:
    return f"(timestampdiff(MICROSECOND, {compiler.process(element.clauses, **kw)}) / 1e6)"


@compiles(_SecondsBetween, "sqlite")
def _between_sqlite(element: _SecondsBetween, compiler: Any, **kw: Any) -> str:
    start, end = (compiler.process(clause, **kw) for clause in element.clauses)
    return f"((julianday({end}) - julianday({start})) * 86400.0)"


def json_field(column: ColumnElement[Any], name: str) -> ColumnElement[str]:
    """A text, number or truth of a JSON object, as text; NULL where there is none."""
    return _JsonField(column, literal_column(f"'$.{name}'"))


class _JsonField(FunctionElement[Any]):
    type = String()
    inherit_cache = True


@compiles(_JsonField, "mysql", "mariadb")
def _json_mysql(element: _JsonField, compiler: Any, **kw: Any) -> str:
    return f"json_value({compiler.process(element.clauses, **kw)})"


@compiles(_JsonField, "sqlite")
def _json_sqlite(element: _JsonField, compiler: Any, **kw: Any) -> str:
    return f"json_extract({compiler.process(element.clauses, **kw)})"
