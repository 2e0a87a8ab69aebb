"""`gpuorch migrate`, and the check that other commands make before they touch the tables."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click

from orchestrator.cli.options import as_json, with_settings
from orchestrator.cli.output import print_json
from orchestrator.config import Loaded
from orchestrator.errors import ConfigError
from orchestrator.settings import Settings, safe_url
from orchestrator.store.database import Database


@click.command()
@with_settings("database_url")
@click.option("--check", is_flag=True, help="Change nothing; exit 1 when migrations are missing.")
@as_json
def migrate(loaded: Loaded, *, check: bool, as_json: bool) -> None:
    """Bring the database to the schema of this version. Safe to run again, and by several at once."""
    from orchestrator.store import migrate as migrations  # its library takes a third of a worker's start

    with opened(loaded.settings) as db:
        before = migrations.current_revision(db)
        if check:
            require_schema(db)
        else:
            migrations.upgrade(db)
        after = migrations.current_revision(db)
    if as_json:
        print_json({"before": before, "after": after})
    else:
        click.echo(f"schema: {before or 'empty'} → {after}")


@contextmanager
def opened(settings: Settings) -> Iterator[Database]:
    db = Database(settings)
    try:
        yield db
    finally:
        db.close()


def require_schema(db: Database) -> None:
    """Raises ConfigError when the database lacks migrations that this version knows."""
    from orchestrator.store import migrate as migrations

    if migrations.pending(db):
        current, head = migrations.current_revision(db) or "empty", migrations.head_revision()
        where = safe_url(db.settings.database_url)
        raise ConfigError(f"the schema of {where} is {current}, this version needs {head}; run: gpuorch migrate")
