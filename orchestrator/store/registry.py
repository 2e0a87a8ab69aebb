"""Workers that fetch their jobs over HTTP: they register, send heartbeats and leave through the API.

Our own workers write about themselves (`store.nodes`); nothing here touches those, whatever id a caller names.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Connection, Row, delete, exists, insert, or_, select
from sqlalchemy.exc import IntegrityError

from orchestrator.errors import WorkerExists, WorkerLost, WorkerNotFound
from orchestrator.jobs import OWNED, RetryPolicy
from orchestrator.pools import OPEN
from orchestrator.store import audit, nodes
from orchestrator.store.dialect import by_key
from orchestrator.store.moves import Claimant
from orchestrator.store.nodes import Beat, Worker
from orchestrator.store.schema import DRAINING, LIVE_WORKERS, gpus, jobs, leases, worker_pools, workers
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
    leased = exists().where(leases.c.worker_id == worker_id, leases.c.state == "active")
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


def heartbeat(conn: Connection, worker_id: str, busy: int | None, done: int | None, failed: int | None) -> None:
    """Say that a worker lives, and extend its leases; what it does not tell stays as it is.

    Raises WorkerNotFound, or WorkerLost when its jobs were given away: it must stop them and register anew.
    """
    row = _row(conn, worker_id)
    beat = Beat(
        row.busy if busy is None else busy,
        row.jobs_done if done is None else done,
        row.jobs_failed if failed is None else failed,
        draining=row.status == DRAINING,
    )
    nodes.heartbeat(conn, nodes.as_worker(row), beat)
    if not beat.busy:  # by its own account; its leases say otherwise, perhaps
        nodes.renew_leases(conn, [worker_id])


def deregister(conn: Connection, worker_id: str, policy: RetryPolicy) -> tuple[Worker, list[Settled]]:
    """End a registration and hand back what it owns, uncharged. Again is fine. Raises WorkerNotFound."""
    row = _row(conn, worker_id, lock=True)
    worker = nodes.as_worker(row)
    if row.status in LIVE_WORKERS:
        nodes.deregister(conn, worker)
    by = Claimant(worker_id, worker.node_id, worker.pool_id)
    ends = [End(job.job_id, job.attempt, Outcome.HANDED_BACK, error="its worker left") for job in _owned(conn, by)]
    return worker, record(conn, by, [], ends, policy)


def _owned(conn: Connection, by: Claimant) -> list[Any]:
    query = select(jobs.c.job_id, jobs.c.attempt)
    return list(conn.execute(query.where(jobs.c.worker_id == by.owner, jobs.c.status.in_(sorted(OWNED)))))


def _row(conn: Connection, worker_id: str, *, lock: bool = False) -> Row[Any]:
    query = select(workers).where(workers.c.worker_id == worker_id, workers.c.kind == HTTP)
    row = conn.execute(query.with_for_update() if lock else query).one_or_none()
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


def serving(conn: Connection, pool_id: str) -> list[tuple[frozenset[str], bool]]:
    """What a lane's living workers, of both kinds, can run: types, and whether there are GPUs beside them."""
    rows = conn.execute(
        select(workers.c.types, _HAS_GPUS.label("has_gpus"))
        .where(workers.c.pool_id == pool_id, workers.c.status.in_(LIVE_WORKERS))
        .distinct()
    )
    return [(frozenset(json.loads(row.types)), bool(row.has_gpus)) for row in rows]
