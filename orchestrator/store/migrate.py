"""Migrations: bring a database to the schema this version was written for.

The scripts are Alembic's (`revisions` says where they are). Any number of instances may upgrade at the same time: one
does the work, the others wait and find it done.

After a change of schema.py, `python -m orchestrator.store.migrate "what changed"` writes the next script.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from orchestrator import actors
from orchestrator.errors import ConfigError
from orchestrator.settings import Settings, safe_url
from orchestrator.store import audit, revisions
from orchestrator.store.database import Database
from orchestrator.store.dialect import dialect_of, scratch_url


def upgrade(db: Database) -> None:
    """Apply what is missing. Running it again continues where it stopped.

    Raises DatabaseUnavailable, and ConfigError where a row must be mended first.
    """
    if revisions.is_newer(revisions.current(db)):
        return  # a later version has been here; it only adds (see `revisions.pending`)
    with _locked(db) as connection:
        before = revisions.of(connection)
        command.upgrade(_config(connection), "head")
        if (after := revisions.of(connection)) != before:
            event = audit.Event("schema.migrated", details={"before": before, "after": after})
            with actors.acting(actors.current() or actors.of_user()):
                audit.record(connection, [event])


def revise(message: str) -> None:
    """Write a script for the difference between all migrations and schema.py; `ruff format sql` tidies it."""
    with tempfile.TemporaryDirectory() as scratch:
        db = Database(Settings(database_url=scratch_url(scratch)))
        upgrade(db)
        number = f"{int(revisions.head()) + 1:04d}"
        with _locked(db) as connection:
            command.revision(_config(connection), message, autogenerate=True, rev_id=number)
        db.close()


@contextmanager
def _locked(db: Database) -> Iterator[Connection]:
    try:
        with dialect_of(db.settings.database_url).migration_lock(db.engine) as connection:
            yield connection
    except CommandError as refused:
        raise ConfigError(f"{safe_url(db.settings.database_url)}: {refused}") from refused
    except DBAPIError as error:
        held = dialect_of(db.settings.database_url).is_held(error)
        hint = "; somebody's transaction uses a table that must change: end it, and migrate again" if held else ""
        named = db.unavailable(error)
        raise type(named)(f"{named}{hint}") from error


def _config(connection: Connection) -> Config:
    config = Config(attributes={"connection": connection})
    # The file that a person reads is numbered and named; % is the parser's own sign.
    config.set_main_option("script_location", str(revisions.directory()).replace("%", "%%"))
    config.set_main_option("file_template", "%%(rev)s_%%(slug)s")
    return config


if __name__ == "__main__":
    revise(" ".join(sys.argv[1:]))
