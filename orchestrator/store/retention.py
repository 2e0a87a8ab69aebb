"""Forgetting what is over: results, jobs, whole workflows and old rows of the audit, in short transactions.

Each step looks at a bounded part, deletes what is old enough there and says where the next look begins (`Place`), so
that what must stay costs every walk one glance. Nothing here is needed to be consistent: whoever is killed between two
steps leaves rows that the next walk finds.

Never deleted: what has not ended; dead letters, until somebody redrives or purges them; tasks of a workflow that is not
over. A workflow goes as a whole, and its tasks keep their results until then: a rerun gives them to others.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, delete, or_, select

from orchestrator.jobs import TERMINAL, Status
from orchestrator.store import audit as trail
from orchestrator.store import flows, lease_purge, tallies
from orchestrator.store.dialect import by_key, in_order, utc_shift, walking
from orchestrator.store.schema import audit, jobs, results, task_edges, workflows
from orchestrator.workflows import FlowStatus, Sweep

#: Rows that one transaction deletes at most.
ROWS = 500
#: Jobs that it deletes: each may have a result.
JOBS = ROWS // 2
#: Workflows that one look considers; each is decided about in a transaction of its own.
FLOWS = 50
#: The ends after which a job is forgotten by its age alone.
FORGOTTEN = tuple(sorted(TERMINAL - {Status.DEAD_LETTER}))
OVER = tuple(sorted(set(FlowStatus) - {FlowStatus.RUNNING}))


class Place(NamedTuple):
    """The row behind which the next look begins."""

    created_at: datetime
    key: str


class Step(NamedTuple):
    """One look: how much went, where the next begins (None: at the beginning), and whether that should be at once."""

    deleted: int
    after: Place | None
    more: bool


def _behind(after: Place | None, created_at: Any, key: Any) -> list[ColumnElement[bool]]:
    if after is None:
        return []
    return [created_at >= after.created_at, or_(created_at > after.created_at, key > after.key)]


# ── jobs ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def forget_jobs(conn: Connection, status: Status, keep_s: float, after: Place | None = None) -> Step:
    """Delete jobs that ended like this so long ago, with all that hangs on them; tasks go with their workflow."""
    old = utc_shift(-keep_s)
    key = jobs.c.created_at, jobs.c.job_id
    looked = walking(select(*key, jobs.c.workflow_id, (jobs.c.finished_at <= old).label("old")), jobs, "ix_jobs_status")
    page = looked.where(jobs.c.status == status, jobs.c.created_at <= old, *_behind(after, *key))
    rows = conn.execute(page.order_by(*key).limit(JOBS)).all()
    ids = [row.job_id for row in rows if row.old and row.workflow_id is None]
    deleted = _delete_jobs(conn, ids, jobs.c.status == status, jobs.c.finished_at <= old)
    if deleted:
        trail.record(conn, [trail.Event("jobs.forgotten", details={"status": status, "count": deleted})])
    full = len(rows) == JOBS
    return Step(deleted, Place(rows[-1].created_at, rows[-1].job_id) if full else None, full)


def _delete_jobs(conn: Connection, job_ids: Collection[str], *conditions: ColumnElement[bool]) -> int:
    """Those of these that nobody holds, that are what they should be and have no lease any more; how many."""
    if not job_ids:
        return 0
    mine = by_key(select(jobs.c.job_id), jobs).where(jobs.c.job_id.in_(sorted(job_ids)), *conditions)
    locked = conn.execute(mine.with_for_update(skip_locked=True)).scalars().all()
    leased = lease_purge.forget_jobs(conn, locked)
    ids = [job_id for job_id in locked if job_id not in leased]
    conn.execute(delete(results).where(results.c.job_id.in_(ids)))
    conn.execute(delete(jobs).where(jobs.c.job_id.in_(ids)))
    return len(ids)


def forget_results(conn: Connection, keep_s: float, after: Place | None = None) -> Step:
    """Delete results so old. Their jobs stay, done and without one; a workflow's tasks keep theirs.

    The place after the last look is where the next begins: what is older was decided about for good.
    """
    old = utc_shift(-keep_s)
    key = results.c.created_at, results.c.job_id
    beside = results.outerjoin(jobs, jobs.c.job_id == results.c.job_id)
    looked = walking(in_order(select(*key, jobs.c.workflow_id)).select_from(beside), results, "ix_results_created")
    rows = conn.execute(looked.where(key[0] <= old, *_behind(after, *key)).order_by(*key).limit(ROWS)).all()
    ids = [row.job_id for row in rows if row.workflow_id is None]
    if ids:
        # The age once more: the id may have been purged and submitted again since the look.
        conn.execute(delete(results).where(results.c.job_id.in_(ids), results.c.created_at <= old))
        trail.record(conn, [trail.Event("results.forgotten", details={"count": len(ids)})])
    behind = Place(rows[-1].created_at, rows[-1].job_id) if rows else after
    return Step(len(ids), behind, len(rows) == ROWS)


# ── workflows ───────────────────────────────────────────────────────────────────────────────────────────────────────


def find_flows(
    conn: Connection, status: FlowStatus, keep_s: float, after: Place | None = None
) -> tuple[list[str], Place | None]:
    """Workflows that ended so long ago and that nobody works on; and where the next look begins."""
    old = utc_shift(-keep_s)
    key = workflows.c.created_at, workflows.c.workflow_id
    idle = (workflows.c.finished_at <= old) & workflows.c.sweep.is_(None)
    looked = walking(select(*key, idle.label("idle")), workflows, "ix_workflows_status")
    page = looked.where(workflows.c.status == status, workflows.c.created_at <= old, *_behind(after, *key))
    rows = conn.execute(page.order_by(*key).limit(FLOWS)).all()
    behind = Place(rows[-1].created_at, rows[-1].workflow_id) if len(rows) == FLOWS else None
    return [row.workflow_id for row in rows if row.idle], behind


def give_up(conn: Connection, workflow_id: str, keep_s: float) -> bool:
    """From now on this workflow is being forgotten, unless it is not over after all or has dead letters."""
    flow = flows.lock(conn, [workflow_id]).get(workflow_id)
    old = select(workflows.c.workflow_id).where(
        workflows.c.workflow_id == workflow_id, workflows.c.finished_at <= utc_shift(-keep_s)
    )
    if flow is None or flow.runs or flow.sweep is not None or not flow.progress.over:
        return False
    if conn.execute(old).first() is None or flows.grows(conn, workflow_id) or (flow.failed and _letters(conn, flow)):
        return False
    flows.change(conn, workflow_id, sweep=Sweep.FORGET)
    return True


def _letters(conn: Connection, flow: flows.Flow) -> bool:
    tasks = walking(select(jobs.c.job_id), jobs, "ix_jobs_workflow").where(jobs.c.workflow_id == flow.workflow_id)
    return conn.execute(tasks.where(jobs.c.status == Status.DEAD_LETTER).limit(1)).first() is not None


def given_up(conn: Connection) -> list[str]:
    """Workflows of which something is left."""
    left = select(workflows.c.workflow_id).where(workflows.c.sweep == Sweep.FORGET)
    return list(conn.execute(left.order_by(workflows.c.workflow_id).limit(FLOWS)).scalars())


def forget_flow(conn: Connection, workflow_id: str) -> tuple[int, bool]:
    """Delete some of a workflow that was given up, at last itself; how many rows went, and whether it is gone."""
    flow = flows.lock(conn, [workflow_id]).get(workflow_id)
    if flow is None or flow.sweep != Sweep.FORGET:
        return 0, True
    tasks = walking(select(jobs.c.job_id), jobs, "ix_jobs_workflow").where(jobs.c.workflow_id == workflow_id)
    ids = conn.execute(tasks.order_by(jobs.c.created_at, jobs.c.job_id).limit(JOBS)).scalars().all()
    edges = _delete_edges(conn, ids)
    if edges == ROWS:
        return edges, False  # a task may need a hundred thousand others; then it goes another time
    deleted = _delete_jobs(conn, ids, jobs.c.status.in_(FORGOTTEN))
    if len(ids) < JOBS and deleted == len(ids):
        conn.execute(delete(workflows).where(workflows.c.workflow_id == workflow_id))
        trail.record(conn, [flows.event("forgotten", workflow_id)])
        return deleted, True
    return edges + deleted, False


def _delete_edges(conn: Connection, task_ids: Sequence[str]) -> int:
    """What these tasks needed, as much as one transaction may delete; how many rows."""
    if not task_ids:
        return 0
    key = task_edges.c.task_id, task_edges.c.position
    some = select(*key).where(task_edges.c.task_id.in_(sorted(task_ids))).order_by(*key).limit(ROWS)
    rows = conn.execute(some).all()
    if rows:
        last = rows[-1]  # of which there may be more
        whole = {row.task_id for row in rows} - {last.task_id}
        conn.execute(delete(task_edges).where(key[0].in_(sorted(whole))))
        conn.execute(delete(task_edges).where(key[0] == last.task_id, key[1] <= last.position))
    return len(rows)


# ── the audit ───────────────────────────────────────────────────────────────────────────────────────────────────────


def forget_events(conn: Connection, keep_s: float) -> int:
    """Delete the oldest rows of the audit, as far as they are so old and metrics have counted them; how many."""
    up_to = tallies.folded_up_to(conn)
    oldest = select(audit.c.id, audit.c.ts).where(audit.c.id <= up_to).order_by(audit.c.id).limit(ROWS).subquery()
    ids = conn.execute(select(oldest.c.id).where(oldest.c.ts <= utc_shift(-keep_s))).scalars().all()
    if ids:
        conn.execute(delete(audit).where(audit.c.id.in_(ids)))
    return len(ids)
