"""What HTTP workers tell about the jobs they hold: many workers' reports in one transaction, by the usual guards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import Connection, Row, Select, and_, exists, or_, select, update

from orchestrator import jobs as job_rules
from orchestrator.errors import JobCancelled, JobNotFound, NotOwner, OrchestratorError
from orchestrator.jobs import OWNED, Arrow, ErrorKind, RetryPolicy, Status
from orchestrator.pools import OPEN, PoolState
from orchestrator.store import audit, followers, job_reads, ownership, registry
from orchestrator.store.caps import Seats
from orchestrator.store.dialect import in_order, seconds_since, utc_now
from orchestrator.store.hot import among
from orchestrator.store.moves import Claimant
from orchestrator.store.ownership import Ownership
from orchestrator.store.registry import HTTP, Fetcher
from orchestrator.store.schema import jobs, nodes, worker_pools, workers
from orchestrator.store.settle import End, Outcome, Settled, Start, record


class Sign(NamedTuple):
    """A sign of life of one job: it runs."""

    job_id: str
    attempt: int
    progress: float | None = None
    note: str | None = None


@dataclass(frozen=True)
class Report:
    worker_id: str
    event: End | Sign


class Heard(NamedTuple):
    """The answer to a Sign."""

    cancel_requested: bool


class Ended(NamedTuple):
    """The answer to an End: the arrow that the job took, and the lane that it waits in or came from."""

    arrow: Arrow
    lane: str

    @property
    def status(self) -> Status:
        """Where it stands now."""
        return self.arrow.target


Answer = Ended | Heard | OrchestratorError


def write(conn: Connection, reports: Sequence[Report], policy: RetryPolicy, seats: Seats | None = None) -> list[Answer]:
    """An answer for each report, in order; one that is refused changes nothing and is its own worker's alone."""
    seats = seats or Seats(conn)
    seats.expect(ended=[report.event.job_id for report in reports if isinstance(report.event, End)])
    found = registry.find(conn, {report.worker_id for report in reports})
    answers: dict[int, Answer] = {}
    with audit.together(conn), followers.together(conn) as following:
        for numbers in _rounds(reports):
            for worker_id in sorted({reports[number].worker_id for number in numbers}):
                own = {number: reports[number].event for number in numbers if reports[number].worker_id == worker_id}
                answers |= _of_worker(conn, worker_id, found.get(worker_id), own, policy, seats)
        seats.close()
    seats.freed |= following.freed
    return [answers[number] for number in range(len(reports))]


def _rounds(reports: Sequence[Report]) -> list[list[int]]:
    """Reports about one job come one after the other: the second is judged by what the first did."""
    rounds: list[list[int]] = []
    seen: dict[str, int] = {}
    for number, report in enumerate(reports):
        turn = seen[report.event.job_id] = seen.get(report.event.job_id, -1) + 1
        rounds += [[]] if turn == len(rounds) else []
        rounds[turn].append(number)
    return rounds


def _of_worker(
    conn: Connection,
    worker_id: str,
    known: Fetcher | None,
    events: Mapping[int, End | Sign],
    policy: RetryPolicy,
    seats: Seats,
) -> dict[int, Answer]:
    """Nobody may speak for a worker of ours: its jobs are as little a stranger's as those of one nobody knows."""
    if known is None:
        return {number: _refusal(conn, event, worker_id) for number, event in events.items()}
    by = known.as_claimant()
    ends = {number: event for number, event in events.items() if isinstance(event, End)}
    signs = {number: event for number, event in events.items() if isinstance(event, Sign)}
    settled = record(conn, by, [], list(ends.values()), policy, seats=seats) if ends else []
    heard = _hear(conn, by, list(signs.values()), policy) if signs else []
    ended = [_judged(conn, by, item) for item in settled]
    return dict(zip(ends, ended, strict=True)) | dict(zip(signs, heard, strict=True))


def _judged(conn: Connection, by: Claimant, settled: Settled) -> Answer:
    if settled.arrow is None:
        return _refusal(conn, settled.end, by.worker_id)
    if settled.arrow is job_rules.STOP:
        return JobCancelled(settled.end.job_id)
    return Ended(settled.arrow, by.pool_id)


def _refusal(conn: Connection, event: End | Sign, worker_id: str) -> OrchestratorError:
    status = job_reads.statuses(conn, [event.job_id]).get(event.job_id)
    return JobNotFound(event.job_id) if status is None else NotOwner(event.job_id, event.attempt, worker_id, status)


def _hear(conn: Connection, by: Claimant, signs: Sequence[Sign], policy: RetryPolicy) -> list[Answer]:
    """Claimed → running at the first sign, and what it says of its progress."""
    rows = ownership.lock(conn, [sign.job_id for sign in signs])
    own = [sign for sign in signs if (row := rows.get(sign.job_id)) and _owns(row, sign, by)]
    starts = [Start(sign.job_id, sign.attempt) for sign in own if rows[sign.job_id].status == Status.CLAIMED]
    if starts:
        record(conn, by, starts, [], policy)
    for sign in own:
        _note(conn, sign)
    return [
        Heard(rows[sign.job_id].cancelled_s is not None) if sign in own else _refusal(conn, sign, by.worker_id)
        for sign in signs
    ]


def _owns(row: Ownership, sign: Sign, by: Claimant) -> bool:
    return (row.attempt, row.worker_id) == (sign.attempt, by.owner) and row.status in OWNED


def _note(conn: Connection, sign: Sign) -> None:
    said = {"progress": sign.progress, "progress_note": sign.note}
    values = {column: value for column, value in said.items() if value is not None}
    if values:
        conn.execute(update(jobs).where(jobs.c.job_id == sign.job_id).values(values))


class Overrun(NamedTuple):
    """An attempt that its HTTP worker should have ended by now, and what is written of it."""

    by: Claimant
    end: End


#: Attempts of HTTP workers.
HELD = (
    in_order(select(jobs.c.job_id))
    .select_from(jobs.join(workers, workers.c.worker_id == jobs.c.worker_id))
    .where(among(jobs.c.status, OWNED), workers.c.kind == HTTP)
)


def overruns(conn: Connection, unconfirmed_s: float | None, limit: int) -> list[Overrun]:
    """Attempts of living HTTP workers that ran longer than their job may, or of which nobody has heard at all.

    The latter: claimed, and no sign within `unconfirmed_s` (None: not yet asked). The answer to their claim was lost,
    perhaps, and heartbeats of a worker that does not know them would keep them for ever.
    """
    age = seconds_since(jobs.c.claimed_at)
    too_long = age > jobs.c.max_runtime_sec
    unheard = and_(jobs.c.status == Status.CLAIMED, age > unconfirmed_s) if unconfirmed_s is not None else None
    held = _held(jobs.c.max_runtime_sec).where(too_long if unheard is None else or_(too_long, unheard))
    return [_overrun(row) for row in conn.execute(held.limit(limit))]


def _held(*columns: Any) -> Select[Any]:
    age = seconds_since(jobs.c.claimed_at).label("age_s")
    return HELD.with_only_columns(jobs.c.job_id, jobs.c.attempt, age, workers, *columns, maintain_column_froms=True)


def leftovers(conn: Connection, limit: int) -> list[Overrun]:
    """What HTTP workers still hold of a pool or on a node that should be empty by now: handed back, uncharged.

    Our own workers end such jobs and leave; nobody can make these.
    """
    evicted = worker_pools.c.status == PoolState.EVICTED
    over = and_(worker_pools.c.status.not_in(sorted(OPEN)), worker_pools.c.drain_until <= utc_now())
    closed = exists().where(worker_pools.c.pool_id == workers.c.pool_id, or_(evicted, over))
    drained = exists().where(nodes.c.node_id == workers.c.node_id, nodes.c.drain_until <= utc_now())
    held = _held(closed.label("closed")).where(or_(closed, drained))
    return [_leftover(row) for row in conn.execute(held.limit(limit))]


def _leftover(row: Row[Any]) -> Overrun:
    reason = f"pool {row.pool_id} was closed" if row.closed else f"node {row.node_id} was drained"
    end = End(row.job_id, row.attempt, Outcome.HANDED_BACK, float(row.age_s), error=reason)
    return Overrun(Claimant(row.worker_id, row.node_id, row.pool_id), end)


def _overrun(row: Row[Any]) -> Overrun:
    by = Claimant(row.worker_id, row.node_id, row.pool_id)
    if row.max_runtime_sec is not None and row.age_s > row.max_runtime_sec:
        kind, error = ErrorKind.TIMEOUT, f"ran longer than {row.max_runtime_sec:g} seconds"
    else:
        kind, error = ErrorKind.TRANSIENT, f"worker {row.worker_id} gave no sign of it for {row.age_s:.0f} seconds"
    end = End(row.job_id, row.attempt, Outcome.FAILED, float(row.age_s), error_kind=kind, error=error)
    return Overrun(by, end)
