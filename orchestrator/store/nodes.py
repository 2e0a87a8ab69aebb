"""What is alive: nodes, their GPUs, and the workers on them, each kept fresh by its own heartbeat."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from sqlalchemy import Connection, Row, Table, func, insert, or_, select, update
from sqlalchemy.exc import IntegrityError

from orchestrator import tally
from orchestrator.errors import WorkerLost
from orchestrator.jobs import OWNED
from orchestrator.store import audit
from orchestrator.store.dialect import seconds_since, utc_now, utc_shift, walking
from orchestrator.store.schema import LIVE_WORKERS, jobs, leases, nodes, workers

#: The node of a worker that names none: no node's name, so that no GPU is there.
NO_NODE = "(none)"
#: Seconds for which a node counts as just seen.
SEEN_S = 0.5


@dataclass(frozen=True)
class Worker:
    worker_id: str
    node_id: str
    pool_id: str
    hostname: str
    pid: int
    slots: int
    types: tuple[str, ...]
    version: str | None = None
    #: Which change of its pool it serves; 0 without a pool.
    revision: int = 0


@dataclass(frozen=True)
class Host:
    """What a machine has beside its GPUs; None for what it does not tell."""

    gpu_backend: str
    cpu_milli: int | None = None
    memory_mb: int | None = None


def register(conn: Connection, worker: Worker, host: Host) -> None:
    if conn.execute(select(workers.c.worker_id).where(workers.c.worker_id == worker.worker_id)).scalar():
        return  # by a commit whose answer was lost
    said = {"hostname": worker.hostname, **asdict(host)}
    known = conn.execute(update(nodes).where(nodes.c.node_id == worker.node_id).values(said))
    if known.rowcount == 0:
        _insert_once(conn, nodes, {"node_id": worker.node_id, **said})
    conn.execute(
        insert(workers),
        {
            "worker_id": worker.worker_id,
            "node_id": worker.node_id,
            "pool_id": worker.pool_id,
            "hostname": worker.hostname,
            "pid": worker.pid,
            "slots": worker.slots,
            "revision": worker.revision,
            "types": json.dumps(sorted(worker.types)),
            "version": worker.version,
        },
    )
    audit.record(conn, [worker_event("worker.registered", worker)])


@dataclass(frozen=True)
class Beat:
    """One heartbeat of a worker: what it does."""

    busy: int
    done: int
    failed: int
    draining: bool
    progress: tuple[tuple[str, int, float, str], ...] = ()
    #: Jobs in hand.
    held: tuple[str, ...] = ()
    #: The leases of the warm models in memory.
    resident: tuple[str, ...] = ()
    #: Slots there are, and those that can take jobs; None: as many as it registered with.
    slots: int | None = None
    ready: int = 0
    #: Why it cannot do what it should; `blocked` when it only waits for GPU memory.
    trouble: str | None = None
    blocked: bool = False
    #: Seconds that its model took to load, on average.
    load_seconds: float | None = None
    #: How large its batches were, as text; None for a worker that has run none.
    batch_sizes: str | None = None


def heartbeat(conn: Connection, worker: Worker, beat: Beat) -> None:
    """Say that a worker lives, and extend the leases it holds.

    Raises WorkerLost when the leader has given its jobs away: it must stop them and register anew.
    """
    alive = conn.execute(
        update(workers)
        .where(workers.c.worker_id == worker.worker_id, workers.c.status.in_(LIVE_WORKERS))
        .values(
            last_heartbeat=utc_now(),
            busy=beat.busy,
            jobs_done=beat.done,
            jobs_failed=beat.failed,
            status="draining" if beat.draining else "active",
            slots=worker.slots if beat.slots is None else beat.slots,
            ready=beat.ready,
            trouble=beat.trouble and beat.trouble[:255],
            blocked=beat.blocked,
            load_seconds=beat.load_seconds,
            **({"batch_sizes": beat.batch_sizes} if beat.batch_sizes else {}),
        )
    )
    if alive.rowcount != 1:
        raise WorkerLost(worker.worker_id)
    if beat.busy or beat.resident:
        renew_leases(conn, worker.worker_id)
    for job_id, attempt, fraction, note in beat.progress:
        conn.execute(
            update(jobs)
            .where(jobs.c.job_id == job_id, jobs.c.attempt == attempt, jobs.c.worker_id == worker.worker_id)
            .values(progress=fraction, progress_note=note[:255])
        )
    _see(conn, worker.node_id)


def _see(conn: Connection, node_id: str) -> None:
    """Say that a node lives, unless a neighbour just did: its row is one for all of its workers, who would queue there.

    Held until the end of a heartbeat, it would let only one of them write its sample at a time.
    """
    mine = nodes.c.node_id == node_id
    age_s = conn.execute(select(seconds_since(nodes.c.last_heartbeat)).where(mine)).scalar()
    if age_s is None or age_s > SEEN_S:
        conn.execute(update(nodes).where(mine).values(last_heartbeat=utc_now()))


def renew_leases(conn: Connection, worker_id: str) -> None:
    # Not along an index that the ends of leases change: they hold the rows, and would wait for us there.
    conn.execute(
        walking(update(leases), leases, "ix_leases_worker")
        .where(leases.c.worker_id == worker_id, leases.c.state == "active", leases.c.ending_as.is_(None))
        .values(last_heartbeat=utc_now(), expires_at=utc_shift(leases.c.ttl_seconds))
    )


def _insert_once(conn: Connection, table: Table, row: dict[str, Any]) -> None:
    """Insert a row unless a neighbour on the same node did so a moment ago; its row is as good as ours."""
    with suppress(IntegrityError), conn.begin_nested():
        conn.execute(insert(table), row)


def deregister(conn: Connection, worker: Worker) -> None:
    conn.execute(
        update(workers)
        .where(workers.c.worker_id == worker.worker_id, workers.c.status != "lost")
        .values(status="stopped", busy=0, last_heartbeat=utc_now())
    )
    audit.record(conn, [worker_event("worker.stopped", worker)])


def declare_lost(conn: Connection, timeout_s: float, limit: int) -> list[Worker]:
    """Mark workers whose heartbeats stopped; from then on they cannot heartbeat any more."""
    silent = conn.execute(
        select(workers)
        .where(workers.c.status.in_(LIVE_WORKERS), workers.c.last_heartbeat <= utc_shift(-timeout_s))
        .order_by(workers.c.last_heartbeat)
        .limit(limit)
        .with_for_update(skip_locked=True)
    ).all()
    if silent:
        conn.execute(
            update(workers)
            .where(workers.c.worker_id.in_([row.worker_id for row in silent]))
            .values(status="lost", busy=0)
        )
        audit.record(conn, [worker_event("worker.lost", row) for row in silent])
    return [as_worker(row) for row in silent]


class DeadOwner(NamedTuple):
    """Somebody who owns jobs and will not finish them. The id is None for jobs whose owner nobody wrote down."""

    worker_id: str | None
    node_id: str
    pool_id: str
    #: Seconds since its last heartbeat.
    silent_s: float


def dead_owners(conn: Connection, limit: int) -> list[DeadOwner]:
    """Lost and stopped workers that own jobs, and owners of whom there is no row at all."""
    owned = select(jobs.c.worker_id).where(jobs.c.status.in_(sorted(OWNED))).distinct().subquery()
    rows = conn.execute(
        select(
            owned.c.worker_id,
            func.coalesce(workers.c.node_id, ""),
            func.coalesce(workers.c.pool_id, ""),
            func.coalesce(seconds_since(workers.c.last_heartbeat), 0.0),
        )
        .select_from(owned.outerjoin(workers, workers.c.worker_id == owned.c.worker_id))
        .where(or_(workers.c.worker_id.is_(None), workers.c.status.not_in(LIVE_WORKERS)))
        .limit(limit)
    )
    return [DeadOwner(worker_id, node, pool, float(silent)) for worker_id, node, pool, silent in rows]


def dead_ids(conn: Connection, worker_ids: Collection[str]) -> set[str]:
    """Which of these workers are known to be gone. One that nobody has heard of may be another cluster's."""
    rows = conn.execute(
        select(workers.c.worker_id).where(
            workers.c.worker_id.in_(sorted(worker_ids)), workers.c.status.not_in(LIVE_WORKERS)
        )
    )
    return set(rows.scalars())


def alive_ids(conn: Connection, worker_ids: Sequence[str]) -> set[str]:
    """Which of these workers are alive. Lost and stopped ones are not, nor is one nobody has heard of."""
    rows = conn.execute(
        select(workers.c.worker_id).where(workers.c.worker_id.in_(worker_ids), workers.c.status.in_(LIVE_WORKERS))
    )
    return set(rows.scalars())


def list_workers(conn: Connection, limit: int = 1000) -> list[dict[str, Any]]:
    """Workers that are alive or were within the last hour, the youngest first."""
    recent = utc_shift(-3600.0)
    rows = conn.execute(
        select(workers, seconds_since(workers.c.last_heartbeat).label("heartbeat_age_seconds"))
        .where((workers.c.status.in_(LIVE_WORKERS)) | (workers.c.last_heartbeat > recent))
        .order_by(workers.c.started_at.desc())
        .limit(limit)
    )
    return [_listed(row) for row in rows]


def _listed(row: Row[Any]) -> dict[str, Any]:
    worker = row._asdict()
    sizes = tally.from_text(worker.pop("batch_sizes"))
    return worker | {
        "types": json.loads(row.types),
        "node_id": None if row.node_id == NO_NODE else row.node_id,
        "load": round(row.busy / row.slots, 3) if row.slots else 0.0,
        "heartbeat_age_seconds": max(round(float(row.heartbeat_age_seconds), 3), 0.0),
        "batches": {type: of_type.summary() for type, of_type in sizes.items()},
    }


def batch_sizes(conn: Connection) -> dict[str, tally.Tally]:
    """What workers told of their batches, by worker, those that left within the last hour included."""
    rows = conn.execute(
        select(workers.c.worker_id, workers.c.batch_sizes).where(
            workers.c.batch_sizes.is_not(None), workers.c.last_heartbeat > utc_shift(-3600.0)
        )
    )
    return {row.worker_id: tally.from_text(row.batch_sizes) for row in rows}


def serves(conn: Connection, node_id: str, pool_id: str) -> bool:
    """Whether this node has a live worker for that lane."""
    found = conn.execute(
        select(workers.c.worker_id)
        .where(workers.c.pool_id == pool_id, workers.c.status.in_(LIVE_WORKERS), workers.c.node_id == node_id)
        .limit(1)
    )
    return found.scalar() is not None


def as_worker(row: Row[Any]) -> Worker:
    return Worker(
        row.worker_id,
        row.node_id,
        row.pool_id,
        row.hostname,
        row.pid,
        row.slots,
        tuple(json.loads(row.types)),
        row.version,
    )


def worker_event(event_type: str, worker: Worker | Row[Any]) -> audit.Event:
    return audit.Event(event_type, worker_id=worker.worker_id, pool_id=worker.pool_id, actor=worker.worker_id)
