"""The preloads stream: requests to look at pools now, read by the leader through a group of its own.

A request says which pool it is about and nothing else: what that pool should be stands in its row. One that is lost
costs one reconcile interval.
"""

from __future__ import annotations

import time
from typing import Any

import redis

from orchestrator.settings import Settings
from orchestrator.stream import groups
from orchestrator.stream.client import named_errors
from orchestrator.stream.ear import Ear

GROUP = "cg:preloads:workers"
#: Requests that are kept while nobody leads.
LENGTH = 1000
#: Requests read at once.
COUNT = 100
#: Milliseconds after which an idle consumer is forgotten: every start of an orchestrator is a new one.
CONSUMER_IDLE_MS = 60_000


def ask(client: redis.Redis, settings: Settings, pool_id: str) -> None:
    """Raises RedisUnavailable."""
    with named_errors(settings, client):
        client.xadd(_key(settings), {"pool_id": pool_id}, maxlen=LENGTH, approximate=True)


class Preloads:
    """For the leader, who listens. Raises RedisUnavailable when Redis does not answer."""

    def __init__(self, ear: Ear, settings: Settings) -> None:
        self.ear = ear
        self._client = ear.client
        self._settings = settings
        self._key = _key(settings)
        self._grouped = False
        self._forget = ear.client.register_script(groups.FORGET_CONSUMER)
        self._forget_at = 0.0

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
        self._forget_consumers()
        answer: Any = self._client.xreadgroup(GROUP, consumer, {self._key: ">"}, count=COUNT, block=block_ms)
        ids = [entry_id for _stream, rows in answer for entry_id, _fields in rows]
        groups.acknowledge(self._client, self._key, GROUP, ids)
        return len(ids)

    def _forget_consumers(self) -> None:
        """Remove those of leaders that are gone, once nothing is pending for them; now and then."""
        now = time.monotonic()
        if now < self._forget_at:
            return
        self._forget_at = now + CONSUMER_IDLE_MS / 1000
        for consumer in groups.idle_consumers(self._client, self._key, GROUP, CONSUMER_IDLE_MS):
            self._forget(keys=[self._key], args=[GROUP, consumer])


def _key(settings: Settings) -> str:
    return f"{settings.stream_prefix}preloads"
