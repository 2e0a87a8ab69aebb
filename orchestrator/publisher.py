"""From row to stream: the publisher keeps every lane's window filled from the backlog in the database.

It is safe to run anywhere at the same time: rows are taken by a guarded UPDATE, so no job is announced by two
publishers. Orchestrators nudge it after a submit, workers when their lane runs low, the leader on a timer. A crash
between the UPDATE and the XADD leaves a row that says "announced" without an entry; the leader's `repair` finds it.
"""

from __future__ import annotations

import logging
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from orchestrator.errors import Unavailable
from orchestrator.jobs import Queued, Ready
from orchestrator.pace import Pace
from orchestrator.ranking import urgent_places
from orchestrator.settings import Settings
from orchestrator.store import lanes, outbox
from orchestrator.store.caps import Glance
from orchestrator.store.database import Database
from orchestrator.store.outbox import Urgent
from orchestrator.store.policies import Copy
from orchestrator.stream.hub import Hub
from orchestrator.telemetry import tracing

if TYPE_CHECKING:
    from sqlalchemy import Connection

log = logging.getLogger(__name__)

#: Seconds for which a count of live slots is good enough.
SLOTS_FRESH_S = 2.0
#: Seconds between two looks for jobs whose deadline is near.
URGENT_EVERY_S = 0.25
#: Jobs moved by one transaction.
CHUNK = 500
#: Lanes whose pace is remembered, beside those that somebody serves; clients may name any number of them.
MAX_LANES = 1000


class Publisher:
    """A thread that publishes the lanes it was nudged about."""

    def __init__(self, db: Database, hub: Hub, settings: Settings, policies: Copy | None = None) -> None:
        self._db = db
        self._hub = hub
        self._settings = settings
        self._policies = policies or Copy()
        self._nudged: set[str] = set()
        #: Lanes that were found empty since the last look at all of those.
        self._idle: set[str] = set()
        self._look_due = False
        self._looked_at = float("-inf")
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

    def idle(self, lane: str) -> None:
        """A worker found nothing in this lane, and says so again and again: now and then, one look for all of those.

        What is ready there has lost whoever should have announced it, and perhaps nobody leads.
        """
        with self._wake:
            self._idle.add(lane)
            if time.monotonic() - self._looked_at >= self._settings.redis_block_ms / 1000:
                self._looked_at = time.monotonic()
                self._look_due = True
                self._wake.notify()

    def reaches(self, lane: str, count: int) -> None:
        """A worker here takes up to `count` jobs of this lane at once: with fewer its batches would not be full."""
        with self._wake:
            self._pace_of(lane).reach = count

    def consumed(self, lane: str, count: int) -> None:
        """A worker took `count` entries: nudge when about half of the window must be gone."""
        pace = self._pace_of(lane)
        pace.left -= count
        if pace.left <= pace.window // 2:
            self.nudge(lane)

    def publish(self, lane_name: str) -> int:
        """Fill one lane's window; how many jobs were announced."""
        lane = self._hub.lane(lane_name)
        pace = self._pace_of(lane_name)
        self._count_slots(lane_name, pace)
        if pace.slots is None:
            return 0
        least, most = self._settings.lane_window_min, self._settings.lane_window_max
        room, total = pace.room(lane.unread(), least, most, time.monotonic()), 0
        while total < room:
            size, since = min(room - total, CHUNK), tracing.moment()
            # Once: whoever holds the lane's row must not hold up other lanes for long.
            taken, others = self._db.write_waiting_once(
                partial(self._take, lane=lane_name, limit=size, urgent=self._urgent(pace, size))
            )
            for other in others:
                self.nudge(other)
            if taken:
                with tracing.dispatching(lane_name, taken, since):
                    lane.announce(taken)
                total += len(taken)
            pace.filled(len(taken), sum(job.urgent for job in taken), time.monotonic())
            if len(taken) < size:
                break
        return total

    def _take(self, conn: Connection, lane: str, limit: int, urgent: Urgent | None) -> tuple[list[Ready], set[str]]:
        """What is announced next; and lanes where others may be, since a cap has room for them."""
        caps = Glance(conn, self._policies.book(conn))
        return outbox.take(conn, lane, limit, urgent, caps), caps.freed

    def close(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(self._settings.db_timeout_s + self._settings.redis_timeout_s)

    def _pace_of(self, lane: str) -> Pace:
        with self._wake:
            if lane not in self._pace and len(self._pace) >= MAX_LANES:
                self._pace = {name: pace for name, pace in self._pace.items() if pace.slots or pace.reach}
            return self._pace.setdefault(lane, Pace())

    def _count_slots(self, lane: str, pace: Pace) -> None:
        if time.monotonic() - pace.slots_counted_at > SLOTS_FRESH_S:
            pace.slots = self._db.read(lambda conn: outbox.live_slots(conn, lane))
            pace.slots_counted_at = time.monotonic()

    def _urgent(self, pace: Pace, room: int) -> outbox.Urgent | None:
        """How many jobs may go first for their deadlines, and how near those must be; None: do not look now."""
        if time.monotonic() - pace.urgent_sought_at < URGENT_EVERY_S:
            return None
        pace.urgent_sought_at = time.monotonic()
        places = urgent_places(room, pace.ahead)
        return outbox.Urgent(places, pace.horizon_s) if places else None

    def _loop(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._nudged or self._look_due or self._closing)
                if self._closing:
                    return
                nudged, self._nudged = self._nudged, set()
                idle, self._idle = (self._idle, set()) if self._look_due else (set(), self._idle)
                self._look_due = False
            for lane in sorted(nudged | self._forgotten(idle)):
                try:
                    self.publish(lane)
                except Unavailable as away:
                    # Nothing is lost: the rows stay, and the leader's timer publishes them later.
                    log.warning("publish failed", extra={"pool_id": lane, "error": str(away)})
                except Exception:
                    log.exception("publisher broke", extra={"pool_id": lane})

    def _forgotten(self, idle: set[str]) -> set[str]:
        """Of these lanes, those with jobs that nobody announced."""
        if not idle:
            return set()
        try:
            return set(self._db.read(lambda conn: lanes.waiting(conn, idle, Queued.READY)))
        except Unavailable as away:
            log.warning("publish failed", extra={"error": str(away)})
        except Exception:
            log.exception("publisher broke")
        return set()
