"""One process's door to Redis: lanes, the doorbells, dead letters, and the health of the server."""

from __future__ import annotations

import threading
from contextlib import suppress
from weakref import WeakSet

import redis

from orchestrator.settings import Settings
from orchestrator.stream.client import connect, named_errors
from orchestrator.stream.dead_letters import DeadLetterStream
from orchestrator.stream.doorbell import Doorbell, ring
from orchestrator.stream.ear import Ear
from orchestrator.stream.ingest import EventStream
from orchestrator.stream.lane import Lane, LaneReader
from orchestrator.stream.preloads import Preloads, ask

#: Lanes that are kept at hand, which know nothing that is not in Redis; clients may name any number of them.
MAX_LANES = 1000


class Hub:
    """Hands out lanes over one pooled connection; thread-safe."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._client = connect(settings)
        self.dead_letters = DeadLetterStream(self._client, settings)
        self._lanes: dict[str, Lane] = {}
        self._ears: WeakSet[Ear] = WeakSet()
        self._lock = threading.Lock()

    def lane(self, name: str) -> Lane:
        with self._lock:
            if name not in self._lanes:
                if len(self._lanes) >= MAX_LANES:
                    self._lanes.clear()
                self._lanes[name] = Lane(self._client, self._settings, name)
            return self._lanes[name]

    def reader(self, lane: Lane, consumer: str) -> LaneReader:
        return LaneReader(self._ear(), self._settings, lane, consumer)

    def ring(self, what: str) -> None:
        """Make every worker look into the database now."""
        ring(self._client, self._settings, what)

    def doorbell(self) -> Doorbell:
        """For one who listens, on a connection of its own: listening blocks."""
        return Doorbell(self._ear(), self._settings)

    def ask_for_pools(self, what: str) -> None:
        """Make the leader look at the pools now."""
        ask(self._client, self._settings, what)

    def preloads(self) -> Preloads:
        """For the leader, on a connection of its own: listening blocks."""
        return Preloads(self._ear(), self._settings)

    def events(self, consumer: str) -> EventStream:
        """For one who turns events into jobs, on a connection of its own: reading blocks."""
        return EventStream(self._ear(), self._settings, consumer)

    def ping(self) -> None:
        """Raises RedisUnavailable when the server does not answer, or would refuse what we write."""
        with named_errors(self._settings, self._client):
            self._client.ping()
            with suppress(redis.exceptions.NoPermissionError):
                # No byte into a key that does not exist: nothing happens, save that a replica, a full server and one
                # that cannot save refuse it as they would refuse an entry.
                self._client.setrange(f"{self._settings.stream_prefix}writable", 0, "")

    def warnings(self) -> list[str]:
        """What about the server endangers delivery: evicted streams are only rebuilt after a delay."""
        with named_errors(self._settings, self._client):
            try:
                policy = str(self._client.config_get("maxmemory-policy").get("maxmemory-policy", "unknown"))
            except redis.ResponseError as forbidden:  # managed servers keep CONFIG to themselves
                return [f"redis maxmemory-policy cannot be read ({forbidden}); make sure it is noeviction"]
        if policy == "noeviction":
            return []
        return [f"redis maxmemory-policy is {policy}; set it to noeviction or streams may be evicted"]

    def close(self) -> None:
        """Also what it handed out to those who read, if they have not closed it."""
        with self._lock:
            ears = list(self._ears)
        for ear in ears:
            ear.close()
        self._client.close()

    def _ear(self) -> Ear:
        ear = Ear(self._settings, self._client)
        with self._lock:
            self._ears.add(ear)
        return ear
