"""What waits in a lane, in order, and claims by workers that read no stream.

Rows are looked up where the publisher looks, announced ones and those it has not announced yet, so an HTTP worker
depends neither on Redis nor on the window. The entries of jobs that are claimed here stay in the stream. That is
harmless: whoever reads one finds its job owned or over and drops it, and the leader drops those that were read by the
dead. In a lane that nobody reads they fill the window (the smallest, since only readers widen it), the publisher
announces no more, and jobs are taken as they are: ready. So the stream is bounded and nobody waits for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import Connection, Select, bindparam, or_, select

from orchestrator.errors import OrchestratorError
from orchestrator.jobs import Queued
from orchestrator.policies import Book
from orchestrator.store import audit, followers, outbox, registry
from orchestrator.store.caps import NO_BOOK, Seats
from orchestrator.store.claim import NO_HANDLER, NO_HANDLER_S, Claim, claim_jobs
from orchestrator.store.dialect import by_key, seconds_since, utc_now, utc_shift, walking
from orchestrator.store.hot import Hot
from orchestrator.store.lanes import advance
from orchestrator.store.moves import Claimant
from orchestrator.store.offers import CLAIMABLE
from orchestrator.store.registry import Fetcher
from orchestrator.store.schema import jobs

#: Jobs of each kind, announced and ready, that one look at a lane reads at most, whatever its backlog.
DEPTH = 256
#: Jobs that nobody can run and one claim puts off at most.
PUT_OFF = 32


class Waiting(NamedTuple):
    """A job that could be claimed now."""

    rank: int
    job_id: str
    type: str
    priority: int
    min_memory_mb: int | None
    cpu_fallback: bool
    waiting_s: float
    #: Its lane's clock has seen it.
    announced: bool

    def suits(self, types: Collection[str], has_gpus: bool) -> bool:
        """Whether a worker could run it. One without GPUs takes what needs no GPU memory, or can do without."""
        return self.type in types and (has_gpus or not self.min_memory_mb or bool(self.cpu_fallback))


#: As `Waiting` has them.
_COLUMNS = (
    jobs.c.rank,
    jobs.c.job_id,
    jobs.c.type,
    jobs.c.priority,
    jobs.c.min_memory_mb,
    jobs.c.cpu_fallback,
    seconds_since(jobs.c.created_at).label("waiting_s"),
)


def _waiting(queued: Queued) -> Hot:
    return Hot(
        lambda _ids: (
            walking(select(*_COLUMNS), jobs, "ix_jobs_queue")
            .where(
                jobs.c.lane == bindparam("of_lane"),
                jobs.c.queued == queued,
                or_(jobs.c.expires_at.is_(None), jobs.c.expires_at > utc_now()),
            )
            .order_by(jobs.c.rank)
            .limit(bindparam("most"))
        )
    )


def _missed(_ids: object) -> Select[Any]:
    """Those whose readers do not know their type: they are due soon, so they are among the soonest of all lanes."""
    soon = select(*_COLUMNS, jobs.c.lane, jobs.c.wait_reason).where(jobs.c.not_before <= utc_shift(NO_HANDLER_S))
    some = walking(soon.order_by(jobs.c.not_before).limit(bindparam("most")), jobs, "ix_jobs_due").subquery()
    mine = (some.c.lane == bindparam("of_lane"), some.c.wait_reason.startswith(NO_HANDLER))
    return select(*[column for column in some.c if column.name not in ("lane", "wait_reason")]).where(*mine)


_MISSED = Hot(_missed)
_QUEUES = {queued: _waiting(queued) for queued in (Queued.ANNOUNCED, Queued.READY)}
# Whoever holds a row claims, cancels or ends it: we need not wait for that.
_LOCK = Hot(
    lambda ids: by_key(
        select(jobs.c.job_id)
        .where(jobs.c.job_id.in_(ids), jobs.c.queued.in_(CLAIMABLE))
        .with_for_update(skip_locked=True),
        jobs,
    )
)


def look(conn: Connection, lane: str, depth: int = DEPTH) -> list[Waiting]:
    """The first jobs of a lane in order of rank, as far as one look goes."""
    found = [
        Waiting(*[*row, queued is Queued.ANNOUNCED])
        for queued, queue in _QUEUES.items()
        for row in queue.rows(conn, of_lane=lane, most=depth)
    ]
    return sorted(found)


def missed(conn: Connection, lane: str) -> list[Waiting]:
    """Jobs of a lane that are put off for a moment, because whoever read of them has no handler for them.

    Readers take an entry within milliseconds: a worker that reads none would never see such a job waiting. They were
    announced before.
    """
    return sorted(Waiting(*[*row, True]) for row in _MISSED.rows(conn, of_lane=lane, most=DEPTH))


def dispatchable(conn: Connection, lane: str, types: Collection[str] | None, limit: int) -> list[Waiting]:
    """What could be claimed now, among the jobs that one look sees."""
    return [job for job in look(conn, lane) if types is None or job.type in types][:limit]


@dataclass(frozen=True)
class Fetch:
    """One worker's wish for up to `most` jobs."""

    worker_id: str
    most: int


def openings(conn: Connection, worker_ids: Collection[str], book: Book = NO_BOOK) -> set[str]:
    """Which of these workers should try to claim: one for each job that waits, and those who must hear that they died.

    In a lane whose look is full of jobs for others the first one tries as well: perhaps nobody can run those.
    """
    found = registry.find(conn, worker_ids)
    wake = {worker_id for worker_id in worker_ids if worker_id not in found or not found[worker_id].alive}
    lanes: dict[str, list[Waiting]] = {}
    free = _free_slots(conn, found)
    for worker_id in sorted(found.keys() - wake):
        fetcher = found[worker_id]
        if _why_closed(fetcher, book) or not free[worker_id]:
            continue
        lane = fetcher.worker.pool_id
        if lane not in lanes:
            lanes[lane] = look(conn, lane)
            wake |= {worker_id} if len(lanes[lane]) >= DEPTH else set()
            lanes[lane] += missed(conn, lane)
        job = next((job for job in lanes[lane] if job.suits(fetcher.worker.types, fetcher.has_gpus)), None)
        if job is not None:
            lanes[lane].remove(job)
            wake.add(worker_id)
    return wake


def _free_slots(conn: Connection, found: Mapping[str, Fetcher]) -> dict[str, int]:
    """What each of these workers has room for, beside the jobs that it owns."""
    owned = registry.owned(conn, found)
    return {name: max(fetcher.worker.slots - owned[name], 0) for name, fetcher in found.items()}


def why_none(conn: Connection, worker_id: str, book: Book = NO_BOOK) -> str | None:
    """Why this worker gets no job, whatever waits; None when there was just none for it."""
    fetcher = registry.find(conn, [worker_id]).get(worker_id)
    return _why_closed(fetcher, book) if fetcher else None


def _why_closed(fetcher: Fetcher, book: Book) -> str | None:
    return fetcher.closed or book.closed(fetcher.worker.pool_id)


Answer = list[Claim] | OrchestratorError


class Claiming:
    """The work of one transaction: claims of many workers.

    Run again after a commit whose answer was lost, it offers the same jobs: `claim_jobs` finds those that are ours
    already, hands them back and claims them anew. Otherwise they would belong to workers that never hear of them.
    """

    def __init__(
        self,
        fetches: Sequence[Fetch],
        claimant: Callable[[Fetcher], Claimant],
        book: Callable[[Connection], Book] = lambda _conn: NO_BOOK,
    ) -> None:
        self._fetches = fetches
        self._claimant = claimant
        self._book = book
        #: Lanes in which somebody was let go meanwhile.
        self.freed: set[str] = set()
        self._offers: list[list[str]] | None = None
        #: For one worker, what to choose from; None: whatever waits.
        self._only: list[str] | None = None
        #: What the last run wanted to claim, and in whose names.
        self.tried: list[str] = []
        self.by: dict[str, Claimant] = {}
        #: Jobs of a lane that are offered before they were announced, with rank and priority.
        self._ahead: dict[str, dict[str, tuple[int, int]]] = {}
        #: Jobs that are offered before the pause is over which somebody without their handler gave them.
        self._early: list[str] = []

    def __call__(self, conn: Connection) -> list[Answer]:
        # Locked, or one that leaves now would keep what it gets from us.
        found = registry.find(conn, {fetch.worker_id for fetch in self._fetches}, lock=True)
        seats = Seats(conn, self._book(conn))
        chosen = self._offers if self._offers is not None else self._chosen(conn, found, seats.book)
        if self._early:
            outbox.promote_early(conn, self._early, seats.book)
        self.tried = [job_id for offer in chosen for job_id in offer]
        self.by = {worker_id: self._claimant(fetcher) for worker_id, fetcher in found.items()}
        seats.expect(self.tried)
        offers = chosen if self._offers is not None else _locked(conn, chosen)
        with audit.together(conn), followers.together(conn) as following:
            offered = zip(self._fetches, offers, strict=True)
            answers = [self._claim(conn, fetch, offer, found, seats) for fetch, offer in offered]
        claimed = {claim.job_id for answer in answers if isinstance(answer, list) for claim in answer}
        for lane, ahead in self._ahead.items():
            # What the publisher does for those it announces: where nobody reads the stream, service goes on here.
            advance(conn, lane, [ranked for job_id, ranked in ahead.items() if job_id in claimed])
        seats.close()
        self.freed = seats.freed | following.freed
        # What failed before here was rolled back for certain: what its worker has by then, it got elsewhere, and keeps.
        self._offers = offers
        return answers

    def part(self, job_ids: Sequence[str]) -> Claiming:
        """The same for its only worker, with no jobs but these of what it tried."""
        part = Claiming(self._fetches, self._claimant, self._book)
        part._only, part._ahead = [*job_ids], self._ahead
        part._early = [job_id for job_id in self._early if job_id in part._only]
        return part

    def _chosen(self, conn: Connection, found: Mapping[str, Fetcher], book: Book) -> list[list[str]]:
        if self._only is not None:
            return [self._only]
        offers, views = _choose(conn, self._fetches, found, book)
        self._ahead = {lane: view.ahead for lane, view in sorted(views.items())}
        self._early = [job_id for view in views.values() for job_id in view.early]
        return offers

    def _claim(
        self, conn: Connection, fetch: Fetch, offer: list[str], found: Mapping[str, Fetcher], seats: Seats
    ) -> Answer:
        try:
            fetcher = registry.alive(found.get(fetch.worker_id), fetch.worker_id)
        except OrchestratorError as refused:
            return refused
        types = fetcher.worker.types
        by = self.by[fetch.worker_id]
        answers = claim_jobs(conn, by, offer, lambda kind: 0 if kind in types else None, seats=seats)
        # In order of rank, as they were offered: a worker begins with the first.
        return [claim for job_id in offer if isinstance(claim := answers.get(job_id), Claim)]


def _choose(
    conn: Connection, fetches: Sequence[Fetch], found: Mapping[str, Fetcher], book: Book
) -> tuple[list[list[str]], dict[str, _LaneView]]:
    """For each wish the jobs to offer, no job twice; and the lanes they come from."""
    living = {name: one for name, one in found.items() if one.alive and not _why_closed(one, book)}
    free = _free_slots(conn, living)
    wanted: Counter[str] = Counter()
    for fetch in fetches:
        if fetch.worker_id in living:
            wanted[living[fetch.worker_id].worker.pool_id] += fetch.most
    lanes = {lane: _LaneView(conn, lane, most) for lane, most in wanted.items()}
    offers = []
    for fetch in fetches:
        fetcher, most = living.get(fetch.worker_id), min(fetch.most, free.get(fetch.worker_id, 0))
        offer = lanes[fetcher.worker.pool_id].take(fetcher, most) if fetcher and most else []
        free[fetch.worker_id] = max(free.get(fetch.worker_id, 0) - len(offer), 0)
        offers.append(offer)
    return offers, lanes


def _locked(conn: Connection, offers: list[list[str]]) -> list[list[str]]:
    """Without the jobs that somebody else has in hand at this moment."""
    ids = [job_id for offer in offers for job_id in offer]
    free = {job_id for (job_id,) in _LOCK.rows(conn, ids)} if ids else set()
    return [[job_id for job_id in offer if job_id in free] for offer in offers]


class _LaneView:
    """What waits in a lane, less what was given out in this transaction.

    Looked up as far as is `wanted`, and as far as one look goes when that was not enough.
    """

    def __init__(self, conn: Connection, lane: str, wanted: int) -> None:
        self._conn = conn
        self._lane = lane
        self._depth = min(wanted, DEPTH)
        self._jobs = look(conn, lane, self._depth)
        self._given: set[str] = set()
        #: Of those given, the ones that were not announced, with rank and priority.
        self.ahead: dict[str, tuple[int, int]] = {}
        #: Of those given, the ones that must be let go first.
        self.early: set[str] = set()

    def take(self, fetcher: Fetcher, most: int) -> list[str]:
        chosen = self._suiting(fetcher, most)
        if len(chosen) < most and self._depth < DEPTH and len(self._jobs) >= self._depth:
            self._jobs, self._depth = look(self._conn, self._lane), DEPTH
            chosen = self._suiting(fetcher, most)
        if len(chosen) < most and len(self._jobs) >= DEPTH:
            chosen += self._hopeless(fetcher, most - len(chosen))
        if len(chosen) < most:
            chosen += self._missed(fetcher, most - len(chosen))
        return self._give(chosen)

    def _suiting(self, fetcher: Fetcher, most: int) -> list[Waiting]:
        return [job for job in self._left() if job.suits(fetcher.worker.types, fetcher.has_gpus)][:most]

    def _hopeless(self, fetcher: Fetcher, room: int) -> list[Waiting]:
        """Jobs in the way of all others that no living worker of the lane can run: `claim_jobs` defers them.

        What others can run is theirs, however long it waits.
        """
        teams = registry.serving(self._conn, self._lane)
        stuck = [job for job in self._left() if not any(job.suits(*team) for team in teams)]
        own = [job for job in stuck if job.type in fetcher.worker.types]  # a GPU may come at this moment: not too many
        return [job for job in stuck if job not in own][:PUT_OFF] + own[:room]

    def _missed(self, fetcher: Fetcher, most: int) -> list[Waiting]:
        """Looked for by those only who find nothing else."""
        others = [job for job in missed(self._conn, self._lane) if job.job_id not in self._given]
        chosen = [job for job in others if job.suits(fetcher.worker.types, fetcher.has_gpus)][:most]
        self.early.update(job.job_id for job in chosen)
        return chosen

    def _left(self) -> Iterable[Waiting]:
        return [job for job in self._jobs if job.job_id not in self._given]

    def _give(self, chosen: Sequence[Waiting]) -> list[str]:
        ids = [job.job_id for job in chosen]
        self._given.update(ids)
        self.ahead |= {job.job_id: (job.rank, job.priority) for job in chosen if not job.announced}
        return ids
