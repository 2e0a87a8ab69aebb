"""Takes jobs in: as many entries as free slots can run → claim and lease in one transaction → dispatch.

An entry is read only for a slot that is free now, or for a place in the batch that such a slot is about to run; while
jobs are over within moments, also for one that is free in a moment (`worker.hand`). One batch is filled before the next
slot gets any.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import NamedTuple

from orchestrator.backoff import doubled, spread
from orchestrator.batching import Seats
from orchestrator.dead_letters import about_entry
from orchestrator.errors import DatabaseUnavailable, RedisUnavailable, Unavailable
from orchestrator.settings import Settings
from orchestrator.store import outbox
from orchestrator.store.claim import Claim, NotClaimed
from orchestrator.store.database import Database
from orchestrator.stream.hub import Hub
from orchestrator.stream.lane import Entry, Lane, LaneReader
from orchestrator.telemetry import logs, tracing
from orchestrator.telemetry.life import about
from worker.held import Held
from worker.ledger import Ledger
from worker.roster import Roster
from worker.run import NEVER, Batch

log = logging.getLogger(__name__)

#: Longest wait for more slots to become free before a claim.
MAX_LINGER_S = 0.01
#: Longest pause between tries while a server is away.
MAX_PAUSE_S = 2.0
#: Seconds for which no read succeeds until that is told: a server that restarts takes less.
TOLD_AFTER_S = 5.0
#: Seconds between looks whether a heartbeat came through at last.
UNVOUCHED_PAUSE_S = 0.05


class Failing(NamedTuple):
    """Since when Redis keeps an intake from reading, and what it says now."""

    since: float
    error: RedisUnavailable


class Intake:
    def __init__(
        self,
        db: Database,
        hub: Hub,
        lane: Lane,
        reader: LaneReader,
        slots: Roster,
        ledger: Ledger,
        held: Held,
        settings: Settings,
        *,
        vouched: Callable[[], bool],
        no_room: Callable[[Sequence[Claim]], dict[str, str]],
        on_read: Callable[[int, bool], None],
        on_refused: Callable[[Claim, str | None], None],
        on_broken: Callable[[Claim, str], None],
        on_denied: Callable[[Sequence[NotClaimed]], None],
        on_claimed: Callable[[Sequence[Claim], int, int], None] = lambda _claims, _since, _until: None,
    ) -> None:
        self._db = db
        self._hub = hub
        self._lane = lane
        self._reader = reader
        self._slots = slots
        self._ledger = ledger
        self._held = held
        self._settings = settings
        self._on_read = on_read
        self._on_refused = on_refused
        self._on_broken = on_broken
        self._on_denied = on_denied
        self._on_claimed = on_claimed
        self._no_room = no_room
        self._vouched = vouched
        #: Whether the last read brought as much as was asked for, so that the next will probably bring something too.
        self.backlogged = False
        #: Entries that were read, and not yet claimed or let go.
        self._unanswered: list[Entry] = []
        #: Who has no slot free is kept from reading by nothing.
        self._failing: Failing | None = None
        self._claim_s = 0.0  # how long the last claim took
        # A claim waits while ends are written, however long the database is away; then it is asked for again.
        self._patience_s = 10 * settings.db_timeout_s
        self._stop = threading.Event()
        #: Whether Redis can be asked to end a read.
        self._asks = True
        self._thread = logs.thread(self._loop, "intake")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Take nothing more. Returns at once; a read that waits ends with `interrupt` or `join`, or by itself."""
        self._stop.set()
        self._slots.seal()

    def interrupt(self) -> None:
        """End a read that waits. Asks Redis, and so may wait for it; when it does not answer, it is not asked again."""
        self._asks = self._asks and self._reader.ear.interrupt()

    @property
    def trouble(self) -> str | None:
        """Why no jobs come, when that lasts: heartbeats go to another server, and would call this worker well."""
        failing = self._failing
        if failing is None or self._stop.is_set() or time.monotonic() - failing.since < TOLD_AFTER_S:
            return None
        return f"cannot read jobs from Redis: run `gpuorch doctor` on this node (runbook redis-lost): {failing.error}"

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> None:
        self._reader.ear.release(self._thread, self._settings.redis_timeout_s + self._settings.db_timeout_s)

    def _loop(self) -> None:
        failures = 0
        while not self._stop.is_set():
            try:
                self._step()
                failures, self._failing = 0, None
            except Unavailable as away:
                failures += 1
                self._note(away)
                pause = spread(doubled(0.1, failures, MAX_PAUSE_S))
                log.warning("intake pauses", extra={"pause_s": round(pause, 2), "error": str(away)})
                self._stop.wait(pause)
            except Exception:
                # A bug must not end the thread that feeds the slots; it is shown, and the entries stay pending.
                log.exception("intake broke")
                self._reader.look_back()
                self._stop.wait(1.0)
        self._leave()

    def _note(self, away: Unavailable) -> None:
        """A database that is away ends what was Redis's fault: Redis had answered before it was asked."""
        since = self._failing.since if self._failing else time.monotonic()
        self._failing = Failing(since, away) if isinstance(away, RedisUnavailable) else None

    def _step(self) -> None:
        if not self._vouched():  # its slots would give back whatever it claimed
            self._stop.wait(UNVOUCHED_PAUSE_S)
            return
        free = self._slots.wait_room(1.0, linger_s=min(self._claim_s, MAX_LINGER_S))
        if not free or self._stop.is_set():
            return
        seats = Seats(free, self._slots.batching.sizes)
        entries = self._take(seats)
        self.backlogged = not seats.dry
        in_hand = self._held.entry_ids()
        fresh = [entry for entry in entries if entry.entry_id not in in_hand]
        self._on_read(len(fresh), seats.dry)
        if not fresh:
            return
        if self._stop.is_set() or not self._vouched():  # a read may wait for long, and the leader count us as lost
            self._put_back(fresh)
        else:
            self._claim(fresh)

    def _take(self, seats: Seats) -> list[Entry]:
        """Entries for as many jobs as can run now. Waits for the first, and as long as batches do for their company."""
        block_ms = self._settings.redis_block_ms
        if not seats.sizes:
            return self._seated(self._unanswered or self._reader.read(seats.slots, block_ms), seats)
        taken = self._seated(self._unanswered or self._reader.read_fitting(seats), seats)
        if not taken:
            taken = self._seated(self._reader.read(1, block_ms), seats)
            taken += self._more(seats) if taken else []
        return taken + self._company(taken, seats)

    def _company(self, first: Sequence[Entry], seats: Seats) -> list[Entry]:
        """More for the batches that have begun. Whoever runs by itself is not kept waiting for others."""
        found: list[Entry] = []
        until, come = NEVER, first
        while seats.waiting and not (self._unanswered or self._stop.is_set()):
            now = time.monotonic()
            until = min([until, *(now + self._slots.batching.wait_s(entry.type) for entry in come)])
            if now >= until:
                break
            self._reader.wait_for_more(round((until - now) * 1000))
            come = self._more(seats)
            found += come
        return found

    def _more(self, seats: Seats) -> list[Entry]:
        """What came meanwhile, unless older entries wait for a seat."""
        return [] if self._unanswered else self._seated(self._reader.read_fitting(seats), seats)

    def _seated(self, entries: list[Entry], seats: Seats) -> list[Entry]:
        """Those that can run now. Others are at hand only after a fault, when all that is pending was read again."""
        taken = list(takewhile(lambda entry: seats.take(entry.type), entries))
        self._unanswered = entries[len(taken) :]
        return taken

    def _claim(self, entries: Sequence[Entry]) -> None:
        by_job = {entry.job_id: entry for entry in entries if entry.job_id}
        started, since = time.monotonic(), tracing.moment()
        try:
            claimed = self._ledger.claim(list(by_job), *self._slots.vacancies()) if by_job else None
            answers = claimed.result(self._patience_s) if claimed else {}
        except (DatabaseUnavailable, TimeoutError) as away:
            # Perhaps committed, perhaps not: asked again, a claim whose answer was lost is found and undone first.
            self._unanswered = [*entries, *self._unanswered]
            raise DatabaseUnavailable(str(away) or "no answer to a claim") from away
        self._claim_s, until = time.monotonic() - started, tracing.moment()
        done_with = [entry.entry_id for entry in entries if not entry.job_id or entry is not by_job[entry.job_id]]
        letters = [about_entry(entry.entry_id, None) for entry in entries if not entry.job_id]
        claims = []
        for job_id, answer in answers.items():
            if isinstance(answer, NotClaimed):
                done_with.append(by_job[job_id].entry_id)
                letters += [] if answer.exists else [about_entry(by_job[job_id].entry_id, job_id)]
            else:
                self._held.add(job_id, by_job[job_id].entry_id)
                claims.append(answer)
        # Slots first: what Redis hears can wait, a free slot should not.
        self._dispatch_all(claims)
        self._on_claimed(claims, since, until)
        self._on_denied([answer for answer in answers.values() if isinstance(answer, NotClaimed)])
        self._hub.dead_letters.tell(letters)
        self._lane.ack(done_with)

    def _dispatch_all(self, claims: Sequence[Claim]) -> None:
        """Those that need a certain slot before those that take any."""
        batches = _batches(claims)
        no_room = self._no_room([batch[0] for batch in batches])
        for batch in sorted(batches, key=_choosiness):
            if reason := no_room.get(batch[0].job_id):
                self._refuse(batch, reason)
            else:
                self._dispatch(batch)

    def _dispatch(self, batch: Batch) -> None:
        try:
            if not self._slots.dispatch(batch):
                self._refuse(batch, None)
        except Exception as error:
            # One job that cannot be sent must not strand those behind it: claimed, and running nowhere.
            log.exception("dispatch broke", extra=about(batch[0]))
            for claim in batch:
                self._on_broken(claim, f"no slot could take it: {type(error).__name__}: {error}")

    def _refuse(self, batch: Batch, reason: str | None) -> None:
        for claim in batch:
            self._on_refused(claim, reason)

    def _leave(self) -> None:
        """Give back what was read and not claimed; whatever fails here, the leader finds after a while."""
        try:
            self._put_back(self._unanswered)
        except Unavailable as away:
            log.warning("left entries behind", extra={"entries": len(self._unanswered), "error": str(away)})

    def _put_back(self, entries: Sequence[Entry]) -> None:
        """Read, but too late to be run here: let the publisher announce them again at once."""
        ids = [entry.job_id for entry in entries if entry.job_id]
        self._db.write(lambda conn: outbox.unpublish_unheld(conn, ids))
        self._lane.ack([entry.entry_id for entry in entries])


def _batches(claims: Sequence[Claim]) -> list[Batch]:
    """What goes to one slot together."""
    found: dict[str, list[Claim]] = {}
    for claim in claims:
        found.setdefault(claim.batch or claim.job_id, []).append(claim)
    return [tuple(batch) for batch in found.values()]


def _choosiness(batch: Batch) -> int:
    if batch[0].lease and batch[0].lease.resident:
        return 0
    return 1 if batch[0].gpus else 2
