"""The control stream: a bell, not a message. Whoever hears it looks into the database at once instead of soon.

A bell that is lost costs one heartbeat interval and nothing else, so nobody acknowledges it.
"""

from __future__ import annotations

from typing import Any

import redis

from orchestrator.settings import Settings
from orchestrator.stream.client import named_errors
from orchestrator.stream.ear import Ear

#: Entries that are kept for people who want to see who rang.
LENGTH = 1000


def ring(client: redis.Redis, settings: Settings, what: str) -> None:
    """Raises RedisUnavailable."""
    with named_errors(settings, client):
        client.xadd(_key(settings), {"what": what}, maxlen=LENGTH, approximate=True)


class Doorbell:
    """For one who listens. Raises RedisUnavailable when Redis does not answer."""

    def __init__(self, ear: Ear, settings: Settings) -> None:
        self.ear = ear
        self._client = ear.client
        self._settings = settings
        self._key = _key(settings)
        self._heard: str | None = None

    def listen(self, block_ms: int) -> bool:
        """Whether somebody rang since the last call; waits up to `block_ms` for it."""
        with named_errors(self._settings, self._client):
            if self._heard is None:
                self._heard = self._latest()
            answer: Any = self._client.xread({self._key: self._heard}, block=block_ms)
        for _stream, rows in answer:
            self._heard = rows[-1][0].decode()
        return bool(answer)

    def _latest(self) -> str:
        rows: Any = self._client.xrevrange(self._key, count=1)
        return str(rows[0][0].decode()) if rows else "0-0"


def _key(settings: Settings) -> str:
    return f"{settings.stream_prefix}control"
