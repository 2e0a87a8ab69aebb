"""What is known about a job that waits, asked of those who decide: the policies, the lane's order, placement.

Every question has a bounded cost, whatever the backlog: whoever wonders why a job waits asks often.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, func, select

from orchestrator.errors import JobNotFound
from orchestrator.explanation import Cap, Facts, Team
from orchestrator.jobs import DEFAULT_LANE, OWNED, Queued, Status
from orchestrator.jsontext import listed
from orchestrator.leases import LeaseRequest, LeaseState, Terms
from orchestrator.placement import Cluster, refused_mb
from orchestrator.policies import Book, keys_of
from orchestrator.pools import OPEN
from orchestrator.store import gpus, workflows
from orchestrator.store.blocked import TASKS
from orchestrator.store.dialect import seconds_since, utc_now, walking
from orchestrator.store.schema import (
    ACTIVE,
    LIVE_WORKERS,
    concurrency_caps,
    gate_states,
    jobs,
    leases,
    nodes,
    results,
    worker_pools,
    workers,
)
from orchestrator.store.schema import gpus as gpu_rows

#: Jobs before it that are counted; beyond, it is "at least".
MOST_AHEAD = 10_000
#: Drained nodes that are named.
MOST_DRAINED = 3
#: Jobs that ended last, among which those of its lane tell how long one takes.
RECENT = 200


def look(conn: Connection, job_id: str, book: Book, terms: Terms) -> tuple[Facts, datetime]:
    """Everything that `explanation.explain` weighs, and the database's time. Raises JobNotFound."""
    row = conn.execute(
        select(
            jobs,
            utc_now().label("now"),
            seconds_since(jobs.c.not_before).label("due_s"),
            seconds_since(jobs.c.published_at).label("announced_s"),
        ).where(jobs.c.job_id == job_id)
    ).one_or_none()
    if row is None:
        raise JobNotFound(job_id)
    job = row._asdict()
    if row.status != Status.PENDING:
        return Facts(job), row.now
    keys = keys_of(row.lane, row.agent, row.type, row.model_id, listed(row.concurrency_keys))
    crew = _crew(conn, row.lane)
    ahead = _ahead(conn, row)
    pool = _pool(conn, row.lane)
    facts = Facts(
        job,
        due_in_s=max(0.0, -float(row.due_s)) if row.due_s is not None else 0.0,
        announced_s=float(row.announced_s or 0.0) if row.queued == Queued.ANNOUNCED else 0.0,
        **_openness(pool),
        drained=() if crew else _drained(conn),
        pauses={key: book.pauses[key].reason for key in keys if key in book.pauses},
        caps=_caps(conn, book, keys),
        gate=_gate(conn, row.blocked_on) if row.blocked_on else None,
        tasks=workflows.open_needs(conn, job_id) if row.blocked_on == TASKS else None,
        teams=_teams(crew),
        ahead=min(ahead, MOST_AHEAD),
        ahead_at_least=ahead > MOST_AHEAD,
        run_s=_mean_run(conn, row.lane),
        running_s=_mean_running(conn, row.lane),
        warm_slots=_warm_slots(conn, row, crew),
        **_placement(conn, row, pool, crew, terms),
    )
    return facts, row.now


def _pool(conn: Connection, lane: str) -> Row[Any] | None:
    if lane == DEFAULT_LANE:
        return None
    wanted = [worker_pools.c[name] for name in ("status", "status_reason", "type", "min_memory_mb", "provider")]
    return conn.execute(select(*wanted).where(worker_pools.c.pool_id == lane)).one_or_none()


def _openness(pool: Row[Any] | None) -> dict[str, Any]:
    """How its pool is closed, or why an open one is not as it should be."""
    if pool is None:
        return {}
    return {"pool_reason": pool.status_reason} if pool.status in OPEN else {"pool_state": str(pool.status)}


def _drained(conn: Connection) -> Sequence[str]:
    """Some of the nodes that take no jobs, since somebody drains them."""
    found = select(nodes.c.node_id).where(nodes.c.drain_until.is_not(None)).order_by(nodes.c.node_id)
    return conn.execute(found.limit(MOST_DRAINED)).scalars().all()


def _caps(conn: Connection, book: Book, keys: Sequence[str]) -> list[Cap]:
    capped = {key: most for key, most in book.capped(keys).items() if key not in book.pauses}
    if not capped:
        return []
    rows = conn.execute(
        select(concurrency_caps.c.cap_key, concurrency_caps.c.in_use).where(concurrency_caps.c.cap_key.in_(capped))
    )
    in_use = {row.cap_key: row.in_use for row in rows}
    return [Cap(key, in_use.get(key, 0), most) for key, most in capped.items()]


def _gate(conn: Connection, name: str) -> str | None:
    seen = conn.execute(select(gate_states.c.reason).where(gate_states.c.name == name)).scalar()
    return seen or None


def _crew(conn: Connection, lane: str) -> list[Row[Any]]:
    has_gpus = select(func.count()).where(gpu_rows.c.node_id == workers.c.node_id).scalar_subquery()
    said = [workers.c[name] for name in ("slots", "busy", "ready", "trouble", "blocked", "status", "kind")]
    found = select(workers.c.node_id, workers.c.types, *said, has_gpus.label("gpus"))
    return list(conn.execute(found.where(workers.c.pool_id == lane, workers.c.status.in_(LIVE_WORKERS))))


def _teams(crew: Sequence[Row[Any]]) -> list[Team]:
    """Those that can run the same, together; those in trouble apart."""
    found: dict[tuple[frozenset[str], bool, bool], Team] = {}
    for worker in crew:
        # One that only waits for GPU memory needs nobody's help.
        trouble = None if worker.blocked else worker.trouble
        types, has_gpus = frozenset(json.loads(worker.types)), bool(worker.gpus)
        team = found.get((types, has_gpus, bool(trouble)), Team(types, has_gpus, 0, 0, trouble=trouble))
        found[types, has_gpus, bool(trouble)] = replace(
            team, slots=team.slots + worker.slots, busy=team.busy + worker.busy, idle=team.idle + _idle(worker)
        )
    return list(found.values())


def _idle(worker: Row[Any]) -> int:
    """Its slots that should be reading its lane: HTTP workers read none, those that leave or are in trouble no more."""
    reads = worker.kind == "process" and worker.status == ACTIVE and not worker.trouble
    return max(worker.ready - worker.busy, 0) if reads else 0


def _placement(
    conn: Connection, job: Row[Any], pool: Row[Any] | None, crew: Sequence[Row[Any]], terms: Terms
) -> dict[str, Any]:
    """What it asks for, and what a claim would be told on the nodes whose workers could make one."""
    needed_mb = _needed_mb(job, pool)
    if not needed_mb:
        return {}
    able = {worker.node_id for worker in crew if job.type in json.loads(worker.types)}
    known = gpus.views(conn, terms.stale_s)
    views = [view for view in known if view.node_id in able]
    ask = LeaseRequest(job.agent, needed_mb, 0.0, job.gpu_count, job_id=job.job_id).ask()
    # Nodes of other providers come with the workers: what is known now says nothing of those.
    comes = pool is not None and pool.provider != "local"
    found: dict[str, Any] = {"ask": ask, "gpus": views, "known": known, "may_grow": comes}
    if job.min_memory_mb:
        found["placement"] = Cluster(views).place(ask, terms.policy, terms.recent.mix())
    return found


def _needed_mb(job: Row[Any], pool: Row[Any] | None) -> int | None:
    """Its own need, else its pool's. A handler's is known to its workers alone, and from what they were refused."""
    if job.min_memory_mb is not None:
        return int(job.min_memory_mb)
    if pool is not None and pool.type == job.type and pool.min_memory_mb is not None:
        return int(pool.min_memory_mb)
    return refused_mb(job.wait_reason or "")


def _warm_slots(conn: Connection, job: Row[Any], crew: Sequence[Row[Any]]) -> int:
    idle = select(func.count()).where(
        leases.c.state == LeaseState.ACTIVE,
        leases.c.resident,
        leases.c.idle_since.is_not(None),
        leases.c.job_type == job.type,
        leases.c.model_id.is_not_distinct_from(job.model_id),
        leases.c.node_id.in_(sorted({worker.node_id for worker in crew})),
    )
    return int(conn.execute(idle).scalar_one()) if crew else 0


def _ahead(conn: Connection, job: Row[Any]) -> int:
    """Jobs that the publisher and the workers take before it, counted no further than anybody wants to know."""
    if job.queued == Queued.ANNOUNCED:
        return _count(conn, job.lane, Queued.ANNOUNCED, jobs.c.rank < job.rank)
    before = _count(conn, job.lane, Queued.READY, jobs.c.rank < job.rank)
    # Not itself: it may have been announced since the look at its row.
    others = jobs.c.job_id != job.job_id
    return before + (_count(conn, job.lane, Queued.ANNOUNCED, others) if before <= MOST_AHEAD else 0)


def _count(conn: Connection, lane: str, queued: Queued, *conditions: ColumnElement[bool]) -> int:
    some = select(jobs.c.rank).where(jobs.c.lane == lane, jobs.c.queued == queued, *conditions).limit(MOST_AHEAD + 1)
    return int(conn.execute(select(func.count()).select_from(some.subquery())).scalar_one())


def _mean_run(conn: Connection, lane: str) -> float | None:
    last = (
        select(jobs.c.job_id, jobs.c.lane)
        .where(jobs.c.status == Status.DONE)
        .order_by(jobs.c.created_at.desc())
        .limit(RECENT)
        .subquery()
    )
    mean = select(func.avg(results.c.run_seconds)).join(last, results.c.job_id == last.c.job_id)
    found = conn.execute(mean.where(last.c.lane == lane)).scalar()
    return None if found is None else float(found)


def _mean_running(conn: Connection, lane: str) -> float | None:
    running = select(seconds_since(jobs.c.claimed_at).label("age_s"))
    some = running.where(jobs.c.status.in_(sorted(OWNED)), jobs.c.lane == lane).limit(RECENT)
    found = conn.execute(select(func.avg(walking(some, jobs, "ix_jobs_status").subquery().c.age_s))).scalar()
    return None if found is None else max(float(found), 0.0)
