"""What the leader sees of pools and nodes, what it decides, and what a node's supervisor reads of that."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, Row, case, delete, func, insert, or_, select, update

from orchestrator.crews import Assignments, Crew, NodeView, Plan, PoolView
from orchestrator.jobs import DUE, OWNED
from orchestrator.jsontext import listed
from orchestrator.pools import OPEN, PoolState, read_metadata
from orchestrator.store import audit, lanes, pools
from orchestrator.store.dialect import by_key, in_order, seconds_since, utc_now, utc_shift
from orchestrator.store.registry import HTTP
from orchestrator.store.schema import ACTIVE, LIVE_WORKERS, jobs, nodes, pool_assignments, worker_pools, workers

# ── the leader ──────────────────────────────────────────────────────────────────────────────────────────────────


def look(conn: Connection) -> list[PoolView]:
    """All pools with their workers and assignments, by id."""
    rows = conn.execute(
        select(
            worker_pools,
            seconds_since(worker_pools.c.active_at).label("idle_s"),
            lanes.has(worker_pools.c.pool_id, *DUE).label("asked_for"),
        ).order_by(worker_pools.c.pool_id)
    ).all()
    if not rows:
        return []
    assigned: dict[str, Assignments] = {}
    for row in conn.execute(select(pool_assignments).where(pool_assignments.c.workers > 0)):  # not of deleted pools
        assigned.setdefault(row.pool_id, {})[row.node_id, row.revision] = row.workers
    crews = _crews(conn, [row.pool_id for row in rows])
    return [_view(row, assigned.get(row.pool_id, {}), crews.get(row.pool_id, [])) for row in rows]


def _view(row: Row[Any], assigned: Assignments, crews: list[Crew]) -> PoolView:
    return PoolView(
        row.pool_id,
        PoolState(row.status),
        row.revision,
        row.desired_workers,
        row.min_workers,
        row.slots,
        row.hold_seconds,
        row.provider,
        row.type,
        row.min_memory_mb or 0,
        row.gpu_count,
        float(row.idle_s),
        bool(row.asked_for) and row.status in OPEN,
        assigned,
        tuple(crews),
        row.spawned_workers,
        row.status_reason,
        read_metadata(row.metadata),
        bool(row.autosize),
        row.desired_workers if row.max_workers is None else row.max_workers,
    )


def _crews(conn: Connection, pool_ids: Sequence[str]) -> dict[str, list[Crew]]:
    rows = conn.execute(
        select(workers)
        .where(workers.c.pool_id.in_(pool_ids), workers.c.status.in_(LIVE_WORKERS))
        .order_by(workers.c.worker_id)
    ).all()
    held = _held(conn, [row.worker_id for row in rows if row.kind == HTTP])
    found: dict[str, list[Crew]] = {}
    for row in rows:
        ready = row.ready if row.status == ACTIVE else 0
        busy = held.get(row.worker_id, 0) if row.kind == HTTP else row.busy
        said = (row.slots, busy, ready, row.trouble, row.blocked)
        crew = Crew(row.worker_id, row.node_id, row.revision, *said, fetches=row.kind == HTTP)
        found.setdefault(row.pool_id, []).append(crew)
    return found


def _held(conn: Connection, worker_ids: Sequence[str]) -> dict[str, int]:
    """By HTTP worker, the jobs that it owns. It need not tell, and its word is not what a drain should wait for."""
    if not worker_ids:
        return {}
    owned = select(jobs.c.worker_id, func.count()).where(
        jobs.c.status.in_(sorted(OWNED)), jobs.c.worker_id.in_(worker_ids)
    )
    rows = conn.execute(owned.group_by(jobs.c.worker_id))
    return {worker_id: count for worker_id, count in rows}  # noqa: C416 - a Row is no pair to mypy


def node_views(conn: Connection, timeout_s: float) -> list[NodeView]:
    """Nodes that have a supervisor; open ones are heard of, and not being drained."""
    rows = conn.execute(
        select(
            nodes.c.node_id,
            nodes.c.supervisor_types,
            nodes.c.drain_until,
            (nodes.c.supervisor_seen_at > utc_shift(-timeout_s)).label("heard"),
        )
        .where(nodes.c.supervisor_id.is_not(None))
        .order_by(nodes.c.node_id)
    )
    return [
        NodeView(
            row.node_id,
            bool(row.heard) and row.drain_until is None,
            frozenset(listed(row.supervisor_types)),
        )
        for row in rows
    ]


def carry_out(conn: Connection, pool: PoolView, plan: Plan) -> bool:
    """Write what differs between the plan and what is; whether anything did. Guarded by the state it was made for."""
    values: dict[str, Any] = {"spawned_workers": plan.spawned, "status_reason": plan.reason}
    if plan.arrow is not None:
        values["started_at"] = case((worker_pools.c.started_at.is_(None), utc_now()), else_=worker_pools.c.started_at)
    if pool.in_use:
        values["active_at"] = utc_now()
    mine = conn.execute(
        update(worker_pools)
        .where(
            worker_pools.c.pool_id == pool.pool_id,
            worker_pools.c.status == pool.state,
            worker_pools.c.revision == pool.revision,
        )
        .values(values)
    )
    if not mine.rowcount:
        return False  # somebody changed it meanwhile: the next plan knows
    if plan.assigned != pool.assigned:
        _assign(conn, pool, plan)
    if plan.arrow is not None:
        pools.move(conn, plan.arrow, pool.pool_id, details={"ready": plan.spawned, "wanted": plan.workers})
    return plan.changes(pool)


def _assign(conn: Connection, pool: PoolView, plan: Plan) -> None:
    conn.execute(delete(pool_assignments).where(pool_assignments.c.pool_id == pool.pool_id))
    rows = [
        {"pool_id": pool.pool_id, "node_id": node_id, "revision": revision, "workers": count}
        for (node_id, revision), count in plan.assigned.items()
    ]
    if rows:
        conn.execute(insert(pool_assignments), rows)
    places = {f"{node_id}@{revision}": count for (node_id, revision), count in sorted(plan.assigned.items())}
    audit.record(conn, [audit.Event("pool.assigned", pool_id=pool.pool_id, details={"workers": places})])


# ── a node's supervisor ─────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Order:
    """What a node should run of one pool. `leave_s`: all of it must go, its jobs may end within so many seconds."""

    pool_id: str
    revision: int
    workers: int
    slots: int
    type: str | None
    model_id: str | None
    adapter: str | None
    variant: str | None
    memory_mb: int | None
    gpu_count: int
    #: The pool's revision now: what it was before is not written down any more, only who serves it knows it.
    newest: int
    leave_s: float | None = None

    @property
    def outdated(self) -> bool:
        return self.revision != self.newest


def take_node(conn: Connection, node_id: str, supervisor_id: str, types: Collection[str], timeout_s: float) -> bool:
    """Say that this process runs the node's pools; False when another one, still alive, does."""
    free = or_(
        nodes.c.supervisor_id.is_(None),
        nodes.c.supervisor_id == supervisor_id,
        nodes.c.supervisor_seen_at <= utc_shift(-timeout_s),
    )
    taken = conn.execute(
        update(nodes)
        .where(nodes.c.node_id == node_id, free)
        .values(supervisor_id=supervisor_id, supervisor_seen_at=utc_now(), supervisor_types=json.dumps(sorted(types)))
    )
    return taken.rowcount == 1


def leave_node(conn: Connection, node_id: str, supervisor_id: str) -> None:
    conn.execute(
        update(nodes)
        .where(nodes.c.node_id == node_id, nodes.c.supervisor_id == supervisor_id)
        .values(supervisor_id=None, supervisor_seen_at=None)
    )


_LEAVE_S = case(
    (worker_pools.c.status == PoolState.EVICTED, 0.0),
    (worker_pools.c.status.not_in(sorted(OPEN)), -seconds_since(worker_pools.c.drain_until)),
    else_=None,
)
_ORDER = (
    worker_pools.c.slots,
    worker_pools.c.type,
    worker_pools.c.model_id,
    worker_pools.c.adapter,
    worker_pools.c.variant,
    worker_pools.c.min_memory_mb,
    worker_pools.c.gpu_count,
    worker_pools.c.revision.label("newest"),
    _LEAVE_S.label("leave_s"),
)


def orders(conn: Connection, node_id: str) -> list[Order]:
    """What this node should run. Orders of an older revision describe a model that is not written down any more."""
    found = (
        select(pool_assignments.c.pool_id, pool_assignments.c.revision, pool_assignments.c.workers, *_ORDER)
        .select_from(pool_assignments.join(worker_pools, worker_pools.c.pool_id == pool_assignments.c.pool_id))
        .where(pool_assignments.c.node_id == node_id)
        .order_by(pool_assignments.c.pool_id, pool_assignments.c.revision)
    )
    return [_order(*row) for row in conn.execute(in_order(found))]  # by the pools it would read all nodes' orders


def order_for(conn: Connection, pool_id: str) -> Order | None:
    """What the pool's row says to a worker that somebody else started for it; None for a lane without a pool."""
    row = conn.execute(
        select(worker_pools.c.pool_id, worker_pools.c.revision, worker_pools.c.desired_workers, *_ORDER).where(
            worker_pools.c.pool_id == pool_id
        )
    ).one_or_none()
    return None if row is None else _order(*row)


def _order(*columns: Any) -> Order:
    order = Order(*columns)
    return order if order.leave_s is None else replace(order, leave_s=max(float(order.leave_s), 0.0))


# ── draining nodes ──────────────────────────────────────────────────────────────────────────────────────────────


def drain_nodes(conn: Connection, node_ids: Sequence[str] | None, timeout_s: float) -> int:
    """These nodes, or all, take no more jobs; what runs there may end within `timeout_s`. How many were told."""
    return _tell_nodes(conn, node_ids, "node.draining", drain_until=utc_shift(timeout_s))


def resume_nodes(conn: Connection, node_ids: Sequence[str] | None) -> int:
    return _tell_nodes(conn, node_ids, "node.resumed", drain_until=None)


def _tell_nodes(conn: Connection, node_ids: Sequence[str] | None, event: str, **values: Any) -> int:
    some = select(nodes.c.node_id).with_for_update()
    found = list(conn.execute(some if node_ids is None else some.where(nodes.c.node_id.in_(node_ids))).scalars())
    if found:
        conn.execute(by_key(update(nodes)).where(nodes.c.node_id.in_(found)).values(values))
        audit.record(conn, [audit.Event(event, details={"node_id": node_id}) for node_id in found])
    return len(found)


def node_leave_s(conn: Connection, node_id: str) -> float | None:
    """Seconds in which this node should be empty; None when nobody drains it."""
    left = conn.execute(
        select(-seconds_since(nodes.c.drain_until)).where(nodes.c.node_id == node_id, nodes.c.drain_until.is_not(None))
    ).scalar()
    return None if left is None else max(float(left), 0.0)


def list_nodes(conn: Connection) -> list[dict[str, Any]]:
    """Nodes, with what runs there."""
    live = (
        select(
            workers.c.node_id,
            func.count().label("workers"),
            func.sum(workers.c.slots).label("slots"),
            func.sum(workers.c.busy).label("running"),
        )
        .where(workers.c.status.in_(LIVE_WORKERS))
        .group_by(workers.c.node_id)
        .subquery()
    )
    shown = ("node_id", "hostname", "gpu_backend", "cpu_milli", "memory_mb", "supervisor_id", "drain_until")
    rows = conn.execute(
        select(
            *[nodes.c[name] for name in shown],
            nodes.c.last_heartbeat,
            seconds_since(nodes.c.last_heartbeat).label("heartbeat_age_seconds"),
            live.c.workers,
            live.c.slots,
            live.c.running,
        )
        .select_from(nodes.outerjoin(live, live.c.node_id == nodes.c.node_id))
        .order_by(nodes.c.node_id)
    )
    return [
        row._asdict()
        | {name: int(getattr(row, name) or 0) for name in ("workers", "slots", "running")}
        | {"heartbeat_age_seconds": max(round(float(row.heartbeat_age_seconds), 3), 0.0)}
        for row in rows
    ]
