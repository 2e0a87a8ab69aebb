"""The end of a job, and what follows from it: every arrow into a terminal state goes through `end`.

A job that is no task costs nothing here. Of tasks, in the transaction that ends them: their workflow's counts, the
tasks that waited for them and now wait for nobody, the workflow's own end, and the tasks that they added.
A transaction that ends several does this once, as its last step (`together`): a workflow's row is written once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from sqlalchemy import Connection, bindparam, func, select, update

from orchestrator.jobs import CANCEL, TERMINAL, Arrow, Queued, Status
from orchestrator.store import audit, blocked, flows, spawns
from orchestrator.store.dialect import by_key, unled
from orchestrator.store.flows import Flow
from orchestrator.store.hot import Hot, some_at_a_time
from orchestrator.store.moves import Attempt, by_attempt, move
from orchestrator.store.schema import jobs, task_edges
from orchestrator.workflows import BAD, FlowStatus, Sweep, counted_as

_GATHERED = "ended tasks"


class Task(Attempt, Protocol):
    @property
    def workflow_id(self) -> str | None: ...


class Ended(NamedTuple):
    job_id: str
    attempt: int
    workflow_id: str | None
    status: Status
    #: How many tasks the attempt added.
    spawned: int = 0


@dataclass
class Following:
    """What one transaction ended. `freed` are the lanes to nudge after the commit."""

    ended: list[Ended] = field(default_factory=list)
    freed: set[str] = field(default_factory=set)


def end(
    conn: Connection, arrow: Arrow, tasks: Sequence[Task], spawned: Mapping[str, int] | None = None, **values: Any
) -> int:
    """Move these jobs to their end; how many moved. If not all did, the caller rolls back.

    `spawned` says how many tasks the attempts of some of them added.
    """
    assert arrow.target in TERMINAL
    moved = sum(move(conn, arrow, attempt, job_ids, followed=True, **values) for attempt, job_ids in by_attempt(tasks))
    if moved == len(tasks):
        added = spawned or {}
        ended = [
            Ended(task.job_id, task.attempt, task.workflow_id, arrow.target, added.get(task.job_id, 0))
            for task in tasks
            if task.workflow_id or task.job_id in added
        ]
        if ended:
            _note(conn, ended)
    return moved


def _note(conn: Connection, ended: list[Ended]) -> None:
    gathered: Following | None = conn.info.get(_GATHERED)
    if gathered is None:
        settle(conn, ended)
    else:
        gathered.ended += ended


@contextmanager
def together(conn: Connection) -> Iterator[Following]:
    """See to everything that ends inside at once, at the end of it, in the same transaction; of two, the outer one."""
    info = conn.info  # a connection that breaks meanwhile would not give it out any more
    if _GATHERED in info:
        yield info[_GATHERED]
        return
    following = Following()
    info[_GATHERED] = following
    try:
        yield following
    finally:
        del info[_GATHERED]
    following.freed |= settle(conn, following.ended)


def settle(conn: Connection, ended: Sequence[Ended]) -> set[str]:
    """What follows from the end of these tasks; the lanes in which others may go now."""
    if not ended:
        return set()
    ended = [one if one.workflow_id else spawns.found(conn, one) for one in ended]
    of_each: dict[str, list[Ended]] = defaultdict(list)
    for one in ended:
        of_each[str(one.workflow_id)].append(one)
    critical = _critical(conn, ended)
    going_on: list[str] = []
    failed: list[str] = []
    for workflow_id, flow in flows.lock(conn, of_each.keys()).items():
        own = of_each[workflow_id]
        fatal = next((critical[one.job_id] for one in own if one.job_id in critical), None) if flow.runs else None
        _count(conn, flow, own, fatal)
        if fatal is not None:
            failed.append(workflow_id)
        elif flow.runs:
            going_on += [one.job_id for one in own]
    lanes = _let_go(conn, going_on)
    for workflow_id in failed:
        _cancel_the_rest(conn, workflow_id)
    return lanes


def _cancel_the_rest(conn: Connection, workflow_id: str) -> None:
    """Of a workflow that just failed: as many as one batch has; the leader sees to what is left."""
    grows = flows.grows(conn, workflow_id)  # before we look: what is made in between would be missed
    rows = flows.tasks(conn, workflow_id, None, jobs.c.status)
    waiting = [row.job_id for row in rows if row.status == Status.PENDING]
    all_seen = flows.place_behind(rows) is None and not grows
    if cancel_waiting(conn, waiting) == len(waiting) and all_seen:
        flows.change(conn, workflow_id, sweep=None)


def cancel_waiting(conn: Connection, job_ids: Sequence[str]) -> int:
    """Cancel those of these tasks that wait and that nobody has in hand; how many. Their workflow is locked."""
    if not job_ids:
        return 0
    tasks = by_key(select(jobs.c.job_id, jobs.c.attempt, jobs.c.workflow_id), jobs)
    waiting = tasks.where(jobs.c.job_id.in_(job_ids), jobs.c.status == Status.PENDING)
    rows = conn.execute(waiting.with_for_update(skip_locked=True)).all()
    end(conn, CANCEL, rows)
    audit.record(conn, [audit.Event(str(CANCEL.event), job_id=row.job_id, attempt=row.attempt) for row in rows])
    return len(rows)


def _critical(conn: Connection, ended: Sequence[Ended]) -> dict[str, str]:
    """Of these, the tasks without which their workflows cannot go on, and why."""
    bad = {one.job_id: one for one in ended if one.status in BAD}
    if not bad:
        return {}
    columns = (jobs.c.job_id, jobs.c.task, jobs.c.last_error)
    found = by_key(select(*columns), jobs).where(jobs.c.job_id.in_(sorted(bad)), jobs.c.optional.is_(False))
    return {
        row.job_id: _why(row.task or row.job_id, bad[row.job_id].status, row.last_error) for row in conn.execute(found)
    }


def _why(task: str, status: Status, error: str | None) -> str:
    lines = (error or "").strip().splitlines()
    return f"task {task} is {status}" + (f": {lines[-1]}" if lines else "")


def _count(conn: Connection, flow: Flow, own: Sequence[Ended], fatal: str | None) -> None:
    """Write how far the workflow is; and its end, if this is it."""
    counts = Counter(counted_as(one.status) for one in own)
    added = sum(one.spawned for one in own)
    progress = flow.progress.plus(**counts, total=added)
    values: dict[str, Any] = {name: getattr(progress, name) for name in counts}
    if added:
        values["total"] = progress.total
        spawns.add(conn, [one for one in own if one.spawned])
        audit.record(conn, [flows.event("grown", flow.workflow_id, by=own[0].job_id, tasks=added)])
    if fatal is not None:
        flows.end(conn, flow.workflow_id, FlowStatus.FAILED, fatal, sweep=Sweep.PENDING, **values)
    elif flow.runs and progress.over and flow.sweep is None:
        flows.end(conn, flow.workflow_id, FlowStatus.DONE, **values)
    else:
        flows.change(conn, flow.workflow_id, **values)


# ── those who waited ────────────────────────────────────────────────────────────────────────────────────────────────

_FOLLOWERS = Hot(
    lambda ids: (
        select(task_edges.c.task_id, func.count()).where(task_edges.c.needs_id.in_(ids)).group_by(task_edges.c.task_id)
    )
)
_WAIT_LESS = Hot(
    lambda ids: (
        by_key(update(jobs))
        .where(jobs.c.job_id.in_(ids), jobs.c.queued == Queued.BLOCKED, unled(jobs.c.blocked_on) == blocked.TASKS)
        .values(waits_for=jobs.c.waits_for - bindparam("fewer"))
    )
)
_FREE = Hot(
    lambda ids: by_key(
        select(jobs.c.job_id, jobs.c.lane, blocked.GATED)
        .where(
            jobs.c.job_id.in_(ids),
            jobs.c.queued == Queued.BLOCKED,
            unled(jobs.c.blocked_on) == blocked.TASKS,
            jobs.c.waits_for <= 0,
        )
        .with_for_update(),
        jobs,
    )
)


def _let_go(conn: Connection, parents: Sequence[str]) -> set[str]:
    """Let those go who waited for nobody but these, whose workflows are locked; their lanes."""
    if not parents:
        return set()
    fewer: dict[int, list[str]] = defaultdict(list)
    for task_id, count in _FOLLOWERS.rows(conn, parents):
        fewer[int(count)].append(task_id)
    if not fewer:
        return set()
    for count, task_ids in sorted(fewer.items()):
        for some in some_at_a_time(sorted(task_ids)):
            _WAIT_LESS.run(conn, some, fewer=count)
    return release(conn, [task_id for task_ids in fewer.values() for task_id in task_ids])


def release(conn: Connection, task_ids: Sequence[str]) -> set[str]:
    """Let those of these go that wait for no task any more. They keep the rank that they were given at first."""
    lanes: set[str] = set()
    for some in some_at_a_time(sorted(task_ids)):
        free = _FREE.rows(conn, some)
        blocked.let_go(conn, [job_id for job_id, _, gated in free if not gated])
        blocked.let_gated_go(conn, [job_id for job_id, _, gated in free if gated])
        lanes |= {lane for _, lane, _ in free}
    return lanes
