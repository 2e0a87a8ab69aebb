"""From row to stream: the publisher keeps every lane's window filled from the backlog in the database.

It is safe to run anywhere at the same time: rows are taken by a guarded UPDATE, so no job is announced by two
publishers. Orchestrators nudge it after a submit, workers when their lane runs low, the leader on a timer. A crash
between the UPDATE and the XADD leaves a row that says "announced" without an entry; the leader's `repair` finds it.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from functools import partial

from orchestrator.errors import Unavailable
from orchestrator.settings import Settings
from orchestrator.store import outbox
from orchestrator.store.database import Database
from orchestrator.stream.hub import Hub

log = logging.getLogger(__name__)

#: Seconds for which a count of live slots is good enough.
SLOTS_FRESH_S = 2.0
#: Seconds of a lane's consumption that are announced ahead.
WINDOW_S = 0.25
#: Jobs moved by one transaction.
CHUNK = 500


@dataclass
class Pace:
    """How fast a lane moves: its live slots (None: closed), and a moving average of what is announced per second."""

    slots: int | None = 0
    slots_counted_at: float = float("-inf")
    per_second: float = 0.0
    since: float = field(default_factory=time.monotonic)
    announced: int = 0
    #: Jobs that this process can take at once, where slots take several each.
    reach: int = 0
    #: What the window was at the last look, and how many entries should be left of it now.
    window: int = 0
    left: int = 0

    def count(self, announced: int) -> None:
        self.announced += announced
        passed = time.monotonic() - self.since
        if passed >= WINDOW_S:
            self.per_second += (self.announced / passed - self.per_second) / 2
            self.since, self.announced = time.monotonic(), 0


class Publisher:
    """A thread that publishes the lanes it was nudged about."""

    def __init__(self, db: Database, hub: Hub, settings: Settings) -> None:
        self._db = db
        self._hub = hub
        self._settings = settings
        self._nudged: set[str] = set()
        self._wake = threading.Condition()
        self._closing = False
        self._pace: dict[str, Pace] = {}
        self._thread = threading.Thread(target=self._loop, name="publisher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def nudge(self, lane: str) -> None:
        """Something may be ready in this lane. Costs nothing when it was nudged already."""
        with self._wake:
            self._nudged.add(lane)
            self._wake.notify()

    def reaches(self, lane: str, count: int) -> None:
        """A worker here takes up to `count` jobs of this lane at once: with fewer its batches would not be full."""
        self._pace.setdefault(lane, Pace()).reach = count

    def consumed(self, lane: str, count: int) -> None:
        """A worker took `count` entries: nudge when about half of the window must be gone."""
        pace = self._pace.setdefault(lane, Pace())
        pace.left -= count
        if pace.left <= pace.window // 2:
            self.nudge(lane)

    def publish(self, lane_name: str) -> int:
        """Fill one lane's window; how many jobs were announced."""
        lane = self._hub.lane(lane_name)
        pace = self._pace.setdefault(lane_name, Pace())
        window = self._window(lane_name, pace)
        if not window:
            return 0
        length = lane.unread()
        room, total = window - length, 0
        # Refilled when half empty: one transaction for many jobs instead of one for each that leaves.
        while room - total >= (window + 1) // 2 or 0 < total < room:
            size = min(room - total, CHUNK)
            ready = self._db.write(partial(outbox.take, lane=lane_name, limit=size))
            if ready:
                lane.announce(ready)
                total += len(ready)
            if len(ready) < size:
                break
        pace.count(total)
        pace.window, pace.left = window, length + total
        return total

    def close(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(self._settings.db_timeout_s + self._settings.redis_timeout_s)

    def _window(self, lane: str, pace: Pace) -> int:
        """Twice the live slots, or what full batches take, plus what the lane consumes in a moment, within bounds.

        A slow lane keeps its order changeable to the last; a fast one is refilled by the hundred.
        """
        if time.monotonic() - pace.slots_counted_at > SLOTS_FRESH_S:
            pace.slots = self._db.read(lambda conn: outbox.live_slots(conn, lane))
            pace.slots_counted_at = time.monotonic()
        if pace.slots is None:
            return 0  # its pool is drained: what waits stays where it can still be moved
        wanted = max(2 * pace.slots, pace.reach) + round(pace.per_second * WINDOW_S)
        return max(self._settings.lane_window_min, min(wanted, self._settings.lane_window_max))

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
                except Exception:
                    log.exception("publisher broke", extra={"lane": lane})
