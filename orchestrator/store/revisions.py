"""Which migrations a database has had, and which this version knows.

Without their library: every process asks this when it starts, and few of them migrate.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from sqlalchemy import Connection, inspect, text

from orchestrator.errors import ConfigError
from orchestrator.store.database import Database

_PACKAGE = Path(__file__).resolve().parent.parent


def current(db: Database) -> str | None:
    """The database's revision; None when no migration ever ran."""
    return db.read(of)


def of(conn: Connection) -> str | None:
    if not inspect(conn).has_table("alembic_version"):
        return None
    found: str | None = conn.execute(text("SELECT version_num FROM alembic_version")).scalar()
    return found


def head() -> str:
    return known()[-1]


def pending(db: Database) -> bool:
    """Whether this version knows migrations that the database lacks.

    A revision it does not know is that of a later version. Migrations expand first and contract a release
    later, so the older version keeps working meanwhile: that lets instances be replaced one by one.
    """
    revision = current(db)
    return revision != head() and not is_newer(revision)


def is_newer(revision: str | None) -> bool:
    return revision is not None and revision not in known()


@cache
def known() -> list[str]:
    """In order: a script's file begins with its number, which is its revision."""
    return sorted(path.name.partition("_")[0] for path in (directory() / "versions").glob("*_*.py"))


@cache
def directory() -> Path:
    """Where the scripts are: `sql/` in the repository, `orchestrator/_sql` when installed."""
    for folder in (_PACKAGE / "_sql", _PACKAGE.parent / "sql"):
        if (folder / "env.py").is_file():
            return folder
    raise ConfigError("the migration scripts are missing; install gpu-orchestrator again")
