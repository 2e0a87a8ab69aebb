"""Everything at one moment: what the rows say, which processes live. One snapshot of the database for all of it."""

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, func, select

from orchestrator.jobs import OWNED
from orchestrator.store.dialect import seconds_since, utc_shift
from orchestrator.store.schema import (
    LIVE_WORKERS,
    audit,
    gpus,
    jobs,
    lease_gpus,
    leases,
    nodes,
    pool_assignments,
    worker_pools,
    workers,
)
from tests.chaos.pools import handlers
from tests.chaos.pools.stage import TIMES, Slot, Stage
from tests.chaos.pools.wishes import SHORT_HOLD_S

Row = dict[str, Any]


@dataclass(frozen=True)
class Look:
    mono: float
    pools: dict[str, Row]
    #: pool → (node, revision) → workers
    assigned: dict[str, dict[tuple[str, int], int]]
    #: Those that send heartbeats.
    workers: list[Row]
    nodes: dict[str, Row]
    #: The active ones, each with `shares`: GPU → MB.
    leases: list[Row]
    gpus: dict[str, Row]
    #: Jobs by lane: those that could run now, and those that somebody owns.
    waiting: Counter[str]
    owned: Counter[str]
    slots: list[Slot]
    #: Supervisors that live: process id → node.
    supervisors: dict[int, str]
    #: When a process last came up or loaded its model, a job ended, or a worker came, left or was declared lost.
    last_effect: float = 0.0
    #: The youngest row of the audit that is about a pool.
    last_pool_event: int = 0
    crew_of: dict[str, list[Row]] = field(default_factory=dict)


def look(stage: Stage) -> Look:
    # Processes first: one that is written down by then has been seen, unless it is gone.
    slots, supervisors = stage.slots(), stage.supervisors()
    rows = stage.db.read(_rows)
    effect = _last_effect(stage, slots, [rows.pop("ended_s"), rows.pop("came_s")])
    return Look(mono=time.monotonic(), slots=slots, supervisors=supervisors, last_effect=effect, **rows)


def _last_effect(stage: Stage, slots: list[Slot], ago_s: list[Any]) -> float:
    """Now, while a process has been started and is not up yet."""
    said = handlers.read(stage.processes)
    up = {line.pid for line in said}
    if any(site.starting for site in stage.sites) or any(slot.pid not in up for slot in slots):
        return time.monotonic()
    written = [time.monotonic() - float(seconds) for seconds in ago_s if seconds is not None]
    return max([line.mono for line in said] + written, default=0.0)


def _rows(conn: Connection) -> dict[str, Any]:
    conn.exec_driver_sql("START TRANSACTION WITH CONSISTENT SNAPSHOT")
    try:
        live = [row._asdict() for row in conn.execute(select(workers).where(workers.c.status.in_(LIVE_WORKERS)))]
        crew_of: dict[str, list[Row]] = {}
        for row in live:
            crew_of.setdefault(row["pool_id"], []).append(row)
        return {
            "pools": _pools(conn),
            "assigned": _assigned(conn),
            "workers": live,
            "crew_of": crew_of,
            "nodes": _nodes(conn),
            "leases": _leases(conn),
            "gpus": {row.gpu_uuid: row._asdict() for row in conn.execute(select(gpus))},
            "waiting": _by_lane(conn, jobs.c.queued.in_(("ready", "announced"))),
            "owned": _by_lane(conn, jobs.c.status.in_(sorted(OWNED))),
            "last_pool_event": conn.exec_driver_sql(_LAST_POOL_EVENT).scalar() or 0,
            "came_s": conn.execute(
                select(func.min(seconds_since(audit.c.ts))).where(audit.c.event_type.like("worker.%"))
            ).scalar(),
            "ended_s": conn.execute(select(func.min(seconds_since(jobs.c.finished_at)))).scalar(),
        }
    finally:
        conn.exec_driver_sql("COMMIT")


#: Pools that shrink when they are idle change by themselves, as they should.
_LAST_POOL_EVENT = f"""
SELECT MAX(a.id) FROM orchestrator_audit a JOIN worker_pools p ON p.pool_id = a.pool_id
WHERE a.event_type LIKE 'pool.%%' AND p.hold_seconds > {SHORT_HOLD_S}
"""


def _pools(conn: Connection) -> dict[str, Row]:
    query = select(worker_pools, seconds_since(worker_pools.c.active_at).label("idle_s"))
    return {row.pool_id: row._asdict() | {"idle_s": float(row.idle_s)} for row in conn.execute(query)}


def _assigned(conn: Connection) -> dict[str, dict[tuple[str, int], int]]:
    found: dict[str, dict[tuple[str, int], int]] = {}
    for row in conn.execute(select(pool_assignments).where(pool_assignments.c.workers > 0)):
        found.setdefault(row.pool_id, {})[row.node_id, row.revision] = row.workers
    return found


def _nodes(conn: Connection) -> dict[str, Row]:
    heard = nodes.c.supervisor_seen_at > utc_shift(-TIMES["worker_timeout_s"])
    rows = conn.execute(select(nodes, heard.label("heard")))
    return {row.node_id: row._asdict() | {"heard": bool(row.heard)} for row in rows}


def _leases(conn: Connection) -> list[Row]:
    found = {
        row.token: row._asdict() | {"shares": {}}
        for row in conn.execute(
            select(leases, seconds_since(leases.c.created_at).label("age_s")).where(leases.c.state == "active")
        )
    }
    for row in conn.execute(select(lease_gpus)):
        if row.token in found:
            found[row.token]["shares"][row.gpu_uuid] = row.memory_mb
    return list(found.values())


def _by_lane(conn: Connection, condition: Any) -> Counter[str]:
    rows = conn.execute(select(jobs.c.lane, func.count().label("jobs")).where(condition).group_by(jobs.c.lane))
    return Counter({row.lane: row.jobs for row in rows})
