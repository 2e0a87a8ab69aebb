"""All writes of a worker about its jobs, as one group commit: ends, starts and claims share a transaction.

Whatever arrives while the last transaction is being committed goes into the next one: the ends of the jobs that
just finished together with the claims of those that take their slots. Entries are acknowledged after the commit,
beside the next ones; a crash in between costs a delivery that the database recognises as settled.

Whoever holds a row keeps what concerns it from being written, and nothing else: ends, starts and releases are put off
until they can be, a job that cannot be claimed is left for later. So is one whose claim breaks, on whatever.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from orchestrator.errors import DatabaseUnavailable, PayloadTooLarge, Unavailable
from orchestrator.jobs import ErrorKind, RetryPolicy
from orchestrator.leases import ResidentSlot
from orchestrator.store import audit, followers, leases, ownership, unclaimable
from orchestrator.store.batcher import Batcher, Later
from orchestrator.store.caps import Seats
from orchestrator.store.claim import Claim, NotClaimed, claim_jobs, leave_for_later
from orchestrator.store.database import BUGS, CONTENT_ERRORS, Database, RowsHeld, Waiting
from orchestrator.store.moves import Claimant
from orchestrator.store.policies import Copy
from orchestrator.store.settle import (
    End,
    NotAllOwned,
    Outcome,
    Release,
    Settled,
    Start,
    all_done,
    end_leases,
    finish_all,
    record,
)
from orchestrator.stream.lane import Lane
from orchestrator.telemetry import tracing
from worker.acknowledger import Acknowledger

if TYPE_CHECKING:
    from sqlalchemy import Connection

log = logging.getLogger(__name__)

#: Seconds between tries while the database is away, or somebody holds a row. Results wait in memory meanwhile.
RETRY_EVERY_S = 0.5
#: Seconds that ends wait for a claim to share their transaction, while the lane is busy.
LINGER_S = 0.01


class Note(NamedTuple):
    """One thing that happened to a job, and the entry that brought the job."""

    event: Start | End | Release
    entry_id: str


@dataclass(frozen=True)
class Offer:
    """Jobs that were delivered and may be claimed; the models that free slots keep warm, and how many are blank."""

    job_ids: tuple[str, ...]
    warm: tuple[ResidentSlot, ...] = ()
    blank: int | None = None


Answers = dict[str, Claim | NotClaimed]


class _Written(NamedTuple):
    settled: list[Settled]
    answers: list[Answers]
    #: Lanes in which somebody was let go, since a cap has room or a task ended.
    freed: set[str]


@dataclass(frozen=True)
class _Turn:
    """What one transaction writes."""

    starts: list[Start]
    ends: list[End]
    offers: list[Offer]
    releases: list[Release] = field(default_factory=list)
    waiting: Waiting = Waiting.ONCE


class Ledger:
    def __init__(
        self,
        db: Database,
        lane: Lane,
        by: Claimant,
        policy: RetryPolicy,
        acks: Acknowledger,
        policies: Copy,
        *,
        memory_for: Callable[[str], int | None],
        size_of: Callable[[str], int],
        held: Callable[[], set[str]],
        claim_is_near: Callable[[], bool],
        on_settled: Callable[[Sequence[Settled]], None],
        on_freed: Callable[[set[str]], None],
        on_stuck: Callable[[], None],
    ) -> None:
        self._db = db
        self._lane = lane
        self._by = by
        self._policy = policy
        self._acks = acks
        self._policies = policies
        self._memory_for = memory_for
        self._size_of = size_of
        self._held = held
        self._claim_is_near = claim_is_near
        self._on_settled = on_settled
        self._on_freed = on_freed
        self._on_stuck = on_stuck
        self._give_up = threading.Event()
        #: What was put off, since somebody holds a row of it. The batcher's thread alone looks at it.
        self._late: set[Note] = set()
        # Ends wait a moment for the claim that follows them, when one is about to.
        self._batcher: Batcher[Note | Offer, Answers] = Batcher(
            "ledger",
            self._flush,
            apart=self._flush_apart,
            linger=lambda: LINGER_S if claim_is_near() else 0.0,
            urgent=lambda item: isinstance(item, Offer),
            about=lambda item: _about(item.event) if isinstance(item, Note) else {},
        )

    def note(self, event: Start | End | Release, entry_id: str = "") -> None:
        """Write this down soon; nobody waits for it."""
        self._batcher.post(Note(event, entry_id))

    def claim(
        self, job_ids: Sequence[str], warm: Sequence[ResidentSlot] = (), blank: int | None = None
    ) -> Future[Answers]:
        """Claim these jobs, with their leases."""
        return self._batcher.submit(Offer(tuple(job_ids), tuple(warm), blank))

    def close(self, timeout_s: float) -> None:
        """Write what waits; give up on it after `timeout_s` (the leader then finds those jobs unowned)."""
        if not self._batcher.close(timeout_s):
            log.error("gave up on unwritten results", extra={"timeout_s": timeout_s})
            self._give_up.set()
            self._batcher.close(timeout_s)
        self._acks.flush(timeout_s)

    def _flush(self, items: list[Note | Offer]) -> list[Answers | Later | Exception]:
        return self._flush_in_order(items, Waiting.ONCE)

    def _flush_apart(self, items: list[Note | Offer], waiting: Waiting) -> list[Answers | Later | Exception]:
        """What cannot be written by itself is not written now."""
        try:
            return self._flush_in_order(items, waiting)
        except RowsHeld as held:
            if len(items) > 1 or self._give_up.is_set():
                raise  # the batcher finds the one at fault
            (item,) = items
            return [self._claim_apart(item, held) if isinstance(item, Offer) else self._put_off(item, held)]

    def _put_off(self, note: Note, held: RowsHeld) -> Later:
        if note not in self._late:
            told = {"item": type(note.event).__name__, "error": str(held)}
            log.warning("somebody holds a row", extra=told | _about(note.event))
        self._late.add(note)
        return Later(RETRY_EVERY_S)

    def _flush_in_order(self, items: list[Note | Offer], waiting: Waiting) -> list[Answers | Later | Exception]:
        """All but what must not be written before something that was put off."""
        behind = [item for item in items if self._is_behind(item, items)] if self._late else []
        ready = [item for item in items if item not in behind] if behind else items
        notes = [item for item in ready if isinstance(item, Note)]
        try:
            outcomes = iter(self._flush_ready(ready, waiting) if ready else ())
        except RowsHeld:
            raise
        except Exception:
            if len(items) == 1:  # it is given up: nothing waits for it any more
                self._late.difference_update(notes)
            raise
        self._late.difference_update(notes)
        return [Later(RETRY_EVERY_S) if item in behind else next(outcomes) for item in items]

    def _is_behind(self, item: Note | Offer, items: list[Note | Offer]) -> bool:
        """A model's lease has its name only when the end is written that left it: released before, it would stay."""
        if not (isinstance(item, Note) and isinstance(item.event, Release)) or self._give_up.is_set():
            return False
        keys = [late.event.left.key for late in self._late if isinstance(late.event, End) and late not in items]
        return item.event.lease_key in keys

    def _flush_ready(self, items: list[Note | Offer], waiting: Waiting) -> list[Answers | Exception]:
        notes = [item for item in items if isinstance(item, Note)]
        ended = {note.event.job_id: note for note in notes if isinstance(note.event, End)}
        # A start whose end is known already needs no write of its own.
        starts = [n.event for n in notes if isinstance(n.event, Start) and n.event.job_id not in ended]
        ends = [_with_origin(note.event, note.entry_id) for note in ended.values() if isinstance(note.event, End)]
        offers = [item for item in items if isinstance(item, Offer)]
        releases = [note.event for note in notes if isinstance(note.event, Release)]
        answers: Sequence[Answers | Exception]
        try:
            settled, answers, _ = self._write(_Turn(starts, ends, offers, releases, waiting))
        except CONTENT_ERRORS as error:
            if len(items) > 1:
                raise  # the batcher finds the one at fault
            if offers:
                return [self._claim_apart(offers[0], error)]
            # The database would refuse this very end for ever: the job must not stay owned that long.
            told = {"item": type(notes[0].event).__name__}
            log.exception("could not be written", extra=told | _about(notes[0].event))
            if releases:  # nobody else ends that lease, and our heartbeats would renew it
                self._on_stuck()
            failures = _Turn([], [_unwritable(end, error) for end in ends], [], waiting=waiting)
            settled, answers = self._write_failure(failures), []
        except RowsHeld:
            raise  # the batcher tells those apart whose rows nobody holds
        except Unavailable as error:
            # Claims are given back to whoever asked; ends must be written, whenever that is.
            away = DatabaseUnavailable(f"the claim failed: {error}")
            settled = self._write_later(_Turn(starts, ends, [], releases, waiting))
            answers = [away] * len(offers)
        except Exception:
            # The server's trouble, under whatever name; but perhaps with one of the jobs that were offered.
            if offers and len(items) > 1:
                raise
            settled = self._write_later(_Turn(starts, ends, [], releases, waiting))
            answers = [self._claim_alone(offer) for offer in offers]
        if settled:
            entry_ids = [ended[item.end.job_id].entry_id for item in settled]
            self._acks.add(self._lane, entry_ids, may_wait=self._claim_is_near())
        self._on_settled(settled)
        replies = iter(answers)
        return [next(replies) if isinstance(item, Offer) else {} for item in items]

    def _claim_alone(self, offer: Offer) -> Answers:
        """Once more, by itself: that tells the server's trouble from that with one of these."""
        try:
            return self._claim_part(offer)
        except Exception as error:
            if isinstance(error, Unavailable) and not isinstance(error, RowsHeld):
                raise
            return self._claim_apart(offer, error)

    def _claim_apart(self, offer: Offer, error: Exception) -> Answers:
        """All of an offer but the job that met a held row, or broke its claim: that one is not claimed now."""

        def claim(job_ids: Sequence[str]) -> Answers:
            return self._claim_part(replace(offer, job_ids=tuple(job_ids)))

        return unclaimable.claim_apart(offer.job_ids, claim, self._leave, error)

    def _claim_part(self, offer: Offer) -> Answers:
        return self._write(_Turn([], [], [offer], waiting=Waiting.NOT)).answers[0]

    def _leave(self, job_id: str, error: Exception) -> NotClaimed:
        if isinstance(error, RowsHeld):
            return leave_for_later(self._db, self._by, job_id, self._held())
        reason, settled = unclaimable.put_off(self._db, self._by, job_id, error, self._policy)
        self._on_settled(settled)
        if job_id not in self._held() and self._is_mine(job_id):
            # The answer to an earlier claim was lost: nobody else would bring it back.
            raise DatabaseUnavailable(f"job {job_id} is claimed already, and {reason}")
        return NotClaimed(reason)

    def _is_mine(self, job_id: str) -> bool:
        return self._db.read(lambda conn: ownership.is_claimed_by(conn, job_id, self._by.worker_id))

    def _write(self, turn: _Turn) -> _Written:
        since = tracing.moment()
        try:
            written = self._commit(turn, checked=False)
        except NotAllOwned:  # rolled back; now find out which
            written = self._commit(turn, checked=True)
        self._on_freed(written.freed)
        if spans := tracing.spans():
            ended = [(one.end, one.arrow.target if one.arrow else None) for one in written.settled]
            spans.settled(ended, since, self._by.worker_id)
        return written

    def _commit(self, turn: _Turn, *, checked: bool) -> _Written:
        def work(conn: Connection) -> _Written:
            return self._turn(conn, turn, checked=checked)

        return self._db.write_batch(work, turn.waiting)

    def _turn(self, conn: Connection, turn: _Turn, *, checked: bool) -> _Written:
        with audit.together(conn), followers.together(conn) as following:
            seats = Seats(conn, self._policies.book(conn))
            offered = [job_id for offer in turn.offers for job_id in offer.job_ids]
            seats.expect(offered, held=[key for end in turn.ends for key in end.caps], model_id=self._by.model_id)
            leases.lock(conn, _lease_keys(turn))
            if checked or turn.starts or not all_done(turn.ends):
                settled = record(conn, self._by, turn.starts, turn.ends, self._policy, seats=seats)
            else:
                settled = finish_all(conn, self._by, turn.ends, seats)
            end_leases(conn, [(release.lease_key, release.left) for release in turn.releases])
            held = self._held() - {end.job_id for end in turn.ends}
            answers = [
                claim_jobs(
                    conn,
                    self._by,
                    offer.job_ids,
                    self._memory_for,
                    held,
                    offer.warm,
                    offer.blank,
                    self._size_of,
                    seats=seats,
                )
                for offer in turn.offers
            ]
            seats.close()
        return _Written(settled, answers, seats.freed | following.freed)

    def _write_failure(self, turn: _Turn) -> list[Settled]:
        """Even that it failed cannot be written: give up this worker's life, so that the leader frees the job."""
        try:
            return self._write_later(turn)
        except CONTENT_ERRORS:
            self._on_stuck()
            raise

    def _write_later(self, turn: _Turn) -> list[Settled]:
        """Try until it is written: an end that is dropped would leave its job owned for ever."""
        while turn.starts or turn.ends or turn.releases:
            try:
                return self._write(turn).settled
            except (*CONTENT_ERRORS, RowsHeld):
                raise
            except Exception as error:
                log.warning("results wait for the database", extra={"jobs": len(turn.ends), "error": str(error)})
                if self._give_up.wait(RETRY_EVERY_S):
                    raise
        return []


def _lease_keys(turn: _Turn) -> set[str]:
    ended = {end.lease_key for end in turn.ends if end.lease_key}
    return ended | {one.lease_key for one in turn.releases} | {slot.key for one in turn.offers for slot in one.warm}


def _with_origin(end: End, entry_id: str) -> End:
    """A dead letter names the entry that brought its job; a success needs no such thing."""
    return end._replace(origin_id=entry_id) if end.outcome is Outcome.FAILED else end


def _unwritable(end: End, error: Exception) -> End:
    """A result that no row can hold will be the same next time; what our code stumbles over may be another's row."""
    reason = f"its end could not be stored: {error if isinstance(error, PayloadTooLarge) else type(error).__name__}"
    kind = ErrorKind.TRANSIENT if isinstance(error, BUGS) else ErrorKind.BAD_RESULT
    return end._replace(outcome=Outcome.FAILED, result=None, error_kind=kind, error=reason)


def _about(event: Start | End | Release) -> dict[str, object]:
    """Which job it is about, and nothing of what it says."""
    return {} if isinstance(event, Release) else {"job_id": event.job_id, "attempt": event.attempt}
