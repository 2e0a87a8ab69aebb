"""The rows of workflows: how far each is, and the one lock under which its graph changes.

Whoever ends a task, adds one, or starts one over holds the row of its workflow from then to the commit. So `task_edges`
and what a task `waits_for` change under that lock alone, and of two parents that end at the same moment the second
sees what the first did. It is taken as late as possible: behind caps, the jobs that end or are claimed, leases and
GPUs; before the waiting tasks that are let go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import Connection, Row, and_, or_, select, update

from orchestrator.errors import OrchestratorError, WorkflowEnded, WorkflowNotFound
from orchestrator.store import audit
from orchestrator.store.dialect import by_key, utc_now, utc_shift
from orchestrator.store.hot import Hot, among
from orchestrator.store.schema import jobs, spawns, workflows
from orchestrator.workflows import BAD, GOOD, FlowStatus, Progress, Sweep

#: What stands before a workflow's id where the audit names it.
AUDITED = "workflow:"
#: Tasks that one transaction goes through.
BATCH = 500
#: Of a task's job: it ended so that those who need it may go on.
MET = or_(jobs.c.status.in_(sorted(GOOD)), and_(jobs.c.optional, jobs.c.status.in_(sorted(BAD))))


class Flow(NamedTuple):
    workflow_id: str
    status: str
    total: int
    done: int
    failed: int
    cancelled: int
    #: What is being done to its tasks, one batch after the other; None: nothing.
    sweep: str | None
    agent: str
    max_runtime_sec: float | None

    @property
    def progress(self) -> Progress:
        return Progress(self.total, self.done, self.failed, self.cancelled)

    @property
    def runs(self) -> bool:
        return self.status == FlowStatus.RUNNING


_LOCK = Hot(
    lambda ids: by_key(
        select(*[workflows.c[name] for name in Flow._fields]).where(workflows.c.workflow_id.in_(ids)).with_for_update(),
        workflows,
    )
)


def lock(conn: Connection, workflow_ids: Collection[str]) -> dict[str, Flow]:
    """These workflows, locked until the transaction ends; unknown ones are left out."""
    rows = _LOCK.rows(conn, sorted(workflow_ids)) if workflow_ids else ()
    return {flow.workflow_id: flow for flow in (Flow(*row) for row in rows)}


def lock_one(conn: Connection, workflow_id: str) -> Flow:
    """Raises WorkflowNotFound."""
    flow = lock(conn, [workflow_id]).get(workflow_id)
    if flow is None:
        raise WorkflowNotFound(workflow_id)
    return flow


def refusal(workflow_id: str, flow: Flow | None) -> OrchestratorError | None:
    """Why it takes no more tasks; None when it does."""
    if flow is None:
        return WorkflowNotFound(workflow_id)
    return None if flow.runs else WorkflowEnded(workflow_id, flow.status)


def add_tasks(conn: Connection, workflow_ids: Iterable[str]) -> None:
    """One more task for each time that a workflow is named; they are locked."""
    for workflow_id, count in sorted(Counter(workflow_ids).items()):
        change(conn, workflow_id, total=workflows.c.total + count)


def change(conn: Connection, workflow_id: str, **values: Any) -> None:
    conn.execute(update(workflows).where(workflows.c.workflow_id == workflow_id).values(**values))


def end(
    conn: Connection,
    workflow_id: str,
    status: FlowStatus,
    reason: str | None = None,
    **values: Any,
) -> None:
    """It is over, and why if not because all is done; it is locked. `values` are what else changes in its row."""
    over = {"status": status, "reason": reason and reason[:255], "finished_at": utc_now(), "expires_at": None}
    change(conn, workflow_id, **over, **values)
    details = {"reason": reason[:500]} if reason else {}
    audit.record(conn, [event(str(status), workflow_id, **details)])


def reopened(flow: Flow) -> dict[str, Any]:
    """The columns of one that runs again: its time begins anew, a deadline was the first run's."""
    limit = flow.max_runtime_sec
    until = utc_shift(limit) if limit else None
    return {"status": FlowStatus.RUNNING, "reason": None, "finished_at": None, "expires_at": until}


def event(name: str, workflow_id: str, actor: str | None = None, **details: Any) -> audit.Event:
    """An audit row of a workflow."""
    return audit.Event(f"workflow.{name}", job_id=f"{AUDITED}{workflow_id}", actor=actor, details=details or None)


#: Those that run longer than they may.
OVERDUE = select(workflows.c.workflow_id).where(workflows.c.expires_at <= utc_now())
#: Those whose tasks are being stopped or started over.
SWEPT = select(workflows.c.workflow_id).where(among(workflows.c.sweep, (Sweep.PENDING, Sweep.ALL, Sweep.RETRY)))


def overdue(conn: Connection, limit: int) -> Sequence[str]:
    return conn.execute(OVERDUE.order_by(workflows.c.expires_at).limit(limit)).scalars().all()


def swept(conn: Connection, limit: int) -> Sequence[str]:
    return conn.execute(SWEPT.order_by(workflows.c.sweep, workflows.c.workflow_id).limit(limit)).scalars().all()


# ── going through its tasks ─────────────────────────────────────────────────────────────────────────────────────────


class Place(NamedTuple):
    """Behind which task a walk goes on."""

    created_at: datetime
    job_id: str


def tasks(conn: Connection, workflow_id: str, after: Place | None, *columns: Any) -> Sequence[Row[Any]]:
    """The next tasks in order of their creation; not locked."""
    where = [jobs.c.workflow_id == workflow_id]
    if after is not None:
        later = or_(jobs.c.created_at > after.created_at, jobs.c.job_id > after.job_id)
        where += [jobs.c.created_at >= after.created_at, later]
    found = select(jobs.c.job_id, jobs.c.created_at, *columns).where(and_(*where))
    return conn.execute(found.order_by(jobs.c.created_at, jobs.c.job_id).limit(BATCH)).all()


def place_behind(rows: Sequence[Row[Any]]) -> Place | None:
    """Where the walk goes on; None at the end."""
    return Place(rows[-1].created_at, rows[-1].job_id) if len(rows) >= BATCH else None


def grows(conn: Connection, workflow_id: str) -> bool:
    """Whether tasks are added to it at the moment, or would be if it ran."""
    found = select(spawns.c.job_id).where(spawns.c.workflow_id == workflow_id).limit(1)
    return conn.execute(found).first() is not None


def hold_growth(conn: Connection, workflow_id: str) -> None:
    """Wait for whoever adds tasks to it, and let nobody begin with that. Before the workflow itself is locked."""
    conn.execute(select(spawns.c.job_id).where(spawns.c.workflow_id == workflow_id).with_for_update()).all()
