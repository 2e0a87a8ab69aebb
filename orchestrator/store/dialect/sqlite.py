"""SQLite: a file that the processes of one machine share, with one writer at a time."""

from __future__ import annotations

import fcntl
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import DBAPIError, OperationalError

from orchestrator.errors import ConfigError
from orchestrator.settings import Settings
from orchestrator.store.dialect.contract import LeaderLock


class SQLite:
    locks_rows = False

    def engine(self, settings: Settings, *, autocommit: bool = False) -> Engine:
        folder = Path(make_url(settings.database_url).database or "").parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"database_url: {folder}: {error.strerror}") from None
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

    def is_held(self, _error: DBAPIError) -> bool:
        return False  # there are no rows to wait for: the one writer has them all

    def is_late(self, _error: DBAPIError) -> bool:
        return False  # no server

    def is_too_large(self, _error: DBAPIError) -> bool:
        return False  # there is no packet

    def is_content(self, _error: DBAPIError) -> bool:
        return False

    def waiting(self, _conn: Connection, _seconds: int) -> AbstractContextManager[object]:
        return nullcontext()

    def is_away(self, error: DBAPIError) -> bool:
        signs = ("locked", "unable to open", "disk", "readonly")
        broken = error.connection_invalidated or any(sign in str(error.orig) for sign in signs)
        return broken or self.remedy(error) is not None

    def remedy(self, error: DBAPIError) -> str | None:
        ruined = any(sign in str(error.orig) for sign in ("not a database", "malformed"))
        return "name another file in database_url (ORCH_DATABASE_URL), or restore this one" if ruined else None

    def obstacle(self, _conn: Connection) -> str | None:
        return None

    def vigil(self, _engine: Engine, _settings: Settings, _silence_s: float) -> None:
        return None  # a file is never silent

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
