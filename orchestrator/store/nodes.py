"""What is alive: nodes, their GPUs, and the workers on them, each kept fresh by its own heartbeat."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    Table,
    Update,
    and_,
    bindparam,
    delete,
    func,
    insert,
    or_,
    select,
    update,
)
from sqlalchemy.exc import IntegrityError

from orchestrator.jobs import OWNED
from orchestrator.leases import LeaseState
from orchestrator.store import audit, renewals
from orchestrator.store.dialect import by_key, seconds_since, utc_now, utc_shift, walking
from orchestrator.store.hot import among
from orchestrator.store.schema import (
    ACTIVE,
    DRAINING,
    ENDED_WORKERS,
    LIVE_WORKERS,
    LOST,
    STOPPED,
    jobs,
    leases,
    nodes,
    workers,
)

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
    #: Slots there are, and those that can take jobs; None: as many as there were.
    slots: int | None = None
    ready: int = 0
    #: Why it cannot do what it should; `blocked` when it only waits for GPU memory.
    trouble: str | None = None
    blocked: bool = False
    #: Seconds that its model took to load, on average.
    load_seconds: float | None = None
    #: How large its batches were, as text; None for a worker that has run none.
    batch_sizes: str | None = None


class Heard(NamedTuple):
    """What became of the heartbeats of several workers; nobody's for the rest of them."""

    #: The leader has given their jobs away.
    lost: set[str]
    #: Somebody holds their rows: nothing is written of them.
    missed: set[str]
    #: They hold a lease that is somebody's too, and was not extended lately.
    unrenewed: set[str]


def heartbeats(
    conn: Connection, node_id: str, beats: Mapping[str, Beat], said: Mapping[str, Beat], recent_s: float
) -> Heard:
    """Say that workers of a node live, and extend the leases that they hold. It waits for no row, whoever holds it.

    `said` is what stands in their rows already: those who say nothing else share one statement. A lease extended
    within `recent_s` seconds, or granted, need not be extended now.
    """
    mine = by_key(select(workers.c.worker_id), workers).where(_living(beats))
    free = {*conn.execute(mine.with_for_update(skip_locked=True)).scalars()}
    missed = alive_ids(conn, sorted(beats.keys() - free)) if free != beats.keys() else set()
    _say(conn, {name: beat for name, beat in beats.items() if name in free}, said)
    unrenewed: set[str] = set()
    if holding := {name: node_id for name in free if beats[name].busy or beats[name].resident}:
        renewals.renew_of_workers(conn, holding)
        unrenewed = renewals.not_renewed(conn, holding, recent_s)
    if free:
        see(conn, [node_id])
    return Heard(beats.keys() - free - missed, missed, unrenewed)


def _say(conn: Connection, beats: Mapping[str, Beat], said: Mapping[str, Beat]) -> None:
    quiet = [name for name, beat in beats.items() if name in said and _columns(said[name]) == _columns(beat)]
    if quiet:
        conn.execute(_alive(quiet).values(last_heartbeat=utc_now()))
    for name in sorted(beats.keys() - quiet):
        conn.execute(_alive([name]).values(last_heartbeat=utc_now(), **_columns(beats[name])))


def _living(worker_ids: Collection[str]) -> ColumnElement[bool]:
    return and_(workers.c.worker_id.in_(sorted(worker_ids)), workers.c.status.in_(LIVE_WORKERS))


def _alive(worker_ids: Collection[str]) -> Update:
    return by_key(update(workers)).where(_living(worker_ids))


def _columns(beat: Beat) -> dict[str, Any]:
    """What a worker's row says of a heartbeat. What is not told stays as it is."""
    told = {"slots": beat.slots, "batch_sizes": beat.batch_sizes or None}
    return {
        "busy": beat.busy,
        "jobs_done": beat.done,
        "jobs_failed": beat.failed,
        "status": DRAINING if beat.draining else ACTIVE,
        "ready": beat.ready,
        "trouble": beat.trouble and beat.trouble[:255],
        "blocked": beat.blocked,
        "load_seconds": beat.load_seconds,
        **{name: value for name, value in told.items() if value is not None},
    }


def note_progress(conn: Connection, beats: Mapping[str, Beat]) -> None:
    """Write how far jobs are. One whose row somebody holds is left out: that is no news worth waiting for."""
    reports = sorted((*report, name) for name, beat in beats.items() for report in beat.progress)
    if not reports:
        return
    some = by_key(select(jobs.c.job_id), jobs).where(jobs.c.job_id.in_({report[0] for report in reports}))
    free = set(conn.execute(some.with_for_update(skip_locked=True)).scalars())
    for job_id, attempt, fraction, note, worker_id in (report for report in reports if report[0] in free):
        conn.execute(
            update(jobs)
            .where(jobs.c.job_id == job_id, jobs.c.attempt == attempt, jobs.c.worker_id == worker_id)
            .values(progress=fraction, progress_note=note[:255])
        )


def see(conn: Connection, node_ids: Collection[str]) -> None:
    """Say that nodes live, but for those of which a neighbour just did, or whose row somebody holds: all share it."""
    mine = by_key(select(nodes.c.node_id), nodes).where(nodes.c.node_id.in_(sorted(node_ids)))
    unseen = mine.where(seconds_since(nodes.c.last_heartbeat) > SEEN_S)
    if not conn.execute(unseen).first():
        return
    if free := sorted(conn.execute(unseen.with_for_update(skip_locked=True)).scalars()):
        conn.execute(by_key(update(nodes)).where(nodes.c.node_id.in_(free)).values(last_heartbeat=utc_now()))


def _insert_once(conn: Connection, table: Table, row: dict[str, Any]) -> None:
    """Insert a row unless a neighbour on the same node did so a moment ago; its row is as good as ours."""
    with suppress(IntegrityError), conn.begin_nested():
        conn.execute(insert(table), row)


def deregister(conn: Connection, worker: Worker) -> None:
    """It leaves in order, unless the leader gave it up before."""
    stopped = conn.execute(
        update(workers)
        .where(workers.c.worker_id == worker.worker_id, workers.c.status != LOST)
        .values(status=STOPPED, busy=0, last_heartbeat=utc_now())
    )
    if stopped.rowcount:
        audit.record(conn, [worker_event("worker.stopped", worker)])


SILENT = select(workers).where(
    among(workers.c.status, LIVE_WORKERS), workers.c.last_heartbeat <= utc_shift(bindparam("silent_since_s"))
)


def declare_lost(conn: Connection, timeout_s: float, limit: int) -> list[Worker]:
    """Mark workers whose heartbeats stopped; from then on they cannot heartbeat any more."""
    first = SILENT.order_by(workers.c.last_heartbeat).limit(limit)
    silent = conn.execute(first.with_for_update(skip_locked=True), {"silent_since_s": -timeout_s}).all()
    if silent:
        conn.execute(
            by_key(update(workers))
            .where(workers.c.worker_id.in_([row.worker_id for row in silent]))
            .values(status=LOST, busy=0)
        )
        audit.record(conn, [worker_event("worker.lost", row) for row in silent])
    return [as_worker(row) for row in silent]


def forget(conn: Connection, keep_s: float, limit: int) -> int:
    """Delete workers that ended so long ago, unless memory is leased to them still; how many.

    Locked before they are deleted: one that came over HTTP may be registering anew under its id.
    """
    theirs = walking(select(leases.c.token), leases, "ix_leases_worker")
    held = theirs.where(leases.c.worker_id == workers.c.worker_id, leases.c.state == LeaseState.ACTIVE).exists()
    gone = conn.execute(
        select(workers.c.worker_id)
        .where(workers.c.status.in_(ENDED_WORKERS), workers.c.last_heartbeat <= utc_shift(-keep_s), ~held)
        .limit(limit)
        .with_for_update(skip_locked=True)
    )
    worker_ids = list(gone.scalars())
    if worker_ids:
        conn.execute(delete(workers).where(workers.c.worker_id.in_(worker_ids)))
    return len(worker_ids)


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


def lives(conn: Connection, worker_id: str) -> bool:
    """Whether this worker is alive; its row is locked, so that it stays as it is."""
    mine = select(workers.c.status).where(workers.c.worker_id == worker_id)
    return conn.execute(mine.with_for_update()).scalar() in LIVE_WORKERS


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
    return audit.Event(event_type, worker_id=worker.worker_id, pool_id=worker.pool_id)
