"""Migrations: bring a database to the schema this version was written for.

The scripts are Alembic's and live in `sql/` in the repository, in `orchestrator/_sql` when installed. Any
number of instances may upgrade at the same time: one does the work, the others wait and find it done.

After a change of schema.py, `python -m orchestrator.store.migrate "what changed"` writes the next script.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from orchestrator import actors
from orchestrator.errors import ConfigError, DatabaseUnavailable
from orchestrator.settings import Settings, safe_url
from orchestrator.store import audit
from orchestrator.store.database import Database
from orchestrator.store.dialect import dialect_of, scratch_url

_PACKAGE = Path(__file__).resolve().parent.parent


def upgrade(db: Database) -> None:
    """Apply what is missing. Raises DatabaseUnavailable; running it again continues where it stopped."""
    if _is_newer(current_revision(db)):
        return  # a later version has been here; it only adds (see `pending`)
    with _locked(db) as connection:
        before = _revision(connection)
        command.upgrade(_config(connection), "head")
        if (after := _revision(connection)) != before:
            event = audit.Event("schema.migrated", details={"before": before, "after": after})
            with actors.acting(actors.current() or actors.of_user()):
                audit.record(connection, [event])


def current_revision(db: Database) -> str | None:
    """The database's revision; None when no migration ever ran."""
    return db.read(_revision)


def _revision(conn: Connection) -> str | None:
    return MigrationContext.configure(conn).get_current_revision()


def head_revision() -> str | None:
    return _scripts().get_current_head()


def pending(db: Database) -> bool:
    """Whether this version knows migrations that the database lacks.

    A revision it does not know is that of a later version. Migrations expand first and contract a release
    later, so the older version keeps working meanwhile: that lets instances be replaced one by one.
    """
    current = current_revision(db)
    return current != head_revision() and not _is_newer(current)


def revise(message: str) -> None:
    """Write a script for the difference between all migrations and schema.py; `ruff format sql` tidies it."""
    with tempfile.TemporaryDirectory() as scratch:
        db = Database(Settings(database_url=scratch_url(scratch)))
        upgrade(db)
        number = f"{int(head_revision() or 0) + 1:04d}"
        with _locked(db) as connection:
            command.revision(_config(connection), message, autogenerate=True, rev_id=number)
        db.close()


def _is_newer(revision: str | None) -> bool:
    known = {script.revision for script in _scripts().walk_revisions()}
    return revision is not None and revision not in known


@contextmanager
def _locked(db: Database) -> Iterator[Connection]:
    try:
        with dialect_of(db.settings.database_url).migration_lock(db.engine) as connection:
            yield connection
    except DBAPIError as error:
        raise DatabaseUnavailable(f"{safe_url(db.settings.database_url)}: {error.orig}") from error


def _scripts() -> ScriptDirectory:
    return ScriptDirectory.from_config(_config())


def _config(connection: Connection | None = None) -> Config:
    config = Config(attributes={"connection": connection})
    # The file that a person reads is numbered and named; % is the parser's own sign.
    config.set_main_option("script_location", str(_directory()).replace("%", "%%"))
    config.set_main_option("file_template", "%%(rev)s_%%(slug)s")
    return config


def _directory() -> Path:
    for directory in (_PACKAGE / "_sql", _PACKAGE.parent / "sql"):
        if (directory / "env.py").is_file():
            return directory
    raise ConfigError("the migration scripts are missing; install gpu-orchestrator again")


if __name__ == "__main__":
    revise(" ".join(sys.argv[1:]))
