"""Workers that fetch their jobs over HTTP: they register, send heartbeats and leave through the API.

Our own workers write about themselves (`store.nodes`); nothing here touches those, whatever id a caller names.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from sqlalchemy import Connection, Row, Select, case, delete, exists, func, insert, or_, select, update
from sqlalchemy.exc import IntegrityError

from orchestrator.errors import WorkerExists, WorkerLost, WorkerNotFound
from orchestrator.jobs import OWNED, RetryPolicy
from orchestrator.leases import LeaseState
from orchestrator.pools import OPEN
from orchestrator.store import audit, nodes, renewals
from orchestrator.store.database import RowsHeld
from orchestrator.store.dialect import by_key, utc_now, walking
from orchestrator.store.moves import Claimant
from orchestrator.store.nodes import Worker
from orchestrator.store.schema import LIVE_WORKERS, gpus, jobs, leases, worker_pools, workers
from orchestrator.store.schema import nodes as node_rows
from orchestrator.store.settle import End, Outcome, Settled, record

HTTP = "http"

_HAS_GPUS = exists().where(gpus.c.node_id == workers.c.node_id)
_DRAINED = exists().where(node_rows.c.node_id == workers.c.node_id, node_rows.c.drain_until.is_not(None))
_CLOSED_AS = (
    select(worker_pools.c.status)
    .where(worker_pools.c.pool_id == workers.c.pool_id, worker_pools.c.status.not_in(sorted(OPEN)))
    .scalar_subquery()
)


@dataclass(frozen=True)
class Fetcher:
    """A worker that fetches, as the claim of a job needs to know it."""

    worker: Worker
    alive: bool
    has_gpus: bool
    #: Why it gets no jobs, though it lives: its node or its pool is closed. None: it gets what there is.
    closed: str | None = None

    def as_claimant(self, **terms: Any) -> Claimant:
        worker = self.worker
        return Claimant(worker.worker_id, worker.node_id, worker.pool_id, pid=worker.pid or None, **terms)


def register(conn: Connection, worker: Worker) -> None:
    """Begin a registration. Raises WorkerExists while anything of one with this id is left.

    Alive is not all: a job or a lease of the one before would seem to be the new one's, which has never heard of it.
    The row of a worker of ours stays, dead as it may be: if it only was frozen, it must hear that it was lost.
    """
    mine = select(workers.c.status, workers.c.kind).where(workers.c.worker_id == worker.worker_id)
    found = conn.execute(mine.with_for_update()).one_or_none()
    if found and (found.kind != HTTP or found.status in LIVE_WORKERS or _left_something(conn, worker.worker_id)):
        raise WorkerExists(worker.worker_id)
    if found:  # and locked: a row that came since the look is another's, which lives
        conn.execute(delete(workers).where(workers.c.worker_id == worker.worker_id))
    said = asdict(worker) | {"types": json.dumps(sorted(worker.types)), "kind": HTTP}
    try:
        conn.execute(insert(workers), said)
    except IntegrityError:  # the same id, by another request a moment ago
        raise WorkerExists(worker.worker_id) from None
    audit.record(conn, [nodes.worker_event("worker.registered", worker)])


def _left_something(conn: Connection, worker_id: str) -> bool:
    owned = exists().where(jobs.c.worker_id == worker_id, jobs.c.status.in_(sorted(OWNED)))
    leased = exists().where(leases.c.worker_id == worker_id, leases.c.state == LeaseState.ACTIVE)
    return bool(conn.execute(select(or_(owned, leased))).scalar())


def find(conn: Connection, worker_ids: Collection[str], *, lock: bool = False) -> dict[str, Fetcher]:
    """Those of them that registered over HTTP, dead or alive. Locked: none of them leaves meanwhile."""
    known = (_HAS_GPUS.label("has_gpus"), _DRAINED.label("drained"), _CLOSED_AS.label("closed_as"))
    query = by_key(select(workers, *known), workers).where(
        workers.c.worker_id.in_(sorted(worker_ids)), workers.c.kind == HTTP
    )
    rows = conn.execute(query.with_for_update() if lock else query)
    return {row.worker_id: _fetcher(row) for row in rows}


def _fetcher(row: Row[Any]) -> Fetcher:
    closed = f"node {row.node_id} is drained" if row.drained else None
    closed = f"pool {row.pool_id} is {row.closed_as}" if row.closed_as else closed
    return Fetcher(nodes.as_worker(row), row.status in LIVE_WORKERS, bool(row.has_gpus), closed)


class Told(NamedTuple):
    """A heartbeat: what it does not tell stays as it is."""

    worker_id: str
    busy: int | None = None
    jobs_done: int | None = None
    jobs_failed: int | None = None


NotHeard = WorkerNotFound | WorkerLost | RowsHeld


def heartbeats(conn: Connection, beats: Sequence[Told], *, in_turn: bool = False) -> list[NotHeard | None]:
    """Say that workers live, and extend their leases, also of those that are idle by their own account.

    For each, in order, why that was not written: nobody knows it, or its jobs were given away and it must stop them and
    register anew. Rows that somebody holds are left out, unless `in_turn`: then their turn is waited for.
    """
    ids = sorted({beat.worker_id for beat in beats})
    mine = _of(ids).where(workers.c.status.in_(LIVE_WORKERS))
    living = {row.worker_id: row for row in conn.execute(mine.with_for_update(skip_locked=not in_turn))}
    held: set[str] = set()
    if living:
        _say(conn, living, [beat for beat in beats if beat.worker_id in living])
        held = renewals.renew_of_workers(conn, {name: row.node_id for name, row in living.items()}, in_turn=in_turn)
        nodes.see(conn, {row.node_id for row in living.values()})
    rest = _of([worker_id for worker_id in ids if worker_id not in living])
    others = {row.worker_id: row for row in conn.execute(rest)} if len(living) < len(ids) else {}
    held |= {worker_id for worker_id, row in others.items() if row.status in LIVE_WORKERS}
    return [_not_heard(beat.worker_id, {*living, *others}, held, living) for beat in beats]


def _of(worker_ids: Collection[str]) -> Select[Any]:
    columns = (workers.c.worker_id, workers.c.node_id, workers.c.status)
    told = [workers.c[name] for name in Told._fields[1:]]
    theirs = by_key(select(*columns, *told), workers)
    return theirs.where(workers.c.worker_id.in_(worker_ids), workers.c.kind == HTTP)


def _say(conn: Connection, living: Mapping[str, Row[Any]], beats: Sequence[Told]) -> None:
    """One statement for all: most tell nothing new."""
    values: dict[str, Any] = {"last_heartbeat": utc_now()}
    for name in Told._fields[1:]:
        last = {beat.worker_id: told for beat in beats if (told := getattr(beat, name)) is not None}
        news = {worker_id: told for worker_id, told in last.items() if told != getattr(living[worker_id], name)}
        if news:
            values[name] = case(news, value=workers.c.worker_id, else_=workers.c[name])
    conn.execute(by_key(update(workers)).where(workers.c.worker_id.in_(sorted(living))).values(values))


def _not_heard(
    worker_id: str, known: Collection[str], held: Collection[str], living: Collection[str]
) -> NotHeard | None:
    if worker_id not in known:
        return WorkerNotFound(worker_id)
    if worker_id in held:
        return RowsHeld(f"somebody holds the row of worker {worker_id}, or of a lease of its")
    return None if worker_id in living else WorkerLost(worker_id)


def deregister(conn: Connection, worker_id: str, policy: RetryPolicy) -> tuple[Worker, list[Settled]]:
    """End a registration and hand back what it owns, uncharged. Again is fine. Raises WorkerNotFound."""
    row = _locked(conn, worker_id)
    worker = nodes.as_worker(row)
    if row.status in LIVE_WORKERS:
        nodes.deregister(conn, worker)
    by = Claimant(worker_id, worker.node_id, worker.pool_id)
    ends = [End(job.job_id, job.attempt, Outcome.HANDED_BACK, error="its worker left") for job in _owned(conn, by)]
    return worker, record(conn, by, [], ends, policy)


def owned(conn: Connection, worker_ids: Collection[str]) -> Counter[str]:
    """How many jobs each of these has, among all that are owned."""
    theirs = select(jobs.c.worker_id, func.count().label("owned")).where(jobs.c.status.in_(sorted(OWNED)))
    counted = walking(theirs.where(jobs.c.worker_id.in_(sorted(worker_ids))), jobs, "ix_jobs_status")
    rows = conn.execute(counted.group_by(jobs.c.worker_id))
    return Counter({row.worker_id: row.owned for row in rows})


def _owned(conn: Connection, by: Claimant) -> list[Any]:
    query = select(jobs.c.job_id, jobs.c.attempt)
    return list(conn.execute(query.where(jobs.c.worker_id == by.owner, jobs.c.status.in_(sorted(OWNED)))))


def _locked(conn: Connection, worker_id: str) -> Row[Any]:
    query = select(workers).where(workers.c.worker_id == worker_id, workers.c.kind == HTTP)
    row = conn.execute(query.with_for_update()).one_or_none()
    if row is None:
        raise WorkerNotFound(worker_id)
    return row


def alive(found: Fetcher | None, worker_id: str) -> Fetcher:
    """Raises WorkerNotFound or WorkerLost."""
    if found is None:
        raise WorkerNotFound(worker_id)
    if not found.alive:
        raise WorkerLost(worker_id)
    return found


def serving(conn: Connection, pool_id: str, but: str = "") -> list[tuple[frozenset[str], bool]]:
    """What a lane's living workers, of both kinds, can run: types, and whether there are GPUs beside them."""
    rows = conn.execute(
        select(workers.c.types, _HAS_GPUS.label("has_gpus"))
        .where(workers.c.pool_id == pool_id, workers.c.status.in_(LIVE_WORKERS), workers.c.worker_id != but)
        .distinct()
    )
    return [(frozenset(json.loads(row.types)), bool(row.has_gpus)) for row in rows]
