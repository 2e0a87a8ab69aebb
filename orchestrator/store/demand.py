"""What is asked of pools that size themselves, and the models they have in memory: what `warmth` decides upon."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from sqlalchemy import Connection, func, select

from orchestrator.jobs import DUE
from orchestrator.leases import LeaseState
from orchestrator.store.dialect import in_order, seconds_since
from orchestrator.store.schema import jobs, lease_gpus, leases, workers
from orchestrator.warmth import State, Worker

#: Waiting jobs that are counted: more make no difference to how many workers there should be.
MOST_COUNTED = 256


class Demand(NamedTuple):
    """Of one pool: jobs that wait and how long the oldest has, jobs its workers ended so far, seconds a load takes."""

    waiting: int
    oldest_wait_s: float
    ended: int
    load_s: float | None


def of_pools(conn: Connection, pool_ids: Sequence[str]) -> dict[str, Demand]:
    """A few looks along an index for each pool, whatever the backlog."""
    return {pool_id: _of_pool(conn, pool_id) for pool_id in pool_ids}


def _of_pool(conn: Connection, pool_id: str) -> Demand:
    here = (jobs.c.lane == pool_id, jobs.c.queued.in_(DUE))
    some = select(seconds_since(jobs.c.created_at).label("age_s")).where(*here).limit(MOST_COUNTED).subquery()
    waiting, oldest = conn.execute(select(func.count(), func.max(some.c.age_s))).one()
    ended, load_s = conn.execute(
        select(func.sum(workers.c.jobs_done + workers.c.jobs_failed), func.avg(workers.c.load_seconds)).where(
            workers.c.pool_id == pool_id
        )
    ).one()
    return Demand(waiting, float(oldest or 0.0), int(ended or 0), None if load_s is None else float(load_s))


def warm_workers(conn: Connection, pool_ids: Sequence[str]) -> dict[str, list[tuple[str, Worker]]]:
    """By pool, its models in memory, each with the node that it is on."""
    if not pool_ids:
        return {}
    query = (
        select(
            leases.c.token,
            workers.c.pool_id,
            leases.c.node_id,
            leases.c.memory_mb,
            leases.c.job_id,
            leases.c.evicted_at,
            leases.c.ending_as,
            seconds_since(leases.c.idle_since).label("idle_s"),
            seconds_since(leases.c.created_at).label("resident_s"),
            lease_gpus.c.gpu_uuid,
        )
        .select_from(
            workers.join(leases, leases.c.worker_id == workers.c.worker_id).join(
                lease_gpus, lease_gpus.c.token == leases.c.token
            )
        )
        .where(workers.c.pool_id.in_(pool_ids), leases.c.state == LeaseState.ACTIVE, leases.c.resident)
        .order_by(workers.c.pool_id, leases.c.token, lease_gpus.c.gpu_uuid)
    )
    found: dict[str, list[tuple[str, Worker]]] = {}
    for (pool_id, key), group in groupby(conn.execute(in_order(query)).all(), lambda row: (row.pool_id, row.token)):
        shares = list(group)
        one = shares[0]
        idle = one.job_id is None
        state = State.BUSY if not idle else State.LOADING if one.idle_s is None else State.IDLE
        worker = Worker(
            key,
            pool_id,
            tuple(share.gpu_uuid for share in shares),
            one.memory_mb,
            state,
            float(one.idle_s or 0.0) if idle else 0.0,
            float(one.resident_s),
            leaving=one.evicted_at is not None or one.ending_as is not None,
        )
        found.setdefault(pool_id, []).append((one.node_id, worker))
    return found
