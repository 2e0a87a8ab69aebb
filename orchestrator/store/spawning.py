"""Tasks that running jobs add: staged beside the attempt, and made jobs once it succeeded.

Staged rows are fenced by job and attempt, and mean nothing by themselves. The transaction that ends the attempt well
writes one row (`spawns`), whatever the number of tasks; after it they become jobs, a batch in each transaction, by the
worker that settled or by the leader: whoever holds that row. What attempts staged that ended otherwise is deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, Row, Select, and_, delete, or_, select, update

from orchestrator import spawning
from orchestrator.admission import FREELY, Admitted
from orchestrator.errors import InvalidInput
from orchestrator.gates import CAPACITY, FOR_UNITS, QUIET, UNTIL_QUIET
from orchestrator.jobs import OWNED, NewJob, RetryPolicy
from orchestrator.policies import Book
from orchestrator.spawning import Spawned
from orchestrator.store import flows
from orchestrator.store.blocked import TASKS
from orchestrator.store.database import Database
from orchestrator.store.dialect import by_key, upsert
from orchestrator.store.held import held
from orchestrator.store.hot import insert_rows
from orchestrator.store.schema import jobs, spawns, task_edges, task_stages, workflows
from orchestrator.store.submit import Entering, enter, meeting_nobody, no_policies
from orchestrator.telemetry import tracing
from orchestrator.workflows import FlowStatus, Limits, Sweep

#: Tasks that become jobs in one transaction.
BATCH = 500


@dataclass(frozen=True)
class Parent:
    """The job that adds tasks: what they have from it, unless they say otherwise."""

    workflow_id: str
    agent: str
    pool_id: str
    priority: int = 0
    trace_context: str | None = None

    def job(self, task: Spawned, limits: Limits) -> NewJob:
        """Raises InvalidInput or PayloadTooLarge."""
        usual = {"pool_id": self.pool_id, "priority": self.priority}
        own = {
            "type": task.type,
            "payload": task.payload,
            "job_id": task.job_id,
            "workflow_id": self.workflow_id,
            "agent": self.agent,
        }
        return NewJob.prepare(usual | task.options | own, limits.max_bytes, limits.max_depth, self.trace_context)


def check(body: str, parent: Parent, limits: Limits) -> None:
    """Raises InvalidInput for a frame of which no jobs can be made."""
    for task in spawning.samples(body):
        parent.job(task, limits)


def stage(conn: Connection, job_id: str, attempt: int, seq: int, body: str) -> None:
    """Keep a frame of tasks for when the attempt succeeds. Again is fine."""
    upsert(conn, task_stages, [{"job_id": job_id, "attempt": attempt, "seq": seq, "body": body}], lambda _new: {})


class Marked(NamedTuple):
    """An attempt whose tasks are to be made jobs."""

    job_id: str
    attempt: int


#: Attempts that added tasks, and succeeded, of workflows that run.
MARKED = (
    select(spawns.c.job_id, spawns.c.attempt)
    .join(workflows, workflows.c.workflow_id == spawns.c.workflow_id)
    .where(workflows.c.status == FlowStatus.RUNNING)
)
#: Tasks that anybody added and nobody made jobs of: of these `forget_lost` looks for what is lost.
STAGED = select(task_stages.c.job_id)


def marked(conn: Connection, limit: int) -> list[Marked]:
    return [Marked(*row) for row in conn.execute(MARKED.limit(limit))]


@dataclass(frozen=True)
class Rules:
    """By which tasks become jobs."""

    policy: RetryPolicy
    limits: Limits
    book: Callable[[Connection], Book] = no_policies


@dataclass
class Made:
    """What one transaction made of an attempt's tasks."""

    count: int = 0
    #: Whether there is more, or somebody else is at it.
    more: bool = False
    busy: bool = False
    lanes: set[str] = field(default_factory=set)


def make_some(
    db: Database, one: Marked, rules: Rules, write: Callable[[Callable[[Connection], Made]], Made] | None = None
) -> Made:
    """The next batch, in a transaction of its own (`write`: of the leader's)."""
    return meeting_nobody(lambda: (write or db.write)(lambda conn: make(conn, db, one, rules)))


def make(conn: Connection, db: Database, one: Marked, rules: Rules) -> Made:
    """The next tasks of this attempt become jobs, unless somebody else is at it, or its workflow runs no more."""
    own = and_(spawns.c.job_id == one.job_id, spawns.c.attempt == one.attempt)
    marker = conn.execute(select(spawns).where(own).with_for_update(skip_locked=True)).one_or_none()
    if marker is None:
        return Made(busy=conn.execute(select(spawns.c.job_id).where(own)).first() is not None)
    # After the lock: whoever stops the workflow waits for it, and we see what he wrote.
    status = conn.execute(select(workflows.c.status).where(workflows.c.workflow_id == marker.workflow_id)).scalar()
    if status != FlowStatus.RUNNING:
        return Made()
    frames = select(task_stages).where(task_stages.c.job_id == one.job_id, task_stages.c.attempt == one.attempt)
    frame = conn.execute(frames.order_by(task_stages.c.seq).limit(1)).one_or_none()
    if frame is None:
        return _give_up(conn, marker, "tasks that it staged are gone")
    try:
        found = spawning.tasks(frame.body, frame.made, BATCH)
        parent = _parent(conn, marker)
        new = [(task, parent.job(task, rules.limits)) for task in found]
    except InvalidInput as wrong:
        return _give_up(conn, marker, wrong.message)
    _insert(conn, db, marker.workflow_id, new, rules)
    _advance(conn, marker, frame, len(found))
    lanes = {job.spec.pool_id for _, job in new}
    return Made(len(found), more=marker.remaining > len(found), lanes=lanes)


def _parent(conn: Connection, marker: Row[Any]) -> Parent:
    columns = (jobs.c.agent, jobs.c.lane, jobs.c.priority, jobs.c.trace_context)
    found = Parent(marker.workflow_id, *conn.execute(select(*columns).where(jobs.c.job_id == marker.job_id)).one())
    return replace(found, trace_context=tracing.added_by(found.trace_context, marker.job_id, marker.attempt))


def _insert(
    conn: Connection, db: Database, workflow_id: str, new: Sequence[tuple[Spawned, NewJob]], rules: Rules
) -> None:
    waits = _waits(conn, workflow_id, [task for task, _ in new])
    book = rules.book(conn)
    entering = [
        Entering(
            job,
            _how(job, waits[task.job_id], book),
            needs=(task.parts or 0) + len(task.needs),
            waits_for=waits[task.job_id],
            optional=task.optional,
        )
        for task, job in new
    ]
    enter(conn, db, entering, rules.policy, lambda _conn: book)
    edges = [
        {"task_id": task.job_id, "position": place, "needs_id": needed}
        for task, _ in new
        for place, needed in enumerate(task.needs)
    ]
    edges += [
        {"task_id": task.feeds[0], "position": task.feeds[1], "needs_id": task.job_id} for task, _ in new if task.feeds
    ]
    insert_rows(conn, task_edges, edges)


def _waits(conn: Connection, workflow_id: str, found: Sequence[Spawned]) -> dict[str, int]:
    """For how many tasks each waits. Those of a map come after the one that collects them: it waits for all."""
    needed = {one for task in found for one in task.needs}
    over: set[str] = set()
    if needed:
        # Under this lock nobody's end passes unseen: who ends one of them later finds our edge.
        flows.lock_one(conn, workflow_id)
        met = by_key(select(jobs.c.job_id), jobs).where(jobs.c.job_id.in_(sorted(needed)), flows.MET)
        over = set(conn.execute(met).scalars())
    return {task.job_id: (task.parts or 0) + sum(one not in over for one in task.needs) for task in found}


def _how(job: NewJob, waits: int, book: Book) -> Admitted:
    """Whoever may add tasks was let in; what they cost or want of the time is asked as always."""
    if waits:
        return Admitted(TASKS, f"waits for {waits} tasks")
    if job.spec.constraints:
        return Admitted(QUIET, UNTIL_QUIET)
    if job.spec.cost_units and book.admission.capacity:
        return Admitted(CAPACITY, FOR_UNITS)
    return FREELY


def _advance(conn: Connection, marker: Row[Any], frame: Row[Any], made: int) -> None:
    own = and_(
        task_stages.c.job_id == frame.job_id, task_stages.c.attempt == frame.attempt, task_stages.c.seq == frame.seq
    )
    if frame.made + made >= spawning.count(frame.body):
        conn.execute(delete(task_stages).where(own))
    else:
        conn.execute(update(task_stages).where(own).values(made=frame.made + made))
    mark = and_(spawns.c.job_id == marker.job_id, spawns.c.attempt == marker.attempt)
    if marker.remaining <= made:
        conn.execute(delete(spawns).where(mark))
    else:
        conn.execute(update(spawns).where(mark).values(remaining=marker.remaining - made))


def _give_up(conn: Connection, marker: Row[Any], why: str) -> Made:
    """What is left of it can never become jobs: its workflow fails, and does not wait for them."""
    flow = flows.lock_one(conn, marker.workflow_id)
    reason = f"tasks of {marker.job_id} cannot be made: {why}"
    left = flow.total - marker.remaining
    flows.end(conn, flow.workflow_id, FlowStatus.FAILED, reason, sweep=Sweep.PENDING, total=left)
    conn.execute(delete(spawns).where(spawns.c.job_id == marker.job_id, spawns.c.attempt == marker.attempt))
    _forget(conn, [Marked(marker.job_id, marker.attempt)])
    return Made()


def forget_lost(conn: Connection, limit: int) -> int:
    """Delete what attempts staged that ended and did not succeed, unless somebody holds it; how many frames."""
    of_job = jobs.c.job_id == task_stages.c.job_id
    of_mark = and_(spawns.c.job_id == task_stages.c.job_id, spawns.c.attempt == task_stages.c.attempt)
    over = or_(jobs.c.job_id.is_(None), jobs.c.attempt != task_stages.c.attempt, jobs.c.status.not_in(sorted(OWNED)))
    lost = (
        select(task_stages.c.job_id, task_stages.c.attempt)
        .select_from(task_stages.outerjoin(jobs, of_job).outerjoin(spawns, of_mark))
        .where(spawns.c.job_id.is_(None), over)
        .distinct()
        .limit(limit)
    )
    found = {Marked(*row) for row in conn.execute(lost)}
    in_use = {Marked(*key[:2]) for key in held(conn, _frames(found))} if found else set()
    return _forget(conn, sorted(found - in_use))


def _frames(attempts: Collection[Marked]) -> Select[Any]:
    keys = (task_stages.c.job_id, task_stages.c.attempt, task_stages.c.seq)
    return by_key(select(*keys), task_stages).where(_of(attempts))


def _of(attempts: Collection[Marked]) -> ColumnElement[bool]:
    # Not pairs in a list: for those the planner reads, and locks, the whole table.
    stage = task_stages.c
    return or_(*[and_(stage.job_id == one.job_id, stage.attempt == one.attempt) for one in sorted(attempts)])


def _forget(conn: Connection, attempts: Sequence[Marked]) -> int:
    return conn.execute(delete(task_stages).where(_of(attempts))).rowcount if attempts else 0
