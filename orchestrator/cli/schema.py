"""`gpuorch migrate`, and the check that other commands make before they touch the tables."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click

from orchestrator.cli import versions
from orchestrator.cli.options import as_json, with_settings
from orchestrator.cli.output import print_json
from orchestrator.config import Loaded
from orchestrator.errors import ConfigError
from orchestrator.settings import Settings, safe_url
from orchestrator.store import revisions
from orchestrator.store.database import Database, DatabaseRefuses
from orchestrator.store.dialect import missing_file


@click.command()
@with_settings("database_url")
@click.option("--check", is_flag=True, help="Change nothing; exit 1 when migrations are missing.")
@as_json
def migrate(loaded: Loaded, *, check: bool, as_json: bool) -> None:
    """Bring the database to the schema of this version. Safe to run again, and by several at once."""
    with checked(loaded.settings, create=not check) as db:
        before = revisions.current(db)
        if check:
            require_schema(db)
        else:
            upgrade(db)
        after = revisions.current(db)
    if as_json:
        print_json({"before": before, "after": after})
    else:
        click.echo(f"schema: {before or 'empty'} → {after}")


def upgrade(db: Database) -> None:
    """Apply the migrations that it lacks."""
    if revisions.pending(db):
        from orchestrator.store import migrate as migrations  # its library takes longer to load than the rest of us

        migrations.upgrade(db)


@contextmanager
def opened(settings: Settings, *, create: bool = False) -> Iterator[Database]:
    """Raises ConfigError when there is none, unless it may be created, or when it refuses us."""
    if not create and (missing := missing_file(settings.database_url)):
        ways = "name yours with ORCH_DATABASE_URL, ORCH_DATA_DIR or --config, or start everything here: gpuorch dev"
        raise ConfigError(f"there is no database at {missing.absolute()}; {ways}; a new one: gpuorch migrate")
    db = Database(settings)
    try:
        yield db
    except DatabaseRefuses as refused:
        raise ConfigError(str(refused)) from refused
    finally:
        db.close()


@contextmanager
def checked(settings: Settings, *, create: bool = False) -> Iterator[Database]:
    """`opened`, of a server that is new enough and takes our writes. Raises ServerTooOld besides."""
    with opened(settings, create=create) as db:
        versions.require_database(db)
        yield db


def packet_problem(db: Database) -> str | None:
    """What to do when the database would refuse payloads that we take; None: it takes them all."""
    most, needed = db.largest_statement(), db.needed_packet()
    if most is None or most >= needed:
        return None
    return f"{most} bytes, a payload or result may need {needed}: raise it in the server, or lower payload_max_bytes"


def require_schema(db: Database) -> None:
    """Raises ConfigError when the database lacks migrations that this version knows."""
    if revisions.pending(db):
        current, where = revisions.current(db) or "empty", safe_url(db.settings.database_url)
        needed = f"this version needs {revisions.head()}; run: gpuorch migrate"
        raise ConfigError(f"the schema of {where} is {current}, {needed}")
