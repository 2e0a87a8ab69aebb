"""Writes down what the slots did: starts and ends of attempts, many per transaction, then the acknowledgements.

The order is fixed: the transaction commits first, the entry is acknowledged after. A crash in between costs a
delivery that the database recognises as settled.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from orchestrator.errors import DatabaseUnavailable, RedisUnavailable
from orchestrator.jobs import HAND_BACK, RETRY, RetryPolicy
from orchestrator.leader.duties import dead_letter
from orchestrator.store import jobs
from orchestrator.store.batcher import Batcher
from orchestrator.store.database import Database
from orchestrator.store.jobs import Claimant, End, Settled, Start
from orchestrator.stream.hub import Hub
from orchestrator.stream.lane import Lane

log = logging.getLogger(__name__)

#: Seconds between tries while the database is away. Results wait in memory meanwhile.
RETRY_EVERY_S = 0.5


@dataclass(frozen=True)
class Note:
    """One thing to write down, and the entry that brought the job."""

    event: Start | End
    entry_id: str


class Recorder:
    def __init__(
        self,
        db: Database,
        hub: Hub,
        lane: Lane,
        by: Claimant,
        policy: RetryPolicy,
        on_settled: Callable[[Sequence[Settled]], None],
    ) -> None:
        self._db = db
        self._hub = hub
        self._lane = lane
        self._by = by
        self._policy = policy
        self._on_settled = on_settled
        self._give_up = threading.Event()
        self._notes: Batcher[Note, None] = Batcher("recorder", self._flush)

    def note(self, event: Start | End, entry_id: str) -> None:
        self._notes.submit(Note(event, entry_id))

    def close(self, timeout_s: float) -> None:
        """Write what waits; give up on it after `timeout_s` (the leader then finds those jobs unowned)."""
        if not self._notes.close(timeout_s):
            log.error("gave up on unwritten results", extra={"after_s": timeout_s})
            self._give_up.set()
            self._notes.close(timeout_s)

    def _flush(self, notes: list[Note]) -> list[None]:
        ends = {note.event.job_id: note for note in notes if isinstance(note.event, End)}
        # A start whose end is known already needs no write of its own.
        starts = [n.event for n in notes if isinstance(n.event, Start) and n.event.job_id not in ends]
        settled = self._write(starts, [note.event for note in ends.values() if isinstance(note.event, End)])
        self._on_settled(settled)
        self._tell_redis(settled, {job_id: note.entry_id for job_id, note in ends.items()})
        return [None] * len(notes)

    def _write(self, starts: Sequence[Start], ends: Sequence[End]) -> list[Settled]:
        while True:
            try:
                return jobs.settle(self._db, self._by, starts, ends, self._policy)
            except DatabaseUnavailable as away:
                log.warning("results wait for the database", extra={"jobs": len(ends), "error": str(away)})
                if self._give_up.wait(RETRY_EVERY_S):
                    raise

    def _tell_redis(self, settled: Sequence[Settled], entries: dict[str, str]) -> None:
        try:
            self._hub.bury([letter for s in settled if (letter := dead_letter(s, entries[s.end.job_id]))])
            self._lane.ack([entries[item.end.job_id] for item in settled])
        except RedisUnavailable as away:
            # The leader drops entries whose job is over.
            log.warning("acknowledgements lost", extra={"entries": len(settled), "error": str(away)})


def ready_again(settled: Sequence[Settled]) -> bool:
    """Whether one of these jobs may be announced at once."""
    return any(item.arrow in (HAND_BACK, RETRY) for item in settled)
