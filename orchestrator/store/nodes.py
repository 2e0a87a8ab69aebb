"""What is alive: nodes, their GPUs, and the workers on them, each kept fresh by its own heartbeat."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import Connection, Table, bindparam, func, insert, or_, select, update
from sqlalchemy.exc import IntegrityError

from orchestrator.errors import WorkerLost
from orchestrator.gpu import Gpu
from orchestrator.jobs import OWNED
from orchestrator.store import audit
from orchestrator.store.dialect import seconds_since, utc_now, utc_shift
from orchestrator.store.schema import LIVE_WORKERS, gpus, jobs, leases, nodes, workers


@dataclass(frozen=True)
class Worker:
    worker_id: str
    node_id: str
    pool_id: str
    hostname: str
    pid: int
    slots: int
    types: tuple[str, ...]


def register(conn: Connection, worker: Worker, gpu_backend: str) -> None:
    if conn.execute(select(workers.c.worker_id).where(workers.c.worker_id == worker.worker_id)).scalar():
        return  # by a commit whose answer was lost
    known = conn.execute(select(nodes.c.node_id).where(nodes.c.node_id == worker.node_id)).scalar()
    if known is None:
        _insert_once(conn, nodes, {"node_id": worker.node_id, "hostname": worker.hostname, "gpu_backend": gpu_backend})
    conn.execute(
        insert(workers),
        {
            "worker_id": worker.worker_id,
            "node_id": worker.node_id,
            "pool_id": worker.pool_id,
            "hostname": worker.hostname,
            "pid": worker.pid,
            "slots": worker.slots,
            "types": json.dumps(sorted(worker.types)),
        },
    )
    audit.record(conn, [_event("worker.registered", worker.worker_id, worker.pool_id)])


@dataclass(frozen=True)
class Beat:
    """One heartbeat of a worker: what it does, and what its node's GPUs look like."""

    busy: int
    done: int
    failed: int
    draining: bool
    progress: tuple[tuple[str, int, float, str], ...] = ()
    #: Jobs in hand.
    held: tuple[str, ...] = ()


def heartbeat(conn: Connection, worker: Worker, beat: Beat, sample: Sequence[Gpu], gate_pct: int) -> None:
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
        )
    )
    if alive.rowcount != 1:
        raise WorkerLost(worker.worker_id)
    if beat.busy:
        conn.execute(
            update(leases)
            .where(leases.c.worker_id == worker.worker_id, leases.c.state == "active")
            .values(last_heartbeat=utc_now(), expires_at=utc_shift(leases.c.ttl_seconds))
        )
    for job_id, attempt, fraction, note in beat.progress:
        conn.execute(
            update(jobs)
            .where(jobs.c.job_id == job_id, jobs.c.attempt == attempt, jobs.c.worker_id == worker.worker_id)
            .values(progress=fraction, progress_note=note[:255])
        )
    record_gpus(conn, worker.node_id, sample, gate_pct)


_UPDATE_GPU = (
    update(gpus)
    .where(gpus.c.gpu_uuid == bindparam("uuid"))
    .values(
        node_id=bindparam("on_node"),
        gpu_index=bindparam("at_index"),
        usable_mb=bindparam("usable"),
        used_mb=bindparam("used"),
        foreign_mb=bindparam("foreign"),
        utilization=bindparam("busy"),
        health=bindparam("state"),
        health_reason=bindparam("reason"),
        sampled_at=utc_now(),
    )
)


def record_gpus(conn: Connection, node_id: str, sample: Sequence[Gpu], gate_pct: int) -> None:
    """Store a node's fresh sample. `usable_mb` is the gate: what leases and foreign memory may fill together."""
    conn.execute(update(nodes).where(nodes.c.node_id == node_id).values(last_heartbeat=utc_now()))
    for gpu in sorted(sample, key=lambda gpu: gpu.uuid):
        values = {
            "uuid": gpu.uuid,
            "on_node": node_id,
            "at_index": gpu.index,
            "usable": gpu.total_mb * gate_pct // 100,
            "used": gpu.used_mb,
            "foreign": gpu.foreign_mb,
            "busy": gpu.utilization,
            "state": gpu.health,
            "reason": gpu.health_reason,
        }
        if conn.execute(_UPDATE_GPU, values).rowcount == 0:
            _insert_once(
                conn,
                gpus,
                {
                    "gpu_uuid": gpu.uuid,
                    "node_id": node_id,
                    "gpu_index": gpu.index,
                    "name": gpu.name,
                    "total_mb": gpu.total_mb,
                    "usable_mb": values["usable"],
                    "used_mb": gpu.used_mb,
                    "foreign_mb": gpu.foreign_mb,
                    "utilization": gpu.utilization,
                    "health": gpu.health,
                    "health_reason": gpu.health_reason,
                },
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
    audit.record(conn, [_event("worker.stopped", worker.worker_id, worker.pool_id)])


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
        audit.record(conn, [_event("worker.lost", row.worker_id, row.pool_id) for row in silent])
    return [_worker(row) for row in silent]


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


def alive_ids(conn: Connection, worker_ids: Sequence[str]) -> set[str]:
    """Which of these workers are alive. Lost and stopped ones are not, nor is one nobody has heard of."""
    rows = conn.execute(
        select(workers.c.worker_id).where(workers.c.worker_id.in_(worker_ids), workers.c.status.in_(LIVE_WORKERS))
    )
    return set(rows.scalars())


def list_workers(conn: Connection, limit: int = 1000) -> list[dict[str, Any]]:
    recent = utc_shift(-3600.0)
    rows = conn.execute(
        select(workers)
        .where((workers.c.status.in_(LIVE_WORKERS)) | (workers.c.last_heartbeat > recent))
        .order_by(workers.c.started_at.desc())
        .limit(limit)
    )
    return [row._asdict() | {"types": json.loads(row.types)} for row in rows]


def list_gpus(conn: Connection, stale_s: float) -> list[dict[str, Any]]:
    fresh = (gpus.c.sampled_at > utc_shift(-stale_s)).label("fresh")
    rows = conn.execute(select(gpus, fresh).order_by(gpus.c.node_id, gpus.c.gpu_index))
    return [row._asdict() | {"fresh": bool(row.fresh)} for row in rows]


def _worker(row: Any) -> Worker:
    return Worker(
        row.worker_id,
        row.node_id,
        row.pool_id,
        row.hostname,
        row.pid,
        row.slots,
        tuple(json.loads(row.types)),
    )


def _event(event_type: str, worker_id: str, pool_id: str) -> audit.Event:
    return audit.Event(event_type, worker_id=worker_id, pool_id=pool_id, actor=worker_id)
