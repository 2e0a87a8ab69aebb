"""Going through all tasks of a workflow, batch after batch: cancelling what is left, or starting over what failed.

A workflow says what is being done to its tasks (`sweep`) until that is done. The first batch is part of the transaction
that wanted it; the leader goes on from there. Rows that others hold are passed over: the next walk finds them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from sqlalchemy import Connection, delete, func, or_, select, update

from orchestrator import jobs as job_rules
from orchestrator.jobs import OWNED, Queued, Status
from orchestrator.store import audit, blocked, dead_letters, flows, followers
from orchestrator.store.dialect import by_key, utc_now
from orchestrator.store.flows import Flow, Place
from orchestrator.store.hot import some_at_a_time
from orchestrator.store.schema import jobs, results, task_edges
from orchestrator.workflows import BAD, GOOD, FlowStatus, Sweep, counted_as


class Step(NamedTuple):
    """One batch of a walk."""

    #: Where the next begins; None: this was the last.
    after: Place | None
    #: Tasks of the batch that are to be seen to yet.
    left: int
    #: In which somebody may go now.
    lanes: set[str]
    #: Running tasks were asked to stop: their workers should look.
    asked: int = 0
    #: Entries of the dead-letter stream that speak of nobody any more.
    entry_ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class Walk:
    """How far somebody is with a workflow, and how much he passed over."""

    #: What is being done to the tasks. When that changes, it begins anew.
    sweep: str | None = None
    #: Where it goes on; None: at the beginning, and after the last batch.
    after: Place | None = None
    left: int = 0
    asked: int = 0
    lanes: frozenset[str] = frozenset()
    entry_ids: tuple[str, ...] = ()

    def go_on(self, conn: Connection, workflow_id: str) -> Walk:
        """With the next batch: as it is once the transaction is committed, which may have to run again.

        A walk that passed nobody over is the end of the sweep.
        """
        flows.hold_growth(conn, workflow_id)
        flow = flows.lock_one(conn, workflow_id)
        if flow.sweep in (None, Sweep.FORGET):
            return replace(self, after=None)
        after, left = (self.after, self.left) if flow.sweep == self.sweep else (None, 0)
        step = restart_some(conn, flow, after) if flow.sweep == Sweep.RETRY else cancel_some(conn, flow, after)
        left += step.left
        if step.after is None and not left:
            _stop_sweeping(conn, workflow_id)
        lanes, entry_ids = self.lanes | step.lanes, self.entry_ids + step.entry_ids
        return Walk(flow.sweep, step.after, left, self.asked + step.asked, lanes, entry_ids)

    @property
    def place(self) -> Walk:
        """Without what was told of it."""
        return Walk(self.sweep, self.after, self.left)


def _stop_sweeping(conn: Connection, workflow_id: str) -> None:
    """All tasks were seen to. It may be over: nobody ends one whose tasks are being started over."""
    flow = flows.lock_one(conn, workflow_id)
    if flow.runs and flow.progress.over:
        flows.end(conn, workflow_id, FlowStatus.DONE, sweep=None)
    else:
        flows.change(conn, workflow_id, sweep=None)


def cancel_some(conn: Connection, flow: Flow, after: Place | None) -> Step:
    """Cancel tasks of a workflow that goes on no more: those that wait, and with `ALL` ask those that run to stop."""
    rows = flows.tasks(conn, flow.workflow_id, after, jobs.c.status)
    waiting = [row.job_id for row in rows if row.status == Status.PENDING]
    running = [row.job_id for row in rows if row.status in OWNED] if flow.sweep == Sweep.ALL else []
    left = len(waiting) - followers.cancel_waiting(conn, waiting) + len(running)
    return Step(flows.place_behind(rows), left, set(), _ask(conn, running))


def _ask(conn: Connection, job_ids: Sequence[str]) -> int:
    """Ask those that run to stop; how many. Who holds one of them is passed over."""
    if not job_ids:
        return 0
    running = by_key(select(jobs.c.job_id, jobs.c.attempt), jobs).where(
        jobs.c.job_id.in_(job_ids), jobs.c.status.in_(sorted(OWNED)), jobs.c.cancel_requested_at.is_(None)
    )
    rows = conn.execute(running.with_for_update(skip_locked=True)).all()
    ids = [row.job_id for row in rows]
    if ids:
        conn.execute(by_key(update(jobs)).where(jobs.c.job_id.in_(ids)).values(cancel_requested_at=utc_now()))
        asked = [audit.Event("job.cancel_requested", job_id=row.job_id, attempt=row.attempt) for row in rows]
        audit.record(conn, asked)
    return len(ids)


# ── starting over ───────────────────────────────────────────────────────────────────────────────────────────────────


def restart_some(conn: Connection, flow: Flow, after: Place | None) -> Step:
    """Start those of a batch over that ended badly."""
    rows = flows.tasks(conn, flow.workflow_id, after, jobs.c.status)
    bad = [row.job_id for row in rows if row.status in BAD]
    lanes, entry_ids = restart(conn, flow, bad)
    return Step(flows.place_behind(rows), 0, lanes, 0, tuple(entry_ids))


def restart(conn: Connection, flow: Flow, job_ids: Sequence[str]) -> tuple[set[str], list[str]]:
    """Start tasks over that have ended, of a workflow that is locked; lanes to nudge, and entries to forget."""
    if not job_ids:
        return set(), []
    ended = dead_letters.lock_ended(conn, job_ids)
    bad, good = ([one for one in ended if (one.status in GOOD) is wanted] for wanted in (False, True))
    dead_letters.start_over(conn, job_rules.REDRIVE, bad)
    dead_letters.start_over(conn, job_rules.RERUN, good)
    conn.execute(delete(results).where(results.c.job_id.in_([one.job_id for one in good])))
    counts = [counted_as(Status(one.status)) for one in ended]
    now = flows.lock_one(conn, flow.workflow_id)
    if counts:
        flows.change(conn, flow.workflow_id, **{name: getattr(now, name) - counts.count(name) for name in {*counts}})
    # Those who need a task that is critical and ended badly wait for it still.
    _call_back(conn, [one.job_id for one in ended if one.status in GOOD or one.optional], {one.job_id for one in ended})
    _wait_again(conn, [one.job_id for one in ended])
    return {one.lane for one in ended}, [one.entry_id for one in ended if one.entry_id]


def _wait_again(conn: Connection, job_ids: Sequence[str]) -> None:
    """How many tasks each of these, which start over, waits for: all it needs but what ended so that it may go on.

    What is not there any more was purged, and is waited for by nobody; what is not there yet is.
    """
    over = or_(jobs.c.job_id.is_(None), flows.MET)
    behind = task_edges.outerjoin(jobs, jobs.c.job_id == task_edges.c.needs_id)
    met = select(task_edges.c.task_id, func.count().label("met")).select_from(behind)
    found = met.where(task_edges.c.task_id.in_(job_ids), over).group_by(task_edges.c.task_id)
    ended = {row.task_id: row.met for row in conn.execute(found)}
    needs = conn.execute(by_key(select(jobs.c.job_id, jobs.c.needs), jobs).where(jobs.c.job_id.in_(job_ids)))
    waits = {row.job_id: (row.needs or 0) - ended.get(row.job_id, 0) for row in needs}
    for count in sorted({count for count in waits.values() if count > 0}):
        _block(conn, [job_id for job_id, wanted in waits.items() if wanted == count], count)


def _call_back(conn: Connection, job_ids: Sequence[str], but: Collection[str]) -> None:
    """Those that need these tasks and have not started wait for them again; `but` those that start over themselves."""
    found = select(task_edges.c.task_id, func.count().label("more")).where(task_edges.c.needs_id.in_(job_ids))
    more = {row.task_id: row.more for row in conn.execute(found.group_by(task_edges.c.task_id))} if job_ids else {}
    for count in sorted(set(more.values())):
        ids = [task_id for task_id, wanted in more.items() if wanted == count and task_id not in but]
        _block(conn, ids, func.coalesce(jobs.c.waits_for, 0) + count)


def _block(conn: Connection, job_ids: Sequence[str], waits_for: Any) -> None:
    columns = {"wait_reason": None, "published_at": None, "not_before": None, "start_by": None}
    blocking = {"queued": Queued.BLOCKED, "blocked_on": blocked.TASKS, "waits_for": waits_for}
    for some in some_at_a_time(sorted(job_ids)):
        waiting = by_key(update(jobs)).where(jobs.c.job_id.in_(some), jobs.c.queued.is_not(None))
        conn.execute(waiting.values(columns | blocking))
