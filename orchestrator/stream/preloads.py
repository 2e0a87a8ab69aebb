"""The preloads stream: requests to look at pools now, read by the leader through a group of its own.

A request says which pool it is about and nothing else: what that pool should be stands in its row. One that is lost
costs one reconcile interval.
"""

from __future__ import annotations

from typing import Any

import redis

from orchestrator.settings import Settings
from orchestrator.stream import groups
from orchestrator.stream.client import named_errors

GROUP = "cg:preloads:workers"
#: Requests that are kept while nobody leads.
LENGTH = 1000
#: Requests read at once.
COUNT = 100


class Preloads:
    """Raises RedisUnavailable when Redis does not answer."""

    def __init__(self, client: redis.Redis, settings: Settings) -> None:
        self._client = client
        self._settings = settings
        self._key = f"{settings.stream_prefix}preloads"
        self._grouped = False

    def ask(self, pool_id: str) -> None:
        with named_errors(self._settings, self._client):
            self._client.xadd(self._key, {"pool_id": pool_id}, maxlen=LENGTH, approximate=True)

    def take(self, consumer: str, block_ms: int) -> int:
        """How many requests there were since the last call; waits up to `block_ms` for the first."""
        try:
            with named_errors(self._settings, self._client):
                return self._take(consumer, block_ms)
        except Exception:
            self._grouped = False  # flushed or destroyed, perhaps: the group is made anew
            raise

    def _take(self, consumer: str, block_ms: int) -> int:
        if not self._grouped:
            groups.ensure(self._client, self._key, GROUP)
            self._grouped = True
        answer: Any = self._client.xreadgroup(GROUP, consumer, {self._key: ">"}, count=COUNT, block=block_ms)
        ids = [entry_id for _key, rows in answer for entry_id, _fields in rows]
        groups.acknowledge(self._client, self._key, GROUP, ids)
        return len(ids)
