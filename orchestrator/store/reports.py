"""What HTTP workers tell about the jobs they hold: many workers' reports in one transaction, by the usual guards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import Connection, Row, Select, and_, case, exists, or_, select, update

from orchestrator import jobs as job_rules
from orchestrator.errors import JobCancelled, JobNotFound, NotOwner, OrchestratorError
from orchestrator.jobs import OWNED, Arrow, ErrorKind, RetryPolicy, Status
from orchestrator.pools import OPEN, PoolState
from orchestrator.store import audit, followers, job_reads, ownership, registry
from orchestrator.store.caps import Seats
from orchestrator.store.dialect import by_key, in_order, seconds_since, utc_now
from orchestrator.store.hot import among
from orchestrator.store.moves import Claimant
from orchestrator.store.ownership import Ownership
from orchestrator.store.registry import HTTP, Fetcher
from orchestrator.store.schema import jobs, nodes, worker_pools, workers
from orchestrator.store.settle import End, Outcome, Start, record


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
            # Nobody may speak for a worker of ours: its jobs are as little a stranger's as those of one nobody knows.
            known = [number for number in numbers if reports[number].worker_id in found]
            answers |= _hear(conn, found, {number: reports[number] for number in known}, policy)
            for worker_id in sorted({reports[number].worker_id for number in known}):
                own = {number: reports[number].event for number in known if reports[number].worker_id == worker_id}
                answers |= _end(conn, found[worker_id].as_claimant(), own, policy, seats)
            answers |= _refusals(conn, {number: reports[number] for number in numbers if number not in answers})
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


def _end(
    conn: Connection, by: Claimant, events: Mapping[int, End | Sign], policy: RetryPolicy, seats: Seats
) -> dict[int, Answer]:
    """What became of the attempts that ended; those that were not this worker's to end are left out."""
    ends = {number: event for number, event in events.items() if isinstance(event, End)}
    settled = record(conn, by, [], list(ends.values()), policy, seats=seats) if ends else []
    return {
        number: JobCancelled(one.end.job_id) if one.arrow is job_rules.STOP else Ended(one.arrow, by.pool_id)
        for number, one in zip(ends, settled, strict=True)
        if one.arrow is not None
    }


def _hear(
    conn: Connection, found: Mapping[str, Fetcher], reports: Mapping[int, Report], policy: RetryPolicy
) -> dict[int, Answer]:
    """Claimed → running at the first sign, and what it says of its progress; signs of what is not theirs are left out.

    One look and one statement for the progress of all, whoever runs them.
    """
    signs = {number: (one.worker_id, one.event) for number, one in reports.items() if isinstance(one.event, Sign)}
    rows = ownership.lock(conn, sorted(sign.job_id for _, sign in signs.values()))
    own = {number: one for number, one in signs.items() if _owns(rows.get(one[1].job_id), *one)}
    starts: dict[str, list[Start]] = {}
    for worker_id, sign in own.values():
        if rows[sign.job_id].status == Status.CLAIMED:
            starts.setdefault(worker_id, []).append(Start(sign.job_id, sign.attempt))
    for worker_id, begun in sorted(starts.items()):
        record(conn, found[worker_id].as_claimant(), begun, [], policy)
    _note(conn, [sign for _, sign in own.values()])
    return {number: Heard(rows[sign.job_id].cancelled_s is not None) for number, (_, sign) in own.items()}


def _refusals(conn: Connection, reports: Mapping[int, Report]) -> dict[int, Answer]:
    """Of whom we could not write what they say, after one look at where the jobs stand."""
    known = job_reads.statuses(conn, sorted({one.event.job_id for one in reports.values()})) if reports else {}
    return {number: _refusal(one, known.get(one.event.job_id)) for number, one in reports.items()}


def _refusal(report: Report, status: Status | None) -> OrchestratorError:
    event = report.event
    if status is None:
        return JobNotFound(event.job_id)
    return NotOwner(event.job_id, event.attempt, report.worker_id, status)


def _owns(row: Ownership | None, worker_id: str, sign: Sign) -> bool:
    if row is None:
        return False
    return (row.attempt, row.worker_id) == (sign.attempt, worker_id) and row.status in OWNED


def _note(conn: Connection, signs: Sequence[Sign]) -> None:
    """What is not told stays as it is."""
    values = {}
    for column, told in (
        (jobs.c.progress, {sign.job_id: sign.progress for sign in signs if sign.progress is not None}),
        (jobs.c.progress_note, {sign.job_id: sign.note for sign in signs if sign.note is not None}),
    ):
        if told:
            values[column] = case(told, value=jobs.c.job_id, else_=column)
    if values:
        telling = sorted(sign.job_id for sign in signs if (sign.progress, sign.note) != (None, None))
        conn.execute(by_key(update(jobs)).where(jobs.c.job_id.in_(telling)).values(values))


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
