"""The stream of events, read by all orchestrators through one group: each event goes to one of them, at least once.

Events stand nowhere else: an entry leaves the stream when what it sets off is stored, and no sooner. Who dies before
that leaves it pending, and another takes it over.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import redis

from orchestrator.settings import Settings
from orchestrator.stream import groups
from orchestrator.stream.client import named_errors
from orchestrator.stream.ear import Ear
from orchestrator.stream.groups import text

log = logging.getLogger(__name__)

GROUP = "cg:ingest:orchestrator"
#: Milliseconds after which an idle consumer is forgotten: every start of an orchestrator is a new one.
CONSUMER_IDLE_MS = 60_000


class Delivery(NamedTuple):
    entry_id: str
    fields: dict[bytes, bytes]

    @property
    def size(self) -> int:
        return sum(len(key) + len(value) for key, value in self.fields.items())


class EventStream:
    """The reading side of one orchestrator, on a connection of its own. Raises RedisUnavailable."""

    def __init__(self, ear: Ear, settings: Settings, consumer: str) -> None:
        self.ear = ear
        self._client = ear.client
        self._settings = settings
        self._key = f"{settings.stream_prefix}ingest_events"
        self._consumer = consumer
        self._cursor = "0-0"
        self._forget = ear.client.register_script(groups.FORGET_CONSUMER)

    def read(self, count: int, block_ms: int) -> list[Delivery]:
        """Up to `count` new events; waits at most `block_ms` for the first.

        When the answer gets lost its entries are pending in our name, and `take_over` finds them.
        """
        with named_errors(self._settings, self._client):
            try:
                answer: Any = self._client.xreadgroup(
                    GROUP, self._consumer, {self._key: ">"}, count=count, block=max(block_ms, 1)
                )
            except redis.ResponseError as error:
                if "NOGROUP" not in str(error):
                    raise
                groups.ensure(self._client, self._key, GROUP)  # the first start, or flushed, deleted or destroyed
                return []
        return [delivery for _key, rows in answer for delivery in _deliveries(rows)]

    def take_over(self, idle_ms: int, count: int) -> list[Delivery]:
        """Events that nobody has touched for `idle_ms`, a part of them at a time; the walk goes on with each call."""
        with named_errors(self._settings, self._client):
            try:
                following, rows, deleted = self._client.xautoclaim(
                    self._key, GROUP, self._consumer, min_idle_time=idle_ms, start_id=self._cursor, count=count
                )
            except redis.ResponseError as error:
                if "NOGROUP" not in str(error):
                    raise
                self._cursor = "0-0"
                return []
        self._cursor = text(following)
        if deleted:  # nothing can be made of them any more, and nobody holds them now
            log.warning("somebody deleted events before they were handled", extra={"entries": len(deleted)})
        return _deliveries(rows)

    def keep(self, entry_ids: Sequence[str]) -> set[str]:
        """Say that we are still at these, so that nobody takes them over; those that are still to be handled."""
        if not entry_ids:
            return set()
        with named_errors(self._settings, self._client):
            try:
                kept: Any = self._client.xclaim(
                    self._key, GROUP, self._consumer, min_idle_time=0, message_ids=list(entry_ids), justid=True
                )
            except redis.ResponseError as error:
                if "NOGROUP" not in str(error):
                    raise
                return set()  # whoever is first creates it at 0, and gets what is still there again
        return {text(entry_id) for entry_id in kept}

    def acknowledge(self, entry_ids: Sequence[str]) -> None:
        with named_errors(self._settings, self._client):
            groups.acknowledge(self._client, self._key, GROUP, entry_ids)

    def forget_consumers(self) -> None:
        """Remove the consumers of orchestrators that are gone, once nothing is pending for them."""
        with named_errors(self._settings, self._client):
            for consumer in groups.idle_consumers(self._client, self._key, GROUP, CONSUMER_IDLE_MS):
                self._forget(keys=[self._key], args=[GROUP, consumer])


def _deliveries(rows: Iterable[tuple[Any, Any]]) -> list[Delivery]:
    return [Delivery(text(entry_id), fields or {}) for entry_id, fields in rows]
