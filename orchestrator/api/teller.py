"""What Redis is told after an answer was given: best effort, on a thread of its own.

The database knows already, and whoever misses such a message looks there soon; so nobody waits for it, and a Redis
that is away or frozen costs a line in the log.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from orchestrator.errors import RedisUnavailable
from orchestrator.stream.hub import Hub

log = logging.getLogger(__name__)

#: Messages that may wait for a slow Redis; more are dropped.
MAX_WAITING = 100


class Teller:
    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="api-tell")
        self._lock = threading.Lock()
        self._waiting = 0
        self._about_to_ring = False

    def ring(self) -> None:
        """Workers look at once what the database wants of them. One bell serves all who rang before it sounds."""
        with self._lock:
            if self._about_to_ring:
                return
            self._about_to_ring = True
        if not self._post(self._ring):
            self._about_to_ring = False

    def ask_for_pools(self, pool_id: str) -> None:
        """The leader looks at the pools at once."""
        self._post(lambda: self._hub.ask_for_pools(pool_id))

    def take_back_letters(self, entry_ids: Sequence[str]) -> None:
        """The dead-letter stream forgets these entries."""
        if entry_ids:
            self._post(lambda: self._hub.dead_letters.take_back(entry_ids))

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _ring(self) -> None:
        # First: whoever comes from here on may have committed after the workers looked.
        self._about_to_ring = False
        self._hub.ring("look")

    def _post(self, message: Callable[[], None]) -> bool:
        with self._lock:
            if self._waiting >= MAX_WAITING:
                return False
            self._waiting += 1
        self._thread.submit(self._tell, message)
        return True

    def _tell(self, message: Callable[[], None]) -> None:
        try:
            message()
        except RedisUnavailable as away:
            log.warning("redis was not told", extra={"error": str(away)})
        finally:
            with self._lock:
                self._waiting -= 1
