"""From row to stream: the publisher keeps every lane's window filled from the backlog in the database.

It is safe to run anywhere at the same time: rows are taken by a guarded UPDATE, so no job is announced by two
publishers. Orchestrators nudge it after a submit, workers when their lane runs low, the leader on a timer. A crash
between the UPDATE and the XADD leaves a row that says "published" without an entry; the leader's `repair` finds it.
"""

from __future__ import annotations

import logging
import threading
import time

from orchestrator.errors import Unavailable
from orchestrator.settings import Settings
from orchestrator.store import outbox
from orchestrator.store.database import Database
from orchestrator.stream.hub import Hub

log = logging.getLogger(__name__)

#: Seconds for which a count of live slots is good enough.
SLOTS_FRESH_S = 2.0
#: Jobs moved by one transaction.
CHUNK = 500


class Publisher:
    """A thread that publishes the lanes it was nudged about."""

    def __init__(self, db: Database, hub: Hub, settings: Settings) -> None:
        self._db = db
        self._hub = hub
        self._settings = settings
        self._nudged: set[str] = set()
        self._wake = threading.Condition()
        self._closing = False
        self._slots: dict[str, tuple[float, int]] = {}
        self._thread = threading.Thread(target=self._loop, name="publisher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def nudge(self, lane: str) -> None:
        """Something may be ready in this lane. Costs nothing when it was nudged already."""
        with self._wake:
            self._nudged.add(lane)
            self._wake.notify()

    def publish(self, lane_name: str) -> int:
        """Fill one lane's window; how many jobs were announced."""
        lane = self._hub.lane(lane_name)
        total = 0
        while (room := self._window(lane_name) - lane.length()) > 0:
            size = min(room, CHUNK)
            ready = self._db.write(lambda conn, size=size: outbox.take(conn, lane_name, size))
            if ready:
                lane.announce(ready)
                total += len(ready)
            if len(ready) < size:
                break
        return total

    def close(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(self._settings.db_timeout_s + self._settings.redis_timeout_s)

    def _window(self, lane: str) -> int:
        """Twice the live slots, within bounds: enough to keep them busy, little enough to keep order changeable."""
        counted_at, slots = self._slots.get(lane, (float("-inf"), 0))
        if time.monotonic() - counted_at > SLOTS_FRESH_S:
            slots = self._db.read(lambda conn: outbox.live_slots(conn, lane))
            self._slots[lane] = (time.monotonic(), slots)
        return max(self._settings.lane_window_min, min(2 * slots, self._settings.lane_window_max))

    def _loop(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._nudged or self._closing)
                if self._closing:
                    return
                lanes, self._nudged = self._nudged, set()
            for lane in sorted(lanes):
                try:
                    self.publish(lane)
                except Unavailable as away:
                    # Nothing is lost: the rows stay, and the leader's timer publishes them later.
                    log.warning("publish failed", extra={"lane": lane, "error": str(away)})
