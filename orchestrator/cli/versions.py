"""Which servers are new enough, and set up for us: asked before anything starts, and told by `gpuorch doctor`.

A server that does not answer is no older for it: whoever starts waits for it as always. A version that cannot be read
is let pass.
"""

from __future__ import annotations

import logging
import re
from contextlib import closing, suppress
from dataclasses import dataclass

from orchestrator.errors import ConfigError, ServerTooOld, Unavailable
from orchestrator.settings import Settings, safe_url
from orchestrator.store.database import Database

log = logging.getLogger(__name__)

#: Kind of server → its name, and the oldest version that everything here is tested with.
OLDEST = {
    "mysql": ("MariaDB", (10, 6)),
    "sqlite": ("SQLite", (3, 35)),
    "redis": ("Redis", (7, 0)),
    "valkey": ("Valkey", (7, 0)),
}


@dataclass(frozen=True)
class Version:
    kind: str
    text: str

    @property
    def needed(self) -> str:
        name, oldest = OLDEST[self.kind]
        return f"{name} {'.'.join(map(str, oldest))} or later"

    @property
    def new_enough(self) -> bool:
        numbers = re.match(r"(\d+)\.(\d+)", self.text)
        return numbers is None or tuple(map(int, numbers.groups())) >= OLDEST[self.kind][1]


def of_database(db: Database) -> Version:
    """Raises DatabaseUnavailable."""
    kind, numbers = db.version()
    return Version(kind, ".".join(map(str, numbers)))


def require_database(db: Database) -> None:
    """Raises ServerTooOld, ConfigError when it takes no writes of ours, or DatabaseUnavailable."""
    _require(of_database(db), db.settings.database_url, "database_url")
    if obstacle := db.obstacle():
        raise ConfigError(f"{safe_url(db.settings.database_url)}: {obstacle}")


def require_redis(settings: Settings) -> None:
    """Raises ServerTooOld. What else about it endangers delivery is told in the log."""
    from orchestrator.stream import server
    from orchestrator.stream.hub import Hub

    with suppress(Unavailable), closing(Hub(settings)) as hub:
        _require(Version(*server.version(settings)), settings.redis_url, "redis_url")
        for warning in hub.warnings():
            log.warning("redis endangers delivery", extra={"reason": warning})


def _require(found: Version, url: str, setting: str) -> None:
    if not found.new_enough:
        raise ServerTooOld(safe_url(url), found.text, found.needed, setting)
