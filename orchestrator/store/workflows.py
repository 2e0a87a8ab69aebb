"""Workflows: created, extended, looked at, cancelled, ended at their time limit, started over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, select

from orchestrator.admission import Admitted
from orchestrator.errors import (
    InvalidInput,
    JobConflict,
    WorkflowBusy,
    WorkflowConflict,
    WorkflowEnded,
    WorkflowGrown,
    WorkflowNotFound,
)
from orchestrator.jobs import OWNED, TERMINAL, NewJob, Status
from orchestrator.names import is_name
from orchestrator.store import audit, flows, paging, sweeping
from orchestrator.store.blocked import TASKS
from orchestrator.store.database import Database
from orchestrator.store.dialect import by_key, clock, unled, utc_now
from orchestrator.store.flows import Flow
from orchestrator.store.hot import insert_rows
from orchestrator.store.schema import jobs, task_edges, workflows
from orchestrator.store.submit import Entering, Rules, enter
from orchestrator.store.sweeping import Walk
from orchestrator.workflows import BAD, FlowStatus, NewWorkflow, Progress, Sweep, Task, check_known, in_order, task_id

#: Tasks that one rerun may start over; and needs of a task that are shown with it.
MOST_RERUN, MOST_NEEDS = 5000, 50
TOO_LONG = "it took longer than its max_runtime_sec or its deadline_at allow"


# ── making them ─────────────────────────────────────────────────────────────────────────────────────────────────────


def create(conn: Connection, db: Database, new: NewWorkflow, rules: Rules) -> bool:
    """Store a workflow and all its tasks, or none; whether it is new.

    Raises WorkflowConflict, WorkflowBusy while one with this id is being forgotten, JobConflict, or why one of its
    tasks is not let in. An id that another process inserts at the same moment is `submit.MetOthers`, and the caller's
    to run again.
    """
    known = select(workflows.c.content_hash, workflows.c.sweep).where(workflows.c.workflow_id == new.workflow_id)
    if (before := conn.execute(known).one_or_none()) is not None:
        if before.sweep == Sweep.FORGET:
            raise WorkflowBusy(new.workflow_id, "one with this id ended long ago and is being deleted")
        if before.content_hash != new.content_hash:
            raise WorkflowConflict(new.workflow_id)
        return False
    _check_free(conn, [task.job for task in new.tasks])
    now = clock(conn)
    row = {
        "workflow_id": new.workflow_id,
        "name": new.name,
        "agent": new.agent,
        "content_hash": new.content_hash,
        "total": len(new.tasks),
        "max_runtime_sec": new.max_runtime_sec,
        "deadline_at": new.deadline,
        "expires_at": new.expires_at(now),
    }
    insert_rows(conn, workflows, [row])
    _enter(conn, db, new.workflow_id, new.tasks, {task.name: len(task.depends_on) for task in new.tasks}, rules)
    audit.record(conn, [flows.event("created", new.workflow_id, new.agent, tasks=len(new.tasks))])
    return True


def add(conn: Connection, db: Database, workflow_id: str, tasks: Sequence[Task], rules: Rules) -> list[str]:
    """Add tasks to a workflow that runs; the names of those that are new.

    Raises WorkflowNotFound, WorkflowEnded, JobConflict for a name that is taken by another task, InvalidInput for needs
    that nobody knows, or why one is not let in.
    """
    flow = flows.lock_one(conn, workflow_id)
    new = _without_known(conn, tasks)
    if not new and flow.sweep != Sweep.FORGET:
        return []
    if refused := flows.refusal(workflow_id, flow):
        raise refused
    names = {task.name for task in new}
    needed = {name: task_id(workflow_id, name) for task in new for name in task.depends_on if name not in names}
    met = _met(conn, workflow_id, list(needed.values()))
    check_known(new, [name for name, job_id in needed.items() if job_id in met])
    waits = {task.name: sum(name in names or not met[needed[name]] for name in task.depends_on) for task in new}
    _enter(conn, db, workflow_id, in_order(new), waits, rules)
    flows.add_tasks(conn, [workflow_id] * len(new))
    audit.record(conn, [flows.event("extended", workflow_id, tasks=sorted(names)[:100], count=len(new))])
    return [task.name for task in new]


def _without_known(conn: Connection, tasks: Sequence[Task]) -> list[Task]:
    """Those that are not there yet. Asking twice is no error; the same name for something else is."""
    ids = {task.job.job_id: task for task in tasks}
    found = conn.execute(select(jobs.c.job_id, jobs.c.payload_hash).where(jobs.c.job_id.in_(list(ids))))
    known = {row.job_id: row.payload_hash for row in found}
    for job_id, digest in known.items():
        if digest != ids[job_id].job.content_hash:
            raise JobConflict(job_id)
    return [task for task in tasks if task.job.job_id not in known]


def _check_free(conn: Connection, new: Sequence[NewJob]) -> None:
    taken = conn.execute(select(jobs.c.job_id).where(jobs.c.job_id.in_([job.job_id for job in new])).limit(1)).scalar()
    if taken is not None:
        raise JobConflict(taken)


def _met(conn: Connection, workflow_id: str, job_ids: Sequence[str]) -> dict[str, bool]:
    """Of those that are there, whether who needs one may go on.

    As they are committed: who ends one of them waits for our lock, and sees what we add.
    """
    found = select(jobs.c.job_id, flows.MET.label("met"))
    found = found.where(jobs.c.job_id.in_(job_ids), jobs.c.workflow_id == workflow_id)
    return {row.job_id: bool(row.met) for row in conn.execute(found)} if job_ids else {}


def _enter(
    conn: Connection, db: Database, workflow_id: str, tasks: Sequence[Task], waits: Mapping[str, int], rules: Rules
) -> None:
    """They get their ranks now, all of them: however late one is let go, it stands where its workflow began."""
    entering = []
    for task, decision in zip(tasks, rules.admit(conn, [task.job for task in tasks]), strict=True):
        if not isinstance(decision, Admitted):
            raise decision
        reason = f"waits for tasks: {', '.join(task.depends_on)}"[:255]
        how = Admitted(TASKS, reason, on_cpu=decision.on_cpu) if waits[task.name] else decision
        entering.append(
            Entering(task.job, how, task.name, len(task.depends_on), waits[task.name], optional=task.optional)
        )
    enter(conn, db, entering, rules.policy, rules.book)
    edges = [
        {"task_id": task.job.job_id, "position": position, "needs_id": task_id(workflow_id, name)}
        for task in tasks
        for position, name in enumerate(task.depends_on)
    ]
    insert_rows(conn, task_edges, edges)


# ── looking ─────────────────────────────────────────────────────────────────────────────────────────────────────────

_HIDDEN = {"content_hash", "expires_at"}
_SHOWN = [column for column in workflows.c if column.name not in _HIDDEN]
_OF_TASKS: tuple[Any, ...] = (
    *(jobs.c.task.label("name"), jobs.c.job_id, jobs.c.type, jobs.c.status, jobs.c.lane.label("pool_id")),
    *(jobs.c.attempts, jobs.c.waits_for, jobs.c.optional, jobs.c.last_error, jobs.c.created_at, jobs.c.finished_at),
)


#: The filters that have an index, and the index of those without any.
_INDEXES = {"agent": "ix_workflows_agent", "status": "ix_workflows_status"}
_OF_ALL = "ix_workflows_created"


@dataclass(frozen=True)
class Filter:
    status: FlowStatus | None = None
    agent: str | None = None

    @property
    def leading(self) -> str | None:
        """The one whose index is followed. What runs is less than what is over, whoever's it is."""
        if self.status is FlowStatus.RUNNING:
            return "status"
        return next((name for name in _INDEXES if getattr(self, name) is not None), None)

    def conditions(self) -> dict[str, ColumnElement[bool]]:
        given = {name: value for name, value in vars(self).items() if value is not None}
        columns = {name: workflows.c[name] if name == self.leading else unled(workflows.c[name]) for name in given}
        return {name: columns[name] == value for name, value in given.items()}


def agent_of(conn: Connection, workflow_id: str) -> str:
    """Raises WorkflowNotFound."""
    found: str | None = conn.execute(select(workflows.c.agent).where(workflows.c.workflow_id == workflow_id)).scalar()
    if found is None:
        raise WorkflowNotFound(workflow_id)
    return found


def get(conn: Connection, workflow_id: str, limit: int = 100, cursor: str | None = None) -> dict[str, Any]:
    """The workflow with its tasks, in order of their creation, a page of them. Raises WorkflowNotFound."""
    row = conn.execute(select(*_SHOWN).where(workflows.c.workflow_id == workflow_id)).one_or_none()
    if row is None:
        raise WorkflowNotFound(workflow_id)
    tasks, following = _tasks(conn, workflow_id, limit, cursor)
    return _readable(row) | {"tasks": tasks, "next_cursor": following}


def page(conn: Connection, wanted: Filter, limit: int, cursor: str | None) -> tuple[list[dict[str, Any]], str | None]:
    """Newest first; the cursor of the next page, or None at the end. A page may be short, or empty, before that."""
    others = wanted.conditions()
    leading = [others.pop(wanted.leading)] if wanted.leading else []
    index = _INDEXES[wanted.leading] if wanted.leading else _OF_ALL
    way = paging.Way(workflows, index, workflows.c.created_at, workflows.c.workflow_id)
    shown, following = way.page(conn, select(*_SHOWN), leading, [*others.values()], limit, cursor)
    return [_readable(row) for row in shown], following


def _readable(row: Row[Any]) -> dict[str, Any]:
    record = row._asdict()
    progress = Progress(row.total, row.done, row.failed, row.cancelled)
    told = {"completed": progress.completed} | {
        name: record.pop(name) for name in ("total", "done", "failed", "cancelled")
    }
    return record | {"progress": told}


def _tasks(
    conn: Connection, workflow_id: str, limit: int, cursor: str | None
) -> tuple[list[dict[str, Any]], str | None]:
    conditions = [jobs.c.workflow_id == workflow_id]
    conditions += paging.after(cursor, jobs.c.created_at, jobs.c.job_id, oldest_first=True)
    oldest = select(*_OF_TASKS).where(*conditions).order_by(jobs.c.created_at, jobs.c.job_id)
    shown, following = paging.split(conn.execute(oldest.limit(limit + 1)).all(), limit, "created_at")
    needs = _needs(conn, [row.job_id for row in shown])
    tasks = [row._asdict() | {"depends_on": needs.get(row.job_id, [])} for row in shown]
    for task in tasks:
        task["critical"] = not task.pop("optional")
    return tasks, following


def _needs(conn: Connection, job_ids: Sequence[str]) -> dict[str, list[str]]:
    """By task, the names of the first that it needs: a task that collects a map needs thousands."""
    if not job_ids:
        return {}
    found = (
        select(task_edges.c.task_id, jobs.c.task, task_edges.c.needs_id)
        .outerjoin(jobs, jobs.c.job_id == task_edges.c.needs_id)
        .where(task_edges.c.task_id.in_(job_ids), task_edges.c.position < MOST_NEEDS)
        .order_by(task_edges.c.task_id, task_edges.c.position)
    )
    needs: dict[str, list[str]] = {}
    for row in conn.execute(found):
        needs.setdefault(row.task_id, []).append(row.task or row.needs_id)
    return needs


def open_needs(conn: Connection, job_id: str, limit: int = 10) -> list[tuple[str, str]]:
    """What a task waits for: the first names, and how each of them stands.

    One that collects a map needs very many: then only the last of them are looked at, which are those that end last.
    """
    needs = select(task_edges.c.position, task_edges.c.needs_id).where(task_edges.c.task_id == job_id)
    last = needs.order_by(task_edges.c.position.desc()).limit(paging.WINDOW).subquery()
    found = (
        by_key(select(jobs.c.task, last.c.needs_id, jobs.c.status), jobs)
        .select_from(last.join(jobs, jobs.c.job_id == last.c.needs_id))
        .where(jobs.c.status.not_in(sorted(TERMINAL)))
        .order_by(last.c.position)
        .limit(limit)
    )
    return [(row.task or row.needs_id, row.status) for row in conn.execute(found)]


# ── stopping them ───────────────────────────────────────────────────────────────────────────────────────────────────


def cancel(conn: Connection, workflow_id: str) -> Walk:
    """Running → cancelled: its tasks that wait end now, those that run are asked to stop. Asking twice is no error.

    Raises WorkflowNotFound, or WorkflowEnded when it ended otherwise.
    """
    flows.hold_growth(conn, workflow_id)
    flow = flows.lock_one(conn, workflow_id)
    if not flow.runs and flow.status != FlowStatus.CANCELLED:
        raise WorkflowEnded(workflow_id, flow.status)
    if flow.runs:
        flows.end(conn, flow.workflow_id, FlowStatus.CANCELLED, "somebody cancelled it", sweep=Sweep.ALL)
    return _first_batch(conn, workflow_id)


def expire(conn: Connection, workflow_id: str) -> Walk:
    """Running → failed, if its time is over; all that it runs is asked to stop."""
    flows.hold_growth(conn, workflow_id)
    flow = flows.lock_one(conn, workflow_id)
    late = select(workflows.c.workflow_id).where(
        workflows.c.workflow_id == workflow_id, workflows.c.expires_at <= utc_now()
    )
    if not flow.runs or conn.execute(late).first() is None:
        return Walk()
    flows.end(conn, flow.workflow_id, FlowStatus.FAILED, TOO_LONG, sweep=Sweep.ALL)
    return _first_batch(conn, workflow_id)


def _first_batch(conn: Connection, workflow_id: str) -> Walk:
    return Walk().go_on(conn, workflow_id)


# ── starting over ───────────────────────────────────────────────────────────────────────────────────────────────────


def retry_failed(conn: Connection, workflow_id: str) -> Walk:
    """Start over what ended badly; what ended well stays. Raises WorkflowNotFound or WorkflowBusy."""
    flow = _idle(conn, workflow_id)
    if not flow.failed + flow.cancelled and flow.status == FlowStatus.DONE:
        return Walk()
    _go_on(conn, flow, "retried", tasks=flow.failed + flow.cancelled)
    return _first_batch(conn, workflow_id)


@dataclass
class Rerun:
    #: That start over: what was asked for, and whatever else ended badly.
    tasks: int
    walk: Walk


def rerun(conn: Connection, workflow_id: str, task: str) -> Rerun:
    """Start a task over with all that needs it, directly or not, and whatever else of the workflow ended badly.

    Raises WorkflowNotFound, InvalidInput for a task that nobody knows, WorkflowGrown when one of them added tasks, or
    WorkflowBusy while one of them runs.
    """
    flow = _idle(conn, workflow_id)
    first = _find(conn, workflow_id, task)
    ids = _behind(conn, first)
    rows = _of(conn, ids)
    if grown := next((row for row in rows if row.spawned), None):
        raise WorkflowGrown(workflow_id, grown.task or grown.job_id)
    if busy := next((row for row in rows if row.status in OWNED), None):
        raise WorkflowBusy(workflow_id, f"task {busy.task or busy.job_id} is {busy.status}")
    if next(row.status for row in rows if row.job_id == first) == Status.PENDING:
        raise WorkflowBusy(workflow_id, f"task {task} has not run yet")
    ended = [row.job_id for row in rows if row.status in TERMINAL]
    elsewhere = flow.failed + flow.cancelled - sum(row.status in BAD for row in rows)
    _go_on(conn, flow, "rerun", task=task, tasks=len(ended) + elsewhere)
    lanes, entry_ids = sweeping.restart(conn, flow, ended)
    walk = _first_batch(conn, workflow_id)
    told = replace(walk, lanes=walk.lanes | lanes, entry_ids=(*walk.entry_ids, *entry_ids))
    return Rerun(len(ended) + elsewhere, told)


def _idle(conn: Connection, workflow_id: str) -> Flow:
    flows.hold_growth(conn, workflow_id)
    flow = flows.lock_one(conn, workflow_id)
    if flow.sweep in (Sweep.PENDING, Sweep.ALL):
        raise WorkflowBusy(workflow_id, "its tasks are being stopped still")
    if flow.sweep == Sweep.FORGET:
        raise WorkflowNotFound(workflow_id)
    return flow


def _go_on(conn: Connection, flow: Flow, how: str, **details: Any) -> None:
    """It runs again; what ended badly starts over, batch after batch."""
    flows.change(conn, flow.workflow_id, **({} if flow.runs else flows.reopened(flow)), sweep=Sweep.RETRY)
    audit.record(conn, [flows.event(how, flow.workflow_id, **details)])


def _find(conn: Connection, workflow_id: str, task: str) -> str:
    """By its name, or the id of its job."""
    ids = [task_id(workflow_id, task), task] if is_name(task) else []
    found = select(jobs.c.job_id).where(jobs.c.job_id.in_(ids), jobs.c.workflow_id == workflow_id)
    job_id: str | None = conn.execute(found.limit(1)).scalar() if ids else None
    if job_id is None:
        raise InvalidInput(f"task: workflow {workflow_id!r} has no task {task[:128]!r}", "task")
    return job_id


def _behind(conn: Connection, first: str) -> list[str]:
    """The task and all that need it, level by level. Raises InvalidInput beyond what one transaction may do."""
    found, level = {first: None}, [first]
    while level:
        query = select(task_edges.c.task_id).where(task_edges.c.needs_id.in_(level)).distinct()
        level = [task for task in conn.execute(query.limit(MOST_RERUN + 1)).scalars() if task not in found]
        found |= dict.fromkeys(level)
        if len(found) > MOST_RERUN:
            raise InvalidInput(f"task: more than {MOST_RERUN} tasks follow it; make a new workflow of them", "task")
    return list(found)


def _of(conn: Connection, job_ids: Sequence[str]) -> Sequence[Row[Any]]:
    columns = (jobs.c.job_id, jobs.c.task, jobs.c.status, jobs.c.spawned)
    return conn.execute(by_key(select(*columns), jobs).where(jobs.c.job_id.in_(job_ids))).all()
