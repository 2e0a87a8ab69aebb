"""Which database a URL means."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import make_url

from orchestrator.errors import ConfigError
from orchestrator.store.dialect.contract import Dialect
from orchestrator.store.dialect.mariadb import MariaDB
from orchestrator.store.dialect.sqlite import SQLite

#: The file of a scratch database, in its directory: it may be copied while nobody has it open.
SCRATCH = "scratch.db"


def dialect_of(url: str) -> Dialect:
    name = make_url(url).get_backend_name()
    if name == "sqlite":
        return SQLite()
    if name in {"mysql", "mariadb"}:
        return MariaDB()
    message = f"database_url: {name!r} is not supported; use mysql+pymysql:// or sqlite://"
    raise ConfigError(message)


def scratch_url(directory: str) -> str:
    """A database that needs no server, for a moment."""
    return f"sqlite:///{directory}/{SCRATCH}"


def file_of(url: str) -> Path | None:
    """Where a database is that needs no server."""
    named = make_url(url)
    return Path(named.database) if named.get_backend_name() == "sqlite" and named.database else None


def missing_file(url: str) -> Path | None:
    """Where a database should be that needs no server, and is not: connecting would make an empty one."""
    path = file_of(url)
    return path if path is not None and not path.exists() else None
