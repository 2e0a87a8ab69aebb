"""What the store asks of a database beside statements: connections, what its errors mean, locks."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from orchestrator.settings import Settings
from orchestrator.store.dialect.vigil import Vigil


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

    def is_held(self, error: DBAPIError) -> bool:
        """Whether it is contention with somebody who did not let go of a row in time, and may not the next time."""

    def is_away(self, error: DBAPIError) -> bool:
        """Whether the server cannot serve now, whatever is asked of it."""

    def is_late(self, error: DBAPIError) -> bool:
        """Whether the server did not answer in time: it is slow, or this connection died in silence."""

    def is_too_large(self, error: DBAPIError) -> bool:
        """Whether the statement has more bytes than one may have, whoever runs it again."""

    def is_content(self, error: DBAPIError) -> bool:
        """Whether it is about what was to be written, although the driver calls it trouble of the server."""

    def remedy(self, error: DBAPIError) -> str | None:
        """What an operator must change where the server is there and refuses to serve us; None: it does not refuse."""

    def obstacle(self, conn: Connection) -> str | None:
        """What an operator must change before such a server takes our writes, though it lets us read; None: nothing."""

    def waiting(self, conn: Connection, seconds: int) -> AbstractContextManager[object]:
        """Meanwhile what others hold for so long is contention."""

    def vigil(self, engine: Engine, settings: Settings, silence_s: float) -> Vigil | None:
        """Over connections for transactions, which may die in silence; None where there are none."""

    def leader_lock(self, engine: Engine, settings: Settings) -> LeaderLock | None:
        """The lock, on an autocommit engine; None where it proves nothing and only the row may decide."""

    def migration_lock(self, engine: Engine) -> AbstractContextManager[Connection]:
        """A connection to change the schema with; meanwhile other processes wait for theirs."""
